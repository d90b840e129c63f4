/* kvferry.h - how an inference engine attaches to a KVFerry daemon. C ABI, C99 and later.
 *
 * One kvf_engine is one rank's connection to the daemon of its host, over a Unix socket. The engine hands
 * over its pool once (memfds sealed with F_SEAL_SHRINK, passed as descriptors) and then only names pages.
 *
 * Threads: one kvf_engine may be used by one thread at a time; different ones are independent.
 * Errors: calls return 0 or a negative kvf_code; kvf_last_error() has the sentence that names the field, the
 * values and the fix. A refused call changes nothing and may be repeated. A call that the daemon does not
 * answer within 10 s (attach: plus 1 s per GiB of pool) returns -KVF_DEADLINE, and the connection is over.
 * Pages: after an accepted kvf_send / kvf_expect the pages belong to the daemon until the room's final event
 * (LANDED, FAILED, ABORTED). Exactly one final event follows for each accepted room, also when the peer, or
 * the daemon, dies (then kvf_next_event returns -KVF_UNAVAILABLE once the connection is gone: re-attach).
 */
#ifndef KVFERRY_H
#define KVFERRY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVF_API __attribute__((visibility("default")))
#else
#define KVF_API
#endif

#ifdef __cplusplus
#define KVF_NOEXCEPT noexcept
#else
#define KVF_NOEXCEPT
#endif

/* Same numbers as in messages between daemons; calls return them negated. */
typedef enum kvf_code {
  KVF_OK = 0,
  KVF_INVALID = 1, /* malformed or illegal argument */
  KVF_NOT_FOUND = 2,
  KVF_CONFLICT = 3,  /* the room is alive already */
  KVF_MISMATCH = 4,  /* the two sides do not fit; the message lists every rule */
  KVF_EXHAUSTED = 5, /* a limit is reached: try again later */
  KVF_UNAUTHORIZED = 6,
  KVF_DEADLINE = 10,
  KVF_PEER_LOST = 11,
  KVF_ABORTED_CODE = 12,
  KVF_ENGINE_LOST = 13,
  KVF_UNAVAILABLE = 14, /* not connected, shutting down */
  KVF_TRANSPORT = 20,
  KVF_PROTOCOL = 21,
  KVF_CORRUPT = 22,
  KVF_IO = 30,
  KVF_INTERNAL = 31
} kvf_code;

typedef enum kvf_buffer_kind {
  KVF_KEY = 0,
  KVF_VALUE = 1,
  KVF_LATENT = 2,
  KVF_INDEX_KEY = 3,   /* sparse-attention indexer: keys, */
  KVF_INDEX_SCALE = 4, /* and their scales */
  KVF_CONV = 5,        /* linear attention: convolution inputs, one row per request */
  KVF_RECURRENT = 6    /* linear attention: recurrent state, one row per request */
} kvf_buffer_kind;

/* One buffer: `pages` pages of `page_rows` rows of row_bytes, the first `offset` bytes into descriptor `fd`,
 * the next `page_stride` bytes further on. A draft model's layers (ids from the model's layer count on) are
 * on every DCP rank whole: their pages have page_size * dcp rows. State buffers have one row per page. */
typedef struct kvf_buffer {
  uint32_t layer; /* global layer id */
  uint32_t kind;  /* kvf_buffer_kind */
  uint32_t row_bytes;
  uint64_t pages;
  int fd; /* the same descriptor may serve many buffers; it is duplicated, not taken over */
  uint64_t offset;
  uint32_t page_rows;   /* 0: page_size */
  uint64_t page_stride; /* bytes, a multiple of row_bytes; 0: page_rows * row_bytes */
} kvf_buffer;

/* One aux field: `slots` rows of `width` bytes. A field named "bootstrap_room" holds the room as uint64. */
typedef struct kvf_aux_field {
  const char* name;
  uint32_t width;
  uint32_t slots;
  int fd;
  uint64_t offset;
} kvf_aux_field;

typedef struct kvf_pool {
  uint32_t struct_size; /* sizeof(kvf_pool), for the ABI's future */
  uint32_t tp_rank, pp_rank, cp_rank, dp_rank;
  uint32_t page_size; /* tokens per physical page */
  const char* dtype;  /* "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp32", "int8" */
  const kvf_buffer* buffers;
  size_t buffer_count;
  const kvf_aux_field* aux;
  size_t aux_count;
} kvf_pool;

/* What a request of a hybrid model needs beside its pages; all zero for other models. Each rank names what
 * its own buffers have: a PP stage without a row per token (linear-attention or sliding-window layers only)
 * gives no pages, one without sliding-window layers no window pages, one without linear attention no state.
 */
typedef struct kvf_hybrid {
  const uint32_t* window_pages; /* of the sliding-window layers, which have pages of their own */
  size_t window_page_count;
  uint64_t window_first; /* token of the first of them: a multiple of the virtual page */
  int has_state;         /* non-zero: state_slot names the request's row in the state buffers */
  uint32_t state_slot;
} kvf_hybrid;

/* Prefill: tokens [first_token, first_token + token_count) of the room lie in `pages`. first_token is a
 * multiple of the virtual page; chunks of a room follow each other without gaps, the first starts at 0 or at
 * the decode prefix that KVF_EVENT_GRANTED reported. Only the last chunk may end inside a page. The last
 * chunk may be empty. Where decode has several pipeline stages, each of them takes the aux row from a prefill
 * stage that it meets: then the engines of every prefill stage name an aux_slot.
 *
 * By layers: the same tokens may be sent by several calls, each for the layers [layer_begin, layer_end) as
 * they are computed, with a ready_fd of its own. These calls have the same first_token, token_count and
 * pages. Their ranges ascend without gaps; the first begins at or below this rank's first layer; each holds
 * at least one layer of this rank. The one that ends behind this rank's last layer (draft layers, whose ids
 * follow the model's, included) completes the tokens, and only then others may follow. `last`, aux_slot and
 * hybrid come with the completing call only; the rows of sliding windows and recurrent state go then,
 * whatever their layer, so they are ready with its ready_fd. Each call counts as a chunk in the daemon's
 * limits.chunks_per_room. */
