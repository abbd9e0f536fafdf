/* Three paths by which pages get into the peer's pool, chosen when the link comes up.
 *
 *   copy      the pool is mapped into this process (shared memory): memcpy, complete at once
 *   put       a lane has remote memory access (RDMA, NVLink): UCX puts with a flush behind them
 *   message   neither (TCP): active messages that say where their bytes belong; the peer's thread copies them into its
 *             pool and acknowledges
 *
 * UCX can put over any lane by emulating it with messages, but its emulation ends the target's process when a put
 * arrives whose endpoint was closed meanwhile ("unexpected error: Endpoint timeout"). Ours drops such pages by their session.
 */

#define CACHED_BYTES ((size_t)16 << 10)

/* A piece, and room in it for what is packed. NULL: the link failed for want of memory. */
static piece *take_roomy_piece(kvt_link *link, operation *op, size_t bytes)
{
    piece *piece = take_piece(link, op);
    if (op->copies[op->num_copied].packing == NULL || piece->room_bytes >= bytes)
        return piece;
    free(piece->room);
    piece->room = malloc(bytes);
    piece->room_bytes = piece->room ? bytes : 0;
    if (piece->room != NULL)
        return piece;
    fail_link(link, "out of memory for %zu bytes of packed pages", bytes);
    piece->bytes = 0;
    release_piece(link, piece);
    return NULL;
}

static void add_digest(operation *op, byte_run run, const char *bytes)
{
    if (op->with_digest)
        op->digest += digest_bytes(bytes, run.dst, run.len);
}

/* In blocks that stay in the processor's cache between the copy and the digest. The copy comes first: nothing reads memory
 * as fast. What is packed is packed right there. */
static void copy_run(kvt_link *link, operation *op, byte_run run)
{
    uint64_t step = op->with_digest ? whole_units(run.copy, CACHED_BYTES) : run.len;
    for (uint64_t at = 0; at < run.len; at += step) {
        byte_run block = {run.src + at, run.dst + at, run.len - at < step ? run.len - at : step,
                          run.copy, run.page};
        char *to = link->mapped_pool + block.dst;
        const char *bytes = run_bytes(link, block, to);
        if (bytes != to)
            memcpy(to, bytes, block.len);
        add_digest(op, block, bytes);
    }
}

/* No piece: it is complete when it returns. */
static size_t copy_pages(kvt_link *link, operation *op, size_t max_bytes)
{
    page_copy *copy = &op->copies[op->num_copied];
    size_t copied = 0;
    while (copied < max_bytes && copy->num_posted < copy->num_pages) {
        byte_run run = next_run(link, copy, max_bytes - copied);
        copy_run(link, op, run);
        copied += run.len;
    }
    atomic_thread_fence(memory_order_release); /* the note must not be seen before the pages */
    return copied;
}

static size_t put_pages(kvt_link *link, operation *op, size_t max_bytes)
{
    page_copy *copy = &op->copies[op->num_copied];
    piece *piece = take_roomy_piece(link, op, max_bytes);
    if (piece == NULL)
        return 0;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = on_piece_request,
        .user_data = piece,
    };
    size_t posted = 0;
    for (int puts = 0; puts < PIECE_PUTS && posted < max_bytes && copy->num_posted < copy->num_pages; puts++) {
        byte_run run = next_run(link, copy, max_bytes - posted);
        const char *bytes = run_bytes(link, run, piece->room + posted);
        add_digest(op, run, bytes);
        ucs_status_ptr_t put = ucp_put_nbx(link->ep, bytes, run.len, link->pool_base + run.dst, link->rkey, &param);
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
    page_copy *copy = &op->copies[op->num_copied];
    piece *piece = take_roomy_piece(link, op, max_bytes);
    if (piece == NULL)
        return 0;
    uint64_t count = 0, posted = 0;
    while (count < MESSAGE_PARTS && posted < max_bytes && copy->num_posted < copy->num_pages) {
        byte_run run = next_run(link, copy, max_bytes - posted);
        const char *bytes = run_bytes(link, run, piece->room + posted);
        add_digest(op, run, bytes);
        piece->targets[count++] = (byte_target){run.dst, run.len};
        piece->iov[count] = (ucp_dt_iov_t){(void *)bytes, run.len};
        posted += run.len;
    }
    count_piece(link, piece, posted);
    send_piece(link, piece, count, count);
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

static size_t post_piece(kvt_link *link, operation *op, size_t max_bytes)
{
    if (is_packed_on_device(link, op))
        return post_images(link, op, max_bytes);
    switch (link->path) {
    case PATH_COPY:
        return copy_pages(link, op, max_bytes);
    case PATH_PUT:
        return link->engine->device ? put_device_pages(link, op, max_bytes) : put_pages(link, op, max_bytes);
    case PATH_MESSAGE:
        return send_pages(link, op, max_bytes);
    case PATH_MOVER:
        return move_pages(link, op, max_bytes);
    case PATH_STAGED:
        return stage_pages(link, op, max_bytes);
    }
    return 0;
}

/* Post one piece of the operation, of about `max_bytes` at most; it ends with what moves the same way. Returns its bytes. */
static size_t post_pages(kvt_link *link, operation *op, size_t max_bytes)
{
    size_t posted = post_piece(link, op, whole_units(&op->copies[op->num_copied], max_bytes));
    skip_copied(op);
    atomic_fetch_add(&link->bytes_sent, posted);
    atomic_fetch_sub(&link->queued_bytes, posted);
    return posted;
}
