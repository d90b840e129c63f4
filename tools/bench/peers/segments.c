// What the two workers do to memory that NumPy would do in another pattern or too slowly: copy a list of
// segments with memcpy (the yardstick of every ratio), fill a pool with a pattern that depends on the
// position, and check a list of segments against it. Offsets and lengths are bytes, multiples of 8.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint64_t word_at(uint64_t index, uint64_t seed) {
  uint64_t x = (index + seed) * 0x9e3779b97f4a7c15u;
  x ^= x >> 32;
  return x * 0xd6e8feb86659fd93u;
}

void copy_segments(char* dst, const char* src, const uint64_t* dst_at, const uint64_t* src_at,
                   const uint64_t* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    memcpy(dst + dst_at[i], src + src_at[i], bytes[i]);
  }
}

void fill_pattern(char* pool, uint64_t bytes, uint64_t seed) {
  uint64_t* words = (uint64_t*)pool;
  for (uint64_t i = 0; i < bytes / 8; ++i) {
    words[i] = word_at(i, seed);
  }
}

// Words of the segments in dst that are not what fill_pattern() put at their source. Sets them to `blank`.
uint64_t check_segments(char* dst, const uint64_t* dst_at, const uint64_t* src_at, const uint64_t* bytes,
                        size_t count, uint64_t seed, uint64_t blank) {
  uint64_t wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    uint64_t* words = (uint64_t*)(dst + dst_at[i]);
    for (uint64_t k = 0; k < bytes[i] / 8; ++k) {
      wrong += words[k] != word_at(src_at[i] / 8 + k, seed);
      words[k] = blank;
    }
  }
  return wrong;
}

// Words of the pool that are not `blank`: written by nobody who was asked to.
uint64_t count_strays(const char* pool, uint64_t bytes, uint64_t blank) {
  const uint64_t* words = (const uint64_t*)pool;
  uint64_t strays = 0;
  for (uint64_t i = 0; i < bytes / 8; ++i) {
    strays += words[i] != blank;
  }
  return strays;
}

void set_blank(char* pool, uint64_t bytes, uint64_t blank) {
  uint64_t* words = (uint64_t*)pool;
  for (uint64_t i = 0; i < bytes / 8; ++i) {
    words[i] = blank;
  }
}
