/* Three ways to bring pages into the peer's pool, chosen when the link comes up.
 *
 *   copy      the pool is mapped into this process (shared memory): memcpy, complete at once
 *   put       a lane has remote memory access (RDMA, NVLink): UCX puts with a flush behind them
 *   message   neither (TCP): active messages that say where their bytes belong; the peer's thread copies them into its
 *             pool and acknowledges
 *
 * UCX can put over any lane by emulating it with messages, but its emulation ends the target's process when a put
 * arrives whose endpoint was closed meanwhile ("unexpected error: Endpoint timeout"). Ours drops such pages by their session.
 */
#ifndef KVT_PAGES_H
#define KVT_PAGES_H

#include "message.h"

static piece *take_piece(kvt_link *link, operation *op)
{
    piece *piece = link->pieces;
    while (piece->op != NULL)
        piece++;
    piece->op = op;
    piece->num_left = 1; /* ours, until everything was posted */
    op->num_pieces++;
    link->num_pieces++;
    return piece;
}

static void release_piece(kvt_link *link, piece *piece)
{
    if (--piece->num_left > 0)
        return;
    piece->op->num_pieces--;
    piece->op = NULL;
    link->num_pieces--;
}

/* How many of the next pages are neighbours on both sides. */
static uint64_t run_length(const operation *op, uint64_t max_pages)
{
    const page_pair *first = &op->pages[op->num_posted];
    uint64_t left = op->num_pages - op->num_posted, length = 1;
    while (length < left && length < max_pages && first[length].src == first->src + length &&
           first[length].dst == first->dst + length)
        length++;
    return length;
}

/* Take the next run of bytes off an operation, at most `max_bytes`; it may begin and end inside a page. */
static byte_run next_run(operation *op, uint64_t max_bytes)
{
    uint64_t page_bytes = op->link->engine->page_bytes;
    page_pair first = op->pages[op->num_posted];
    uint64_t left = run_length(op, max_bytes / page_bytes + 1) * page_bytes - op->part_posted;
    byte_run run = {
        .src = first.src * page_bytes + op->part_posted,
        .dst = first.dst * page_bytes + op->part_posted,
        .len = left < max_bytes ? left : max_bytes,
    };
    op->part_posted += run.len;
    op->num_posted += op->part_posted / page_bytes;
    op->part_posted %= page_bytes;
    return run;
}

/* No piece: it is complete when it returns. */
static size_t copy_pages(kvt_link *link, operation *op)
{
    size_t copied = 0;
    while (copied < PIECE_BYTES && op->num_posted < op->num_pages) {
        byte_run run = next_run(op, PIECE_BYTES - copied);
        memcpy(link->mapped_pool + run.dst, link->engine->pool + run.src, run.len);
        copied += run.len;
    }
    atomic_thread_fence(memory_order_release); /* the note must not be seen before the pages */
    return copied;
}

static void on_piece_request(void *request, ucs_status_t status, void *user_data)
{
    piece *piece = user_data;
    kvt_link *link = piece->op->link;
    settle_request(link, request, status, "page write");
    release_piece(link, piece);
}

static size_t put_pages(kvt_link *link, operation *op)
{
    piece *piece = take_piece(link, op);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = on_piece_request,
        .user_data = piece,
    };
    size_t posted = 0;
    for (int puts = 0; puts < PIECE_PUTS && posted < PIECE_BYTES && op->num_posted < op->num_pages; puts++) {
        byte_run run = next_run(op, PIECE_BYTES - posted);
        ucs_status_ptr_t put = ucp_put_nbx(link->ep, link->engine->pool + run.src, run.len, link->pool_base + run.dst,
                                           link->rkey, &param);
        piece->num_left += is_pending(link, put, "page write");
        posted += run.len;
    }
    piece->num_left += is_pending(link, ucp_ep_flush_nbx(link->ep, &param), "flush");
    release_piece(link, piece);
    return posted;
}

static size_t send_pages(kvt_link *link, operation *op)
{
    piece *piece = take_piece(link, op);
    uint64_t count = 0, posted = 0;
    while (count < MESSAGE_RUNS && posted < MESSAGE_BYTES && op->num_posted < op->num_pages) {
        byte_run run = next_run(op, MESSAGE_BYTES - posted);
        piece->targets[count++] = (byte_target){run.dst, run.len};
        piece->iov[count] = (ucp_dt_iov_t){link->engine->pool + run.src, run.len};
        posted += run.len;
    }
    piece->iov[0] = (ucp_dt_iov_t){piece->targets, count * sizeof piece->targets[0]};
    piece->header = make_header(link, MESSAGE_PAGES);
    piece->header.number = link->num_sent++;
    piece->header.num_runs = count;
    piece->is_unacknowledged = true;
    piece->num_left++; /* until the peer acknowledges it */
    piece->num_left += send_message(link, &piece->header, piece->iov, count + 1, ucp_dt_make_iov(),
                                    on_piece_request, piece);
    release_piece(link, piece);
    return posted;
}

/* The peer has dealt with every message before number `received`. */
static void take_acknowledgement(kvt_link *link, uint64_t received)
{
    for (piece *piece = link->pieces; piece < link->pieces + MAX_PIECES; piece++)
        if (piece->op != NULL && piece->is_unacknowledged && piece->header.number < received) {
            piece->is_unacknowledged = false;
            release_piece(link, piece);
        }
}

/* Post about one piece of the operation, so that links take turns. Returns its bytes. */
static size_t post_pages(kvt_link *link, operation *op)
{
    size_t posted = 0;
    switch (link->way) {
    case WAY_COPY:
        posted = copy_pages(link, op);
        break;
    case WAY_PUT:
        posted = put_pages(link, op);
        break;
    case WAY_MESSAGE:
        posted = send_pages(link, op);
        break;
    }
    atomic_fetch_add(&link->bytes_sent, posted);
    return posted;
}

#endif