typedef struct kvf_chunk {
  uint32_t struct_size; /* the size without the layers is legal, too, and means all of them */
  uint64_t room;        /* 1 .. 2^63-1 */
  const uint32_t* pages;
  size_t page_count;
  uint64_t first_token;
  uint64_t token_count;
  int last;          /* non-zero: the request is complete; aux_slot is read now */
  int aux_slot;      /* -1 = none; only with last */
  int ready_fd;      /* -1 = pages are ready; else an eventfd that becomes readable when they are */
  kvf_hybrid hybrid; /* only with last; window pages reach from window_first to the last token */
  uint32_t layer_begin, layer_end; /* global layer ids, end exclusive; both 0: all layers of this rank */
} kvf_chunk;

/* Decode: the whole request needs token_count tokens, the first `prefix` of them are here already; `pages`
 * are the destination for [prefix, token_count). prefix is a multiple of the virtual page (page_size * dcp).
 */
typedef struct kvf_expectation {
  uint32_t struct_size;
  uint64_t room;
  const char* bootstrap; /* "host:port" of the prefill service's bootstrap server */
  const uint32_t* pages;
  size_t page_count;
  uint64_t prefix;
  uint64_t token_count;
  int aux_slot;        /* -1 = none */
  int prefill_dp_rank; /* -1 = room mod dp, or as the bootstrap server says */
  kvf_hybrid hybrid;   /* window pages cover at least the last sliding-window tokens after the prefix */
} kvf_expectation;

typedef enum kvf_event_type {
  KVF_EVENT_NONE = 0,
  KVF_EVENT_GRANTED = 1,    /* prefill: decode is there; `tokens` = decode's prefix */
  KVF_EVENT_CHUNK_DONE = 2, /* prefill: what the kvf_send with first_token `tokens` and this `layer_end` sends
                               has been read by all peers; the pages are read when all their layers are */
  KVF_EVENT_LANDED = 3,     /* final, both sides; `tokens` = request length, `bytes` moved for this rank */
  KVF_EVENT_FAILED = 4,     /* final; code and reason */
  KVF_EVENT_ABORTED = 5     /* final; after the drain: pages may be reused */
} kvf_event_type;

typedef struct kvf_event {
  uint32_t struct_size;
  uint32_t type; /* kvf_event_type */
  uint64_t room;
  uint64_t tokens;
  uint64_t bytes;
  uint64_t transfer_ns; /* LANDED: first post (prefill) or grant (decode) to landing */
  int32_t code;         /* kvf_code of a FAILED or ABORTED room */
  char reason[512];     /* empty unless FAILED or ABORTED */
  uint32_t layer_end;   /* CHUNK_DONE: as the kvf_send said; 0: all layers. Where padding was before. */
} kvf_event;

typedef struct kvf_engine kvf_engine;

/* Connects, sends the pool and waits for the daemon's answer. On failure *out is NULL and `error` has the
 * reason. */
KVF_API int kvf_attach(const char* socket_path, const kvf_pool* pool, kvf_engine** out, char* error,
                       size_t error_size) KVF_NOEXCEPT;
KVF_API int kvf_send(kvf_engine* engine, const kvf_chunk* chunk) KVF_NOEXCEPT;
KVF_API int kvf_expect(kvf_engine* engine, const kvf_expectation* expectation) KVF_NOEXCEPT;
/* Asks for the end of the room. KVF_EVENT_ABORTED (or the other final event that won) follows. */
KVF_API int kvf_abort(kvf_engine* engine, uint64_t room, const char* reason) KVF_NOEXCEPT;
/* The next event, waiting up to timeout_ms (-1: for ever, 0: not at all). Returns 1 with an event, 0 without.
 */
KVF_API int kvf_next_event(kvf_engine* engine, kvf_event* event, int timeout_ms) KVF_NOEXCEPT;
/* Readable when kvf_next_event may have something; for poll/epoll. Drain with timeout 0 after each wake-up.
 */
KVF_API int kvf_event_fd(const kvf_engine* engine) KVF_NOEXCEPT;
/* 1 when no other process can write the memory of this pool descriptor on its own any more, 0 while one can,
 * -code when that cannot be told. For a decode engine whose daemon died (KVF_UNAVAILABLE from any call):
 * every room of it has failed, and its pages may be used again from 50 ms after that on, as soon as this says
 * 1 for each descriptor of the pool. Over shm a prefill daemon may be in the middle of a copy until then. Ask
 * before you attach again: the next attachment gives the pool to writers anew, and this cannot tell them from
 * the old ones. */
KVF_API int kvf_writers_gone(int fd) KVF_NOEXCEPT;
/* Aborts what is alive and frees the engine. The daemon keeps the pool mapped until everything is drained. */
KVF_API void kvf_detach(kvf_engine* engine) KVF_NOEXCEPT;
KVF_API const char* kvf_last_error(const kvf_engine* engine) KVF_NOEXCEPT;
KVF_API const char* kvf_version(void) KVF_NOEXCEPT;

#ifdef __cplusplus
}
#endif
#endif /* KVFERRY_H */
