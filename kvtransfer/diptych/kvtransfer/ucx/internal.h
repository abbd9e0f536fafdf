/* What the parts of the shim share: the state, and who may touch it.
 *
 * Three owners. "lock": fields used by both threads, under engine->lock. "progress": only the progress thread, which is
 * also the only one that calls UCX once it runs. "caller": only the caller's thread.
 */
#ifndef KVT_INTERNAL_H
#define KVT_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <ucp/api/ucp.h>

#include "device.h"
#include "shim.h"

#define PIECE_BYTES ((size_t)4 << 20) /* an operation is posted in pieces of at most this ... */
#define PIECE_PUTS 1024               /* ... and at most so many runs of pages, with a flush behind */
#define MESSAGE_BYTES ((size_t)480 << 10) /* a piece that is sent as a message: fits one segment, see options.py ... */
#define MESSAGE_RUNS 64                   /* ... and at most so many runs; ... */
#define MESSAGE_PARTS 14                  /* ... of so many parts, or UCX cuts it and receivers put it together again */
#define MAX_PIECES 8                      /* in flight on a link: bounds what a heartbeat has to wait behind */
#define MOVE_BYTES ((size_t)32 << 20)     /* a piece from one device to another */
#define QUANTUM_BYTES {PIECE_BYTES, MOVE_BYTES, PIECE_BYTES, MESSAGE_BYTES, MESSAGE_BYTES} /* of a turn, by way */
#define NUM_QUEUES 2                      /* of the device, on each link */
#define MAX_EARLY 64                      /* messages that wait for their turn */
#define MAX_NOTE_BYTES ((size_t)64 << 20) /* waiting to be polled; and as much again waiting to be sent */
#define HELLO_RETRY_S 0.1                 /* while a link comes up */

/* The header of every active message. Sessions number the links of a process: see link.h. */
#define HEADER_VERSION 0x4b565402u
typedef enum { MESSAGE_HELLO = 1, MESSAGE_BYE = 2, MESSAGE_NOTE = 3, MESSAGE_PAGES = 4 } message_kind;
typedef struct {
    uint32_t version;
    uint32_t kind;
    uint64_t sender; /* instances */
    uint64_t target;
    uint64_t session; /* the sender's */
    uint64_t echo;    /* the target's session as far as the sender knows it, else 0 */
    uint64_t received; /* how many numbered messages of the target's session the sender has dealt with */
    uint64_t number;   /* of a note or page message, from 0 in each session */
    union {
        struct {
            uint64_t num_runs;
        } pages;
        struct {
            uint64_t has_digest, digest;
        } note;
        struct {
            double sent_s, echo_s, held_s; /* the sender's clock; the target's as last heard; for how long since */
        } hello;
    };
} message_header;

/* An event in the queue. It is embedded in what it reports, so that reporting never fails for want of memory. */
typedef struct event_node {
    struct event_node *next;
    kvt_event event;
    void *memory; /* to free once the caller is done with it, or NULL */
} event_node;

typedef struct {
    event_node *head, *tail;
} event_list;

typedef enum { COMMAND_CONNECT, COMMAND_DISCONNECT, COMMAND_SUBMIT, COMMAND_OWN_WORK, COMMAND_USE_WAY } command_kind;
typedef struct command {
    struct command *next;
    command_kind kind;
    kvt_link *link;
    struct operation *op; /* of COMMAND_SUBMIT and COMMAND_OWN_WORK */
} command;

typedef struct {
    command *head, *tail;
} command_list;

typedef struct operation {
    struct operation *next;
    kvt_link *link;       /* NULL: it is work on our own pages */
    struct stream *spare; /* for the first operation of a stream, so that memory can't fail it */
    command submit;
    event_node done;
    uint64_t stream_id;
    int32_t priority;
    uint64_t num_pages, num_posted;
    uint64_t src_offset, dst_offset, page_part; /* bytes of each page */
    uint64_t part_posted;                       /* of the next one */
    uint64_t unit;                 /* bytes of each run are a multiple of it */
    struct packing *packing;       /* NULL: pages move as they are */
    struct unpacking *unpacking;   /* of work on our own pages; NULL: a digest */
    uint32_t num_pieces; /* in flight */
    uint64_t gate;       /* of the engine's gate_queue: nothing is posted before it was reached */
    double began_s;      /* when it was submitted */
    double deadline_s;   /* 0: none */
    const char *error;
    bool with_digest, has_note_digest;
    uint64_t digest, note_digest;
    bool note_sent; /* completely: its buffer is ours again */
    message_header header;
    uint64_t note_len;
    char *note;
    void *extra;       /* memory of packing and unpacking */
    page_pair pages[]; /* and behind them what `extra` and `note` point to */
} operation;

