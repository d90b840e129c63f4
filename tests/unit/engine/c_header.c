/* kvferry.h as a C99 program sees it; compiled with -std=c99 -pedantic-errors, and run. */
#include "kvferry.h"

#include <stdio.h>
#include <string.h>

int main(void) {
  kvf_pool pool;
  kvf_engine* engine = NULL;
  char error[256];
  memset(&pool, 0, sizeof(pool));
  pool.struct_size = (uint32_t)sizeof(pool);
  pool.dtype = "bf16";
  if (kvf_attach("no/such/socket", &pool, &engine, error, sizeof(error)) != -KVF_UNAVAILABLE) {
    fprintf(stderr, "attach without a daemon: %s\n", error);
    return 1;
  }
  return engine == NULL && strlen(kvf_version()) > 0 ? 0 : 1;
}
