/* What the engine needs of a device whose memory only its own copies and kernels can reach: a table of calls, so that the
 * same engine runs over CUDA (cuda.c) and over an emulation for machines without one (emulated.c).
 *
 * Work is put into queues. A queue does its work in order, beside the caller; a mark counts as reached once all work before
 * it has ended *and can be seen by everybody*: by the host, and by kernels of any device that start later. Reaching a mark
 * wakes the engine; nobody polls. Calls return NULL, or words about what failed: then the device can't be trusted any more.
 */
#ifndef KVT_DEVICE_H
#define KVT_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../shim.h"

#define MOVE_PAGES 8192 /* in one move, digest, pack or unpack */
#define PACK_ENTRIES (2 * MOVE_PAGES) /* images of one pack, and the pages that they are made of */
#define MOVE_SLOTS 24   /* of all of these in a queue before the oldest must have been reached */

typedef struct {
    uint32_t src, dst;
} page_pair;

/* `len` bytes of each page, from one pool to another. Everything is a multiple of a line. */
typedef struct {
    char *src, *dst; /* pools, as this device sees them */
    const page_pair *pages;
    uint32_t num_pages;
    uint64_t src_page_nbytes, dst_page_nbytes, src_offset, dst_offset, len;
} page_move;

#define LINE_BYTES 128 /* what the device's stores are aligned to */

/* The same rows of the images of some pages, from a pool to other memory of the device, one image behind the other. */
typedef struct {
    const char *pool;
    char *to;
    const struct page_pack *how;
    const int64_t *source; /* the pages that the tokens are in */
    int64_t num_source;
    const page_pair *images; /* `src`: the first token of each, of those in `source`; they ascend */
    uint32_t num_images;
    int64_t first_row, num_rows;
} image_pack;

/* The parts of a region of some pages, which were copied one page behind the other, to where they belong in those pages. */
typedef struct {
    char *copied;
    char *pool;
    const struct page_parts *how;
    const page_pair *pages; /* `src` */
    uint32_t num_pages;
    uint64_t page_nbytes;
} page_unpack;

typedef struct device device;

typedef struct {
    device *device;
    void *work;             /* the device's own */
    int wake_fd;            /* written to when a mark is reached */
    uint64_t num_marks;     /* the caller's thread */
    uint64_t num_seen;      /* marks that a look found reached; the caller's thread too */
    _Atomic uint64_t num_reached;
} device_queue;

typedef struct {
    const char *(*enter)(device *); /* in each thread, before its first call */
    void (*close)(device *);
    const char *(*allocate)(device *, size_t bytes, char **memory); /* zeroed */
    void (*release)(device *, char *memory);
    const char *(*lend)(device *, size_t bytes, char **memory); /* for what is on its way: as it is, and not shared */
    void (*take_back)(device *, char *memory);
    const char *(*share)(device *, char *memory, char handle[KVT_HANDLE_BYTES]); /* with other processes of this host */
    const char *(*map)(device *, const char handle[KVT_HANDLE_BYTES], size_t bytes, char **memory);
    void (*unmap)(device *, char *memory, size_t bytes);
    char *(*pin)(size_t bytes); /* host memory that the device copies from and to; NULL: out of memory */
    void (*unpin)(char *memory);
    const char *(*open_queue)(device_queue *);
    void (*close_queue)(device_queue *); /* after its work has ended */
    const char *(*follow)(device_queue *, uint64_t stream); /* wait for what that stream of the program was given so far */
    const char *(*behind)(device_queue *, device_queue *earlier); /* wait for what that queue was given so far */
    const char *(*copy_out)(device_queue *, char *pinned, const char *memory, size_t bytes);
    const char *(*copy_in)(device_queue *, char *memory, const char *pinned, size_t bytes);
    const char *(*move)(device_queue *, const page_move *);
    const char *(*digest)(device_queue *, const page_move *, uint64_t *pinned_sum); /* of what the move would write */
    const char *(*pack)(device_queue *, const image_pack *);     /* `how` and `source` live until the next mark is reached ... */
    const char *(*unpack)(device_queue *, const page_unpack *);  /* ... and so does `how` here */
    const char *(*mark)(device_queue *);
    void (*look)(device_queue *); /* for marks that were reached: sooner than their wake-up comes */
    const char *(*check)(device_queue *); /* whether the device still works */
} device_calls;

struct device {
    const device_calls *calls;
    int32_t memory_type; /* UCX's name for it */
    int64_t chunks[KVT_NUM_KERNELS]; /* of its kernels; 0: they move whatever they are given */
};

#endif
