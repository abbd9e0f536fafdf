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

#include "shim.h"

#define PIECE_BYTES ((size_t)4 << 20) /* an operation is posted in pieces of at most this ... */
#define PIECE_PUTS 1024               /* ... and at most so many runs of pages, with a flush behind */
#define MESSAGE_BYTES ((size_t)480 << 10) /* a piece that is sent as a message: fits one segment, see options.py ... */
#define MESSAGE_RUNS 64                   /* ... and at most so many runs */
#define MAX_PIECES 8                      /* in flight on a link: bounds what a heartbeat has to wait behind */
#define MAX_EARLY 64                      /* messages that wait for their turn */
#define MAX_NOTE_BYTES ((size_t)64 << 20) /* waiting to be polled; and as much again waiting to be sent */
#define HELLO_RETRY_S 0.1                 /* while a link comes up */

/* The header of every active message. Sessions number the links of a process: see link.h. */
#define HEADER_VERSION 0x4b565401u
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
    uint64_t num_runs; /* of a page message */
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

typedef enum { COMMAND_CONNECT, COMMAND_DISCONNECT, COMMAND_SUBMIT } command_kind;
typedef struct command {
    struct command *next;
    command_kind kind;
    kvt_link *link;
    struct operation *op; /* of COMMAND_SUBMIT */
} command;

typedef struct {
    command *head, *tail;
} command_list;

typedef struct {
    uint32_t src, dst;
} page_pair;

typedef struct operation {
    struct operation *next;
    kvt_link *link;
    command submit;
    event_node done;
    uint64_t num_pages, num_posted;
    uint64_t part_posted; /* bytes of the next page */
    uint32_t num_pieces;  /* in flight */
    bool note_sent;      /* completely: its buffer is ours again */
    message_header header;
    uint64_t note_len;
    char *note;
    page_pair pages[]; /* and the note behind them */
} operation;

typedef struct {
    uint64_t src, dst, len; /* bytes in the pools */
} byte_run;

typedef struct {
    uint64_t dst, len;
} byte_target;

typedef struct {
    operation *op;     /* NULL: not in use */
    uint32_t num_left; /* requests and acknowledgements that have not come */
    /* of a piece that is sent as a message */
    bool is_unacknowledged;
    message_header header;
    byte_target targets[MESSAGE_RUNS];
    ucp_dt_iov_t iov[1 + MESSAGE_RUNS];
} piece;

/* A message that overtook another. */
typedef struct early_message {
    struct early_message *next;
    message_header header;
    size_t len;
    double since_s;
    char data[];
} early_message;

typedef enum { WAY_COPY, WAY_PUT, WAY_MESSAGE } page_way; /* see pages.h */
typedef enum { LINK_CONNECTING, LINK_UP, LINK_FAILED, LINK_CLOSING, LINK_DOWN } link_state;

struct kvt_link {
    kvt_engine *engine;
    uint64_t peer;
    uint64_t session;
    uint64_t pool_base, num_pages; /* the peer's */
    command connect, disconnect;

    /* lock */
    bool is_up, is_down; /* as the caller may know it; nothing is submitted to a link that is down */
    bool is_leaving;     /* kvt_disconnect was called */

    /* progress */
    kvt_link *next;
    link_state state;
    void *address, *rkey_buffer; /* until the endpoint is made */
    ucp_ep_h ep;
    ucp_rkey_h rkey;
    uint64_t peer_session;
    uint64_t num_sent, num_received; /* numbered messages */
    early_message *early;            /* by number */
    uint32_t num_early;
    page_way way;
    char *mapped_pool; /* the peer's, of WAY_COPY */
    uint32_t num_requests; /* of any kind, that UCX has not completed */
    operation *first, *last; /* all operations, in order */
    operation *posting;      /* first that has pages to post */
    operation *noting;       /* first whose note was not handed to UCX */
    piece pieces[MAX_PIECES];
    uint32_t num_pieces;
    message_header hello, bye;
    bool hello_in_flight, answer_due;
    bool is_cut; /* UCX reported the endpoint as failed */
    double hello_due_s, deadline_s;
    char *populate, *populate_end; /* of the mapped pool: page table entries still to make */
    event_node up, down;
    char reason[192];
    char lanes[256]; /* written before KVT_LINK_UP */

    /* both */
    _Atomic uint64_t bytes_sent;
    _Atomic double last_heard_s;
};

struct kvt_engine {
    /* constant once the thread runs */
    uint64_t instance_id;
    double heartbeat_s, silence_s, connect_timeout_s;
    size_t max_operations, max_waiting_notes;
    int32_t page_way;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h memory;
    ucp_address_t *address;
    size_t address_len;
    void *rkey_buffer;
    size_t rkey_len;
    char *pool;
    uint64_t page_bytes, num_pages;
    int worker_fd, wake_fd, event_fd;
    pthread_t thread;
    bool has_thread;

    pthread_mutex_t lock;
    event_list events;
    command_list commands;
    size_t num_ops_open, note_bytes_open;
    size_t num_notes_waiting, note_bytes_waiting;
    bool is_paused; /* too many notes wait: nothing is received */
    bool is_stopping;

    /* caller */
    event_node *spent; /* returned by the last poll */
    uint64_t num_sessions, num_ops;

    /* progress */
    kvt_link *links;
    double behind_since_s; /* when messages began to come faster than we look at them; 0: they do not */

    /* both */
    _Atomic uint64_t num_dropped_messages;
};

static void fail_link(kvt_link *link, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
