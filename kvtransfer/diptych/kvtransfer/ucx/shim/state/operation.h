/* What is asked of the progress thread, and what it says: commands, operations, the pieces that they are posted in, events. */
#ifndef KVT_OPERATION_H
#define KVT_OPERATION_H

#include <ucp/api/ucp.h>

#include "../device/device.h"
#include "../wire/header.h"
#include "limits.h"
#include "../shim.h"

/* An event in the queue. It is embedded in what it reports, so that reporting never fails for want of memory. */
typedef struct event_node {
    struct event_node *next;
    kvt_event event;
    void *memory; /* to free once the caller is done with it, or NULL */
} event_node;

typedef struct {
    event_node *head, *tail;
} event_list;

typedef enum { COMMAND_CONNECT, COMMAND_DISCONNECT, COMMAND_SUBMIT, COMMAND_OWN_WORK, COMMAND_USE_PATH } command_kind;
typedef struct command {
    struct command *next;
    command_kind kind;
    kvt_link *link;
    struct operation *op; /* of COMMAND_SUBMIT and COMMAND_OWN_WORK */
} command;

typedef struct {
    command *head, *tail;
} command_list;

/* See kvt_copy. */
typedef struct page_copy {
    uint64_t num_pages, num_posted;
    page_pair *pages;
    uint64_t src_offset, dst_offset, page_part; /* bytes of each page */
    uint64_t part_posted;                       /* of the next one */
    uint64_t unit;                 /* bytes of each run are a multiple of it */
    struct packing *packing;       /* NULL: pages move as they are */
} page_copy;

typedef struct operation {
    struct operation *next;
    kvt_link *link;       /* NULL: it is work on our own pages */
    struct stream *spare; /* for the first operation of a stream, so that memory can't fail it */
    command submit;
    event_node done;
    uint64_t stream_id;
    int32_t priority;
    uint64_t num_copies, num_copied; /* the first have been posted */
    page_copy *copies;               /* none of them is empty */
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
    char memory[]; /* what the pointers above, and those of the copies, point to */
} operation;

/* Operations that are done in order. A link's streams take turns: see write/turns.c. */
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
    const page_copy *copy;  /* ... of this ... */
    uint64_t page;          /* ... and this page of it */
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
    int32_t image_slot;  /* what it holds of the link's memory for packed pages; negative: nothing */
    /* of a piece that is sent as a message */
    bool is_unacknowledged;
    message_header header;
    byte_target targets[MESSAGE_RUNS];
    ucp_dt_iov_t iov[1 + MESSAGE_PARTS];
} piece;

#endif
