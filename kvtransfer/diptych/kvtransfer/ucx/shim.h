/* The face of the UCX shim: one-sided page writes, notes and link events, for callers without C.
 *
 * Plain C, no Python: any language with a foreign function interface can use it. An engine owns one UCX worker and one
 * thread that drives it. All functions below are for one caller thread and none of them blocks, except where noted.
 *
 * Ordering, per link. Operations are performed in the order they were submitted: a note arrives after every page of its
 * own and of all earlier writes, and notes arrive in order. Each accepted operation ends in exactly one KVT_OP_DONE.
 * KVT_LINK_DOWN is the last event of a link: all its operations have ended, and nothing of ours writes to the peer.
 *
 * Bounds. At most max_operations are open (submitted, and their KVT_OP_DONE not polled); more is KVT_FULL. When more than
 * max_waiting_notes pile up because the caller does not poll, the engine stops receiving: the senders wait.
 */
#ifndef KVT_SHIM_H
#define KVT_SHIM_H

#include <stddef.h>
#include <stdint.h>

#define KVT_MAX_NOTE_BYTES (16 << 20)

typedef struct kvt_engine kvt_engine;
typedef struct kvt_link kvt_link;

enum {
    KVT_OK = 0,
    KVT_FULL = -1,     /* too much is in flight: poll, and try again */
    KVT_NO_LINK = -2,  /* the link is not up */
    KVT_RANGE = -3,    /* a page that one of the pools does not have; nothing was written */
    KVT_TOO_LONG = -4, /* a note of more than KVT_MAX_NOTE_BYTES */
    KVT_MEMORY = -5,   /* out of memory */
};

enum {
    KVT_LINK_UP = 1,   /* both directions were proven */
    KVT_LINK_DOWN = 2, /* `text` says why; the link handle is the caller's to release */
    KVT_NOTE = 3,      /* `data`, `data_len` */
    KVT_OP_DONE = 4,   /* `op`; `text` is the error, or NULL */
};

enum { KVT_WAY_BEST = 0, KVT_WAY_PUT = 1, KVT_WAY_MESSAGE = 2 }; /* how pages travel: see pages.h */

typedef struct {
    int32_t kind;
    uint64_t peer;
    uint64_t op;
    const char *text; /* this and `data` live until the next kvt_poll */
    const void *data;
    uint64_t data_len;
} kvt_event;

typedef struct {
    uint64_t instance_id;        /* ours; not 0 */
    double heartbeat_s;          /* how often a link says that it lives */
    uint32_t heartbeat_misses;   /* a link is down when it was silent for so many heartbeats */
    double connect_timeout_s;    /* a link that is not up after this is down */
    uint32_t max_operations;
    uint32_t max_waiting_notes;
    int32_t page_way;            /* KVT_WAY_BEST, or another one for tests and measurements */
    const char *const *settings; /* UCX settings as "NAME", "VALUE", ..., NULL */
} kvt_options;

typedef struct {
    const void *address; /* UCX worker address */
    uint64_t address_len;
    const void *rkey;
    uint64_t rkey_len;
    uint64_t pool_base; /* in the peer's address space */
    uint64_t num_pages;
} kvt_peer;

typedef struct {
    uint64_t bytes_sent; /* of pages, handed to UCX */
    double last_heard_s; /* since the peer was last heard */
    char lanes[256];     /* "sysv/memory, tcp/lo" */
} kvt_link_info;

/* Open UCX. Returns NULL with a message in `error`. One engine a process: a second one is refused.
 * Unknown settings are listed in `error` when the engine is returned. */
kvt_engine *kvt_create(const kvt_options *options, char *error, size_t error_size);

/* Allocate and zero the page pool, and start the thread. Once; blocks until every page was touched. */
int kvt_allocate(kvt_engine *engine, uint64_t page_bytes, uint64_t num_pages, void **base, char *error, size_t error_size);

/* What a peer needs to connect to us: valid after kvt_allocate, until kvt_destroy. */
void kvt_self(kvt_engine *engine, kvt_peer *out);

/* Begin to link. KVT_LINK_DOWN follows in any case, after KVT_LINK_UP if it comes to that. NULL: out of memory. */
kvt_link *kvt_connect(kvt_engine *engine, uint64_t peer, const kvt_peer *info);
void kvt_disconnect(kvt_link *link);
/* Free a link handle, after its KVT_LINK_DOWN was polled. */
void kvt_release(kvt_link *link);

/* Write pages src[i] of our pool to pages dst[i] of the peer's, flush, then send the note if it is not empty.
 * Returns the operation (> 0), or KVT_FULL ... KVT_MEMORY. The arguments are copied; source pages must not change
 * until the operation is done. */
int64_t kvt_submit(kvt_link *link, uint64_t num_pages, const int64_t *src, const int64_t *dst, const void *note,
                   uint64_t note_len);

/* Take at most `capacity` events. */
int kvt_poll(kvt_engine *engine, kvt_event *events, int capacity);
/* Readable exactly while kvt_poll has events. */
int kvt_event_fd(kvt_engine *engine);

void kvt_describe(kvt_link *link, kvt_link_info *out);
/* Messages that belonged to no link of ours: for a former instance, for a former link, or before we connected. */
uint64_t kvt_num_dropped_messages(kvt_engine *engine);

/* Close every link, stop the thread, free the pool. Blocks for at most about two seconds. Release the
 * link handles that are left after it. */
void kvt_destroy(kvt_engine *engine);

#endif
