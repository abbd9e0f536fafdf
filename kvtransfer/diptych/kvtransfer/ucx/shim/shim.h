/* The face of the UCX shim: one-sided page writes, notes and link events, for callers without C. Its one translation unit
 * is shim_unit.c.
 *
 * Plain C, no Python: any language with a foreign function interface can use it. An engine owns one UCX worker and one
 * thread that drives it. All functions below are for one caller thread and none of them blocks, except where noted.
 *
 * Ordering, per link and stream. Operations are performed in the order they were submitted: a note arrives after every
 * page of its own and of all earlier writes. When one failed, all later ones of its stream fail too, except in stream 0.
 * Streams take turns by bytes, those of a higher priority first. Each accepted operation ends in exactly one KVT_OP_DONE.
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
#define KVT_HANDLE_BYTES 64
#define KVT_KEY_BYTES 16
#define KVT_ANY_PEER UINT64_MAX /* any that is linked */

typedef struct kvt_engine kvt_engine;
typedef struct kvt_link kvt_link;
struct page_pack; /* and page_parts: of page_pack.h, of the CPU kernels */
struct page_parts;

enum {
    KVT_OK = 0,
    KVT_FULL = -1,     /* too much is in flight: poll, and try again */
    KVT_NO_LINK = -2,  /* the link is not up */
    KVT_OUT_OF_RANGE = -3,    /* a page that one of the pools does not have; nothing was written */
    KVT_TOO_LONG = -4, /* a note of more than KVT_MAX_NOTE_BYTES */
    KVT_OUT_OF_MEMORY = -5,   /* out of memory */
    KVT_NO_PATH = -6,   /* pages can't travel so on this link */
    KVT_BUSY = -7,     /* operations of the link are open */
    KVT_DEVICE = -8,   /* the device failed */
};

enum {
    KVT_LINK_UP = 1,   /* both directions were proven */
    KVT_LINK_DOWN = 2, /* `text` says why; the link handle is the caller's to release */
    KVT_NOTE = 3,      /* `data`, `data_len`; `digest` of what its stream wrote */
    KVT_OP_DONE = 4,   /* `op`; `text` is the error, or NULL; `digest` of what it wrote, or of the pages */
};

/* How pages travel, from the best to the worst: see copy/host_pages.c and copy/device_pages.c. */
enum { KVT_PATH_COPY, KVT_PATH_MOVER, KVT_PATH_PUT, KVT_PATH_MESSAGE, KVT_PATH_STAGED };

typedef struct {
    int32_t kind;
    int32_t has_digest;
    uint64_t digest;
    uint64_t peer;
    uint64_t op;
    const char *text; /* this and `data` live until the next kvt_poll */
    const void *data;
    uint64_t data_len;
    double seconds; /* of KVT_OP_DONE: from its submission to its end */
} kvt_event;

typedef struct {
    uint64_t instance_id;        /* ours; not 0 */
    double heartbeat_s;          /* how often a link says that it lives */
    uint32_t heartbeat_misses;   /* a link is down when it was silent for so many heartbeats */
    double connect_timeout_s;    /* a link that is not up after this is down */
    uint32_t max_operations;
    uint32_t max_waiting_notes;
    int32_t with_remote_access;  /* hardware of this host can write into memory of others, and others' into ours */
    int32_t only_granted;        /* peers' messages write into pages that kvt_grant_pages named, and into no other */
    uint8_t key[KVT_KEY_BYTES];  /* random: what a message must carry to be taken in */
    const char *const *settings; /* UCX settings as "NAME", "VALUE", ..., NULL */
} kvt_options;

typedef struct {
    const void *address; /* UCX worker address */
    uint64_t address_len;
    const void *pool_key;
    uint64_t pool_key_len;
    uint64_t pool_base; /* in the peer's address space */
    uint64_t num_pages;
    uint64_t page_nbytes; /* a multiple of 8 */
    const void *device_handle; /* KVT_HANDLE_BYTES; NULL: no device memory that we could map */
    uint8_t key[KVT_KEY_BYTES]; /* the peer's kvt_options.key */
} kvt_peer;

/* What moves of each page the same way: a region of it, or several that lie together. */
typedef struct {
    uint64_t num_pages;
    const int64_t *src, *dst;       /* page src[i] of our pool goes to page dst[i] of the peer's ... */
    uint64_t src_offset, dst_offset; /* ... but of each only these bytes: multiples of 8 */
    uint64_t nbytes;
    const struct page_pack *pack; /* NULL, or: dst[i] receives the image that begins with token number first_tokens[i] ... */
    const int64_t *first_tokens;  /* ... of those in the `num_src` pages `src`; bytes and offset of it in whole rows */
    uint64_t num_src;
} kvt_copy;

typedef struct {
    uint64_t num_copies;
    const kvt_copy *copies;
    const void *note; /* sent when all of that was written */
    uint64_t note_len;
    uint64_t stream;
    int32_t priority;
    int32_t with_digest; /* of what is written; the stream's next note carries it */
    int32_t has_digest;  /* the note carries `digest` in place of the stream's */
    uint64_t digest;
    double timeout_s; /* 0: none */
} kvt_operation;

typedef struct {
    uint64_t bytes_sent; /* of pages, handed to UCX */
    double last_heard_s; /* since the peer was last heard */
    double rtt_s;        /* of a heartbeat; 0: not known yet */
    uint64_t in_flight_bytes; /* of pages: handed to UCX, not complete */
    uint64_t queued_bytes;    /* of pages: submitted, not handed to UCX */
    uint32_t paths;      /* that pages can travel: bits 1 << KVT_PATH_... */
    int32_t path;        /* that they do */
    char lanes[256];     /* "sysv/memory, tcp/lo" */
} kvt_link_status;

