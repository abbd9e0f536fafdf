/* One-sided KV page writes and notes between processes, over UCX. The C side of diptych.kvtransfer.ucx.
 *
 * One engine a process. Its own thread makes every UCX call, so callers never wait for the network and the network never
 * waits for Python. Calls below only queue a command or take events; they are made by one thread of the caller's.
 *
 * Link: connect() names a peer and its worker address. KVT_LINK_UP comes when a message of ours was answered over
 * the peer's own endpoint. A heartbeat keeps it; silence, a UCX error, disconnect(), or the peer starting a new link ends
 * it: every operation of the link gets its KVT_OP_DONE first, then KVT_LINK_DOWN comes, and after that nothing of ours
 * writes to that peer.
 */
#ifndef DIPTYCH_KVT_SHIM_H
#define DIPTYCH_KVT_SHIM_H

#include <stddef.h>
#include <stdint.h>

typedef struct kvt_engine kvt_engine_t;

typedef struct {
    uint64_t instance_id;
    uint64_t max_operations;      /* queued or in flight; more is refused with KVT_QUEUE_FULL */
    uint64_t max_waiting_notes;   /* received and not polled; beyond it the engine stops receiving */
    uint64_t max_posted_bytes;    /* of one operation between two flushes: UCX can't cancel what is posted */
    double heartbeat_s;           /* between heartbeats */
    double silence_s;             /* without a word from a linked peer before the link is given up */
    double connect_s;             /* for a new link to come up */
} kvt_options_t;

enum { KVT_LINK_UP = 1, KVT_LINK_DOWN = 2, KVT_NOTE = 3, KVT_OP_DONE = 4 };

typedef struct {
    int32_t kind;
    int32_t status;   /* 0, or a UCX status: why a link or an operation failed */
    uint64_t peer;
    uint64_t op;      /* KVT_OP_DONE */
    uint64_t length;  /* KVT_NOTE: bytes at data, to be given to kvt_release */
    void *data;
    const char *reason; /* KVT_LINK_DOWN: in words, static */
} kvt_event_t;

/* Results below 0. */
enum { KVT_UNKNOWN_PEER = -1001, KVT_QUEUE_FULL = -1002, KVT_OUT_OF_RANGE = -1003 };

/* `settings` is "NAME=value;NAME=value", in UCX's names without their prefix. NULL on failure, with *status set. */
kvt_engine_t *kvt_open(const kvt_options_t *options, const char *settings, int *status);

/* Allocate page memory that peers can write fastest, before kvt_start. Zeroed and touched. */
int kvt_allocate(kvt_engine_t *engine, size_t num_bytes, void **address);

/* Start the engine's thread; no allocation after this. */
int kvt_start(kvt_engine_t *engine);

/* Copy out what peers need; the length, or a status below 0. */
int64_t kvt_worker_address(kvt_engine_t *engine, void *out, size_t capacity);
int64_t kvt_pool_key(kvt_engine_t *engine, void *out, size_t capacity);

int kvt_connect(kvt_engine_t *engine, uint64_t peer, const void *address, size_t address_length, const void *key,
                size_t key_length, uint64_t remote_base, uint64_t remote_bytes);
void kvt_disconnect(kvt_engine_t *engine, uint64_t peer);

/* Write pieces of our pool to the peer's, then send the note if there is one. Returns the operation, above 0. Offsets are
 * in units of piece_bytes. With count 0 only the note is sent. */
int64_t kvt_write(kvt_engine_t *engine, uint64_t peer, size_t piece_bytes, size_t count, const uint64_t *source,
                  const uint64_t *target, const void *note, size_t note_length);

/* Take up to `capacity` events, without waiting. The descriptor is readable while there are some. */
size_t kvt_poll(kvt_engine_t *engine, kvt_event_t *out, size_t capacity);
int kvt_descriptor(kvt_engine_t *engine);
void kvt_release(void *data);

/* Counters: messages dropped because they named another instance; lanes in words; bytes written to a peer; seconds since
 * it was heard (below 0: unknown peer). */
uint64_t kvt_stale_messages(kvt_engine_t *engine);
int64_t kvt_describe(kvt_engine_t *engine, uint64_t peer, char *lanes, size_t capacity, uint64_t *bytes_sent,
                     double *silent_s);

/* Close every link, stop the thread, free everything. Takes no longer than a second. */
void kvt_close(kvt_engine_t *engine);

const char *kvt_status_string(int status);

#endif