/* Operations that are done in order. A link's streams take turns: see turns.h. */
typedef struct stream {
    struct stream *next;
    uint64_t id;
    int32_t priority;
    size_t credit;           /* bytes left of its turn */
    operation *first, *last; /* all its operations, in order */
    operation *posting;      /* first that has pages to post */
    operation *noting;       /* first whose note was not handed to UCX */
    bool is_broken;          /* an operation failed: all later ones do */
    bool has_digest;
    uint64_t digest; /* of what was written since the last note */
} stream;

typedef struct {
    uint64_t src, dst, len; /* bytes in the pools; packed: `src` in the image ... */
    uint64_t page;          /* ... of this page of the operation */
} byte_run;

typedef struct {
    uint64_t dst, len;
} byte_target;

typedef struct {
    operation *op;     /* NULL: not in use */
    uint64_t bytes;
    char *room; /* for runs that are packed, or NULL; kept for the next piece */
    uint64_t room_bytes;
    uint32_t num_left; /* requests and acknowledgements that have not come */
    /* of a piece that a device works on */
    device_queue *queue; /* NULL: it does not, or is done */
    uint64_t mark;
    uint64_t num_staged; /* targets of the message to send then */
    bool has_sum;        /* its digest is known then */
    /* of a piece that is sent as a message */
    bool is_unacknowledged;
    message_header header;
    byte_target targets[MESSAGE_RUNS];
    ucp_dt_iov_t iov[1 + MESSAGE_PARTS];
} piece;

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

/* See pages.h and device_pages.h. */
typedef enum {
    WAY_COPY = KVT_WAY_COPY,
    WAY_MOVE = KVT_WAY_MOVE,
    WAY_PUT = KVT_WAY_PUT,
    WAY_MESSAGE = KVT_WAY_MESSAGE,
    WAY_STAGE = KVT_WAY_STAGE,
} page_way;
typedef enum { LINK_CONNECTING, LINK_UP, LINK_FAILED, LINK_CLOSING, LINK_DOWN } link_state;

struct kvt_link {
    kvt_engine *engine;
    uint64_t peer;
    uint64_t session;
    uint64_t pool_base, num_pages, page_bytes; /* the peer's */
    command connect, disconnect, use_way;

    /* lock */
    bool is_up, is_down; /* as the caller may know it; nothing is submitted to a link that is down */
    bool is_leaving;     /* kvt_disconnect was called */
    size_t num_ops_open;
    int32_t wanted_way;
    bool is_way_due; /* use_way is in the queue */

    /* progress */
    kvt_link *next;
    link_state state;
    void *address, *rkey_buffer; /* until the endpoint is made; no key: nothing can be put into the peer's pool */
    bool has_device_handle;
    char device_handle[KVT_HANDLE_BYTES];
    ucp_ep_h ep;
    ucp_rkey_h rkey;
    uint64_t peer_session;
    uint64_t num_sent, num_received; /* numbered messages */
    early_message *early;            /* by number */
    uint32_t num_early;
    char *mapped_pool; /* the peer's, of WAY_COPY */
    uint32_t num_requests; /* of any kind, that UCX has not completed */
    stream *streams; /* in order of their turns */
    piece pieces[MAX_PIECES];
    uint32_t num_pieces;
    /* with a pool on a device: see device_pages.h */
    device_queue queues[NUM_QUEUES], landing_queue;
    int queue_turn;
    char *device_pool; /* the peer's, as our device sees it, of WAY_MOVE */
    char *pinned;      /* slots of pieces, slots of landings, sums of pieces */
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
    char lanes[256]; /* this and the ways: written before KVT_LINK_UP */
    uint32_t ways;

    /* both */
    _Atomic page_way way;
    _Atomic uint64_t bytes_sent, queued_bytes, in_flight_bytes;
    _Atomic double last_heard_s, rtt_s;
};

struct kvt_engine {
    /* constant once the thread runs */
    uint64_t instance_id;
    double heartbeat_s, silence_s, connect_timeout_s;
    size_t max_operations, max_waiting_notes;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h memory;
    ucp_address_t *address;
    size_t address_len;
    void *rkey_buffer;
    size_t rkey_len;
    device *device; /* NULL: the pool is in host memory */
    char *pool;     /* on the device, if there is one */
    bool is_shared; /* by its handle */
    char pool_handle[KVT_HANDLE_BYTES];
    uint64_t page_bytes, num_pages;
    int worker_fd, wake_fd, event_fd;
    pthread_t thread;
    bool has_thread;

    pthread_mutex_t progress_lock; /* held by the progress thread unless it sleeps: see shortcut.h */
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
    operation *own_work, *last_own_work; /* see own_pages.h */
    device_queue digest_queue;        /* where, if the pool is on a device ... */
    uint64_t *digest_sum;             /* ... and its answer: pinned */
    bool is_digesting;
    double hot_until_s;      /* see piece.h */
    device_queue gate_queue; /* follows the program's own streams: see kvt_follow */
    double behind_since_s; /* when messages began to come faster than we look at them; 0: they do not */

    /* both */
    _Atomic uint64_t num_dropped_messages;
};

static uint64_t smaller(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

static void fail_link(kvt_link *link, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
