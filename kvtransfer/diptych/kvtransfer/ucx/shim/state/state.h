/* What the parts of the shim share: the state, and who may touch it.
 *
 * Three owners. "lock": fields used by both threads, under engine->lock. "progress": only the progress thread, which is
 * also the only one that calls UCX once it runs. "caller": only the caller's thread.
 */
#ifndef KVT_STATE_H
#define KVT_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <ucp/api/ucp.h>

#include "operation.h"

/* See memory/grants.c. */
typedef struct {
    pthread_mutex_t lock;
    uint64_t *peers; /* by page; 0: nobody. NULL: any peer may write into any page */
} grant_table;

/* A message that overtook another. */
typedef struct early_message {
    struct early_message *next;
    message_header header;
    size_t len;
    double since_s;
    char data[];
} early_message;

/* A page message on its way from pinned memory to the device. */
typedef struct {
    uint64_t number, mark;
} landing;

/* See copy/host_pages.c and copy/device_pages.c. */
typedef enum {
    PATH_COPY = KVT_PATH_COPY,
    PATH_MOVER = KVT_PATH_MOVER,
    PATH_PUT = KVT_PATH_PUT,
    PATH_MESSAGE = KVT_PATH_MESSAGE,
    PATH_STAGED = KVT_PATH_STAGED,
} page_path;
typedef enum { LINK_CONNECTING, LINK_UP, LINK_FAILED, LINK_CLOSING, LINK_DOWN } link_state;

struct kvt_link {
    kvt_engine *engine;
    uint64_t peer;
    uint64_t session;
    uint8_t key[KVT_KEY_BYTES]; /* the peer's */
    uint64_t pool_base, num_pages, page_nbytes; /* the peer's */
    command connect, disconnect, use_path;

    /* lock */
    bool is_up, is_down; /* as the caller may know it; nothing is submitted to a link that is down */
    bool is_leaving;     /* kvt_disconnect was called */
    size_t num_ops_open;
    int32_t wanted_path;
    bool is_path_due; /* use_path is in the queue */

    /* progress */
    kvt_link *next;
    link_state state;
    void *address, *pool_key; /* until the endpoint is made; no key: nothing can be put into the peer's pool */
    bool has_device_handle;
    char device_handle[KVT_HANDLE_BYTES];
    ucp_ep_h ep;
    ucp_rkey_h rkey;
    uint64_t peer_session;
    uint64_t num_sent, num_received; /* numbered messages */
    early_message *early;            /* by number */
    uint32_t num_early;
    size_t early_bytes;
    char *mapped_pool; /* the peer's, of PATH_COPY */
    uint32_t num_requests; /* of any kind, that UCX has not completed */
    stream *streams; /* in order of their turns */
    piece pieces[MAX_PIECES];
    uint32_t num_pieces;
    /* with a pool on a device: see copy/device_pages.c */
    device_queue queues[NUM_QUEUES], landing_queue;
    int queue_turn;
    char *device_pool; /* the peer's, as our device sees it, of PATH_MOVER */
    char *pinned;      /* slots of pieces, slots of landings, sums of pieces */
    char *images;      /* slots of pieces whose pages are packed, on our device; NULL: none were yet */
    ucp_mem_h images_handle; /* of UCX; NULL: it does not know them */
    page_pair *image_pages;  /* where those of the piece that is packed now go */
    landing landings[MAX_PIECES];
    uint64_t num_landings, num_landed;
    bool has_device_failed;
    message_header hello, bye;
    bool hello_in_flight, answer_due;
    bool is_cut; /* UCX reported the endpoint as failed */
    double hello_due_s, deadline_s;
    double peer_clock_s, peer_clock_at_s; /* as of the peer's last hello; when it came */
    char *populate, *populate_end; /* of the mapped pool: page table entries still to make */
    event_node up, down;
    char reason[192];
    char lanes[256]; /* this and the paths: written before KVT_LINK_UP */
    uint32_t paths;

    /* both */
    _Atomic page_path path;
    _Atomic uint64_t bytes_sent, queued_bytes, in_flight_bytes;
    _Atomic double last_heard_s, rtt_s;
};

struct kvt_engine {
    /* constant once the thread runs */
    uint64_t instance_id;
    uint8_t key[KVT_KEY_BYTES];
    bool only_granted;
    bool with_remote_access;
    double heartbeat_s, silence_s, connect_timeout_s;
    size_t max_operations, max_waiting_notes;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h memory;
    ucp_address_t *address;
    size_t address_len;
    void *pool_key;
    size_t pool_key_len;
    device *device; /* NULL: the pool is in host memory */
    char *pool;     /* on the device, if there is one */
    bool is_shared; /* by its handle */
    char pool_handle[KVT_HANDLE_BYTES];
    uint64_t page_nbytes, num_pages;
    int worker_fd, wake_fd, event_fd;
    pthread_t thread;
    bool has_thread;

    pthread_mutex_t progress_lock; /* held by the progress thread unless it sleeps: see thread/shortcut.c */
    pthread_mutex_t lock;          /* the inner one of the two */
    event_list events;
    command_list commands;
    size_t num_ops_open, note_bytes_open;
    size_t num_notes_waiting, note_bytes_waiting;
    bool is_paused; /* too many notes wait: nothing is received */
    bool is_stopping;

    /* caller */
    event_node *spent; /* returned by the last poll */
    uint64_t num_sessions, num_ops;
    uint64_t gate; /* mark of gate_queue that operations wait for */

    /* progress */
    kvt_link *links;
    operation *own_work, *last_own_work; /* see memory/own_pages.c */
    device_queue own_queue;           /* where, if the pool is on a device ... */
    uint64_t *digest_sum;             /* ... and its answer: pinned */
    char *unpack_memory;              /* on the device; NULL: nothing was unpacked yet */
    bool is_asked;                    /* the device, for some of it */
    double hot_until_s;      /* see write/piece.c */
    device_queue gate_queue; /* follows the program's own streams: see kvt_follow */
    double behind_since_s; /* when messages began to come faster than we look at them; 0: they do not */

    /* both */
    grant_table grants;
    _Atomic uint64_t num_dropped_messages, num_unauthenticated, num_ungranted;
};

#endif