/* A compiled kernel. */
typedef struct {
    const void *binary;
    const char *name;
    uint32_t num_warps, shared_nbytes, num_programs;
    uint32_t chunk; /* of packers, in cells, and of the unpacker, in words of 8 bytes: heads are multiples of it */
} kvt_kernel;

/* Which kernel is which. Those that pack cells of one type as cells of another, as page_pack.h numbers them, are
 * KVT_PACKERS + source * KVT_NUM_CELL_TYPES + target. The mover and the digester are there in any case. */
enum { KVT_MOVER, KVT_DIGESTER, KVT_UNPACKER, KVT_PACKERS };
#define KVT_NUM_CELL_TYPES 4
#define KVT_NUM_KERNELS (KVT_PACKERS + KVT_NUM_CELL_TYPES * KVT_NUM_CELL_TYPES)

enum { KVT_CUDA = 1, KVT_EMULATED = 2 }; /* the second is for tests on machines without a device */

typedef struct {
    int32_t kind;
    int32_t ordinal; /* of the device, as the program sees them */
    kvt_kernel kernels[KVT_NUM_KERNELS]; /* without a binary: there is none */
} kvt_device_options;

/* Open UCX. Returns NULL with a message in `error`. One engine a process: a second one is refused.
 * Unknown settings are listed in `error` when the engine is returned. */
kvt_engine *kvt_create(const kvt_options *options, char *error, size_t error_size);

/* Allocate and zero the page pool, and start the thread. Once; blocks until every page was touched. */
int kvt_allocate(kvt_engine *engine, uint64_t page_nbytes, uint64_t num_pages, void **base, char *error, size_t error_size);

/* The same in the memory of a device; `base` is an address there. Pages, and what is moved or packed of them, are multiples of
 * 128. */
int kvt_allocate_on_device(kvt_engine *engine, const kvt_device_options *options, uint64_t page_nbytes, uint64_t num_pages,
                           void **base, char *error, size_t error_size);

/* Copy a page of ours from or to host memory: for tests and tools, it blocks. */
int kvt_copy_page(kvt_engine *engine, int64_t page, void *bytes, int to_device);

/* Let operations that are submitted after this wait for what `stream` of the program has been given so far. */
int kvt_follow(kvt_engine *engine, uint64_t stream);

/* What a peer needs to connect to us: valid after kvt_allocate, until kvt_destroy. */
void kvt_self(kvt_engine *engine, kvt_peer *out);

/* The IP addresses of this host, one a line, as many as there is room for. Needs no engine. */
void kvt_own_addresses(char *out, size_t size);

/* Begin to link. KVT_LINK_DOWN follows in any case, after KVT_LINK_UP if it comes to that. NULL: out of memory. */
kvt_link *kvt_connect(kvt_engine *engine, uint64_t peer, const kvt_peer *info);
void kvt_disconnect(kvt_link *link);
/* Free a link handle, after its KVT_LINK_DOWN was polled. */
void kvt_release(kvt_link *link);

/* Write pages, flush, then send the note if it is not empty. Returns the operation (> 0), or KVT_FULL ... KVT_OUT_OF_MEMORY.
 * The arguments are copied; source pages must not change until the operation is done. */
int64_t kvt_submit(kvt_link *link, const kvt_operation *wanted);

/* Compute the digest of pages of ours as they lie here, beside other work. Returns as kvt_submit does. */
int64_t kvt_digest_pages(kvt_engine *engine, uint64_t num_pages, const int64_t *pages);

/* Put what landed in `num_regions` regions of our pages as parts side by side, beside other work and after the digests asked
 * for before. Returns as kvt_submit does. */
int64_t kvt_unpack_pages(kvt_engine *engine, uint64_t num_pages, const int64_t *pages, uint64_t num_regions,
                         const struct page_parts *regions);

/* Let a peer, or KVT_ANY_PEER, write into pages of ours until kvt_revoke_pages. This binds what peers send in messages, with
 * only_granted; what they put or copy themselves is beyond our reach. KVT_OK or KVT_OUT_OF_RANGE. */
int kvt_grant_pages(kvt_engine *engine, uint64_t peer, uint64_t num_pages, const int64_t *pages);
int kvt_revoke_pages(kvt_engine *engine, uint64_t num_pages, const int64_t *pages);

/* Let pages travel by another path from the next operation on, while none is open. KVT_OK, KVT_NO_LINK, KVT_NO_PATH, KVT_BUSY. */
int kvt_use_path(kvt_link *link, int32_t path);

/* Take at most `capacity` events. */
int kvt_poll(kvt_engine *engine, kvt_event *events, int capacity);
/* Readable exactly while kvt_poll has events. */
int kvt_event_fd(kvt_engine *engine);

void kvt_describe(kvt_link *link, kvt_link_status *out);
/* Messages that belonged to no link of ours: for a former instance, for a former link, or before we connected. */
uint64_t kvt_num_dropped_messages(kvt_engine *engine);
/* Messages without our key. */
uint64_t kvt_num_unauthenticated(kvt_engine *engine);
/* Messages with pages that were not granted to their sender; each ended its link. */
uint64_t kvt_num_ungranted(kvt_engine *engine);

/* Close every link, stop the thread, free the pool. Blocks for at most about two seconds. Release the
 * link handles that are left after it. */
void kvt_destroy(kvt_engine *engine);

#endif
