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

#include "digest.h"
#include "message.h"

#define CACHED_BYTES ((size_t)64 << 10)

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

static void count_piece(kvt_link *link, piece *piece, size_t bytes)
{
    piece->bytes = bytes;
    atomic_fetch_add(&link->in_flight_bytes, bytes);
}

static void release_piece(kvt_link *link, piece *piece)
{
    if (--piece->num_left > 0)
        return;
    piece->op->num_pieces--;
    piece->op = NULL;
    atomic_fetch_sub(&link->in_flight_bytes, piece->bytes);
    link->num_pieces--;
}

/* How many of the next pages are neighbours on both sides, and moved as a whole. */
static uint64_t run_length(const operation *op, uint64_t max_pages)
{
    const page_pair *first = &op->pages[op->num_posted];
    uint64_t left = op->num_pages - op->num_posted, length = 1;
    if (op->page_part != op->link->engine->page_bytes || op->page_part != op->link->page_bytes)
        return 1;
    while (length < left && length < max_pages && first[length].src == first->src + length &&
           first[length].dst == first->dst + length)
        length++;
    return length;
}

/* Take the next run of bytes off an operation, at most `max_bytes`; it may begin and end inside a page. */
static byte_run next_run(operation *op, uint64_t max_bytes)
{
    page_pair first = op->pages[op->num_posted];
    uint64_t left = run_length(op, max_bytes / op->page_part + 1) * op->page_part - op->part_posted;
    byte_run run = {
        .src = first.src * op->link->engine->page_bytes + op->src_offset + op->part_posted,
        .dst = first.dst * op->link->page_bytes + op->dst_offset + op->part_posted,
        .len = left < max_bytes ? left : max_bytes,
    };
    op->part_posted += run.len;
    op->num_posted += op->part_posted / op->page_part;
    op->part_posted %= op->page_part;
    return run;
}

static void add_digest(operation *op, byte_run run)
{
    if (op->with_digest)
        op->digest += digest_bytes(op->link->engine->pool + run.src, run.dst, run.len);
}

/* In blocks that stay in the processor's cache between the digest and the copy. */
static void copy_run(kvt_link *link, operation *op, byte_run run)
{
    uint64_t step = op->with_digest ? CACHED_BYTES : run.len;
    for (uint64_t at = 0; at < run.len; at += step) {
        byte_run block = {run.src + at, run.dst + at, run.len - at < step ? run.len - at : step};
        add_digest(op, block);
        memcpy(link->mapped_pool + block.dst, link->engine->pool + block.src, block.len);
    }
}

/* No piece: it is complete when it returns. */
static size_t copy_pages(kvt_link *link, operation *op, size_t max_bytes)
{
    size_t copied = 0;
    while (copied < max_bytes && op->num_posted < op->num_pages) {
        byte_run run = next_run(op, max_bytes - copied);
        copy_run(link, op, run);
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

static size_t put_pages(kvt_link *link, operation *op, size_t max_bytes)
{
    piece *piece = take_piece(link, op);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = on_piece_request,
        .user_data = piece,
    };
    size_t posted = 0;
    for (int puts = 0; puts < PIECE_PUTS && posted < max_bytes && op->num_posted < op->num_pages; puts++) {
        byte_run run = next_run(op, max_bytes - posted);
        add_digest(op, run);
        ucs_status_ptr_t put = ucp_put_nbx(link->ep, link->engine->pool + run.src, run.len, link->pool_base + run.dst,
                                           link->rkey, &param);
        piece->num_left += is_pending(link, put, "page write");
        posted += run.len;
    }
    piece->num_left += is_pending(link, ucp_ep_flush_nbx(link->ep, &param), "flush");
    count_piece(link, piece, posted);
    release_piece(link, piece);
    return posted;
}

static size_t send_pages(kvt_link *link, operation *op, size_t max_bytes)
{
    piece *piece = take_piece(link, op);
    uint64_t count = 0, posted = 0;
    while (count < MESSAGE_RUNS && posted < max_bytes && op->num_posted < op->num_pages) {
        byte_run run = next_run(op, max_bytes - posted);
        add_digest(op, run);
        piece->targets[count++] = (byte_target){run.dst, run.len};
        piece->iov[count] = (ucp_dt_iov_t){link->engine->pool + run.src, run.len};
        posted += run.len;
    }
    piece->iov[0] = (ucp_dt_iov_t){piece->targets, count * sizeof piece->targets[0]};
    piece->header = make_header(link, MESSAGE_PAGES);
    piece->header.number = link->num_sent++;
    piece->header.pages.num_runs = count;
    piece->is_unacknowledged = true;
    piece->num_left++; /* until the peer acknowledges it */
    count_piece(link, piece, posted);
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

/* Post one piece of the operation, of at most `max_bytes`. Returns its bytes. */
static size_t post_pages(kvt_link *link, operation *op, size_t max_bytes)
{
    size_t posted = 0;
    switch (link->way) {
    case WAY_COPY:
        posted = copy_pages(link, op, max_bytes);
        break;
    case WAY_PUT:
        posted = put_pages(link, op, max_bytes);
        break;
    case WAY_MESSAGE:
        posted = send_pages(link, op, max_bytes);
        break;
    }
    atomic_fetch_add(&link->bytes_sent, posted);
    atomic_fetch_sub(&link->queued_bytes, posted);
    return posted;
}

#endif
