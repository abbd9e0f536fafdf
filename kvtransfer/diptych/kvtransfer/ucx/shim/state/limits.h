/* How much of everything there may be. */
#ifndef KVT_LIMITS_H
#define KVT_LIMITS_H

#include <stddef.h>

#define PIECE_BYTES ((size_t)4 << 20) /* an operation is posted in pieces of at most this ... */
#define PIECE_PUTS 1024               /* ... and at most so many runs of pages, with a flush behind */
#define MESSAGE_BYTES ((size_t)480 << 10) /* a piece that is sent as a message: fits one segment, see options.py ... */
#define MESSAGE_RUNS 64                   /* ... and at most so many runs; ... */
#define MESSAGE_PARTS 14                  /* ... of so many parts, or UCX cuts it and receivers put it together again */
#define MAX_PIECES 8                      /* in flight on a link: bounds what a heartbeat has to wait behind */
#define MOVE_BYTES ((size_t)32 << 20)     /* a piece from one device to another */
#define IMAGE_BYTES ((size_t)16 << 20)    /* of it when pages are packed for another layout ... */
#define NUM_IMAGE_SLOTS 2                 /* ... and how many such pieces are in flight on a link: one moves, one is packed */
#define UNPACK_BYTES ((size_t)16 << 20)   /* of pages that a device unpacks at a time; one page, if that is more */
#define QUANTUM_BYTES {PIECE_BYTES, MOVE_BYTES, PIECE_BYTES, MESSAGE_BYTES, MESSAGE_BYTES} /* of a turn, by path */
#define NUM_QUEUES 2                      /* of the device, on each link */
#define MAX_EARLY 64                      /* messages that wait for their turn, ... */
#define MAX_EARLY_BYTES ((size_t)32 << 20)
#define MAX_NOTE_BYTES ((size_t)64 << 20) /* waiting to be polled; and as much again waiting to be sent */
#define MAX_BROKEN 64                     /* streams of a link whose failure is remembered */
#define HELLO_RETRY_S 0.1                 /* while a link comes up */

#endif
