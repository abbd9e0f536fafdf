/* How pages travel from, and into, a pool in device memory. Chosen when the link comes up, or by the caller:
 *
 *   mover    the peer's pool is mapped into our device's address space: a kernel of ours stores into it, many pages at once
 *   put      a lane has remote memory access to it: UCX puts, as for host memory
 *   staged   neither: out to pinned host memory, and from there as messages. (UCX would send device memory over TCP itself,
 *            at a tenth of the speed.)
 *
 * What a device does for a piece has ended when the mark behind it was reached. Then everybody sees the bytes (see
 * device.h): the note that follows finds them in place. Page messages that arrive go to the device through pinned memory
 * too, and are acknowledged when they are there.
 */

static void open_queue(kvt_link *link, device_queue *queue)
{
    *queue = (device_queue){.device = link->engine->device, .wake_fd = link->engine->wake_fd};
    device_did(link, calls_of(link)->open_queue(queue));
}

/* The peer's pool is mapped where that can be: memory of a device of this host, within reach of ours. */
static void open_on_device(kvt_link *link)
{
    const device *device = link->engine->device;
    for (int i = 0; i < NUM_QUEUES; i++)
        open_queue(link, &link->queues[i]);
    open_queue(link, &link->landing_queue);
    link->pinned = device->calls->pin(2 * SLOTS_BYTES + MAX_PIECES * sizeof(uint64_t));
    if (link->pinned == NULL)
        fail_link(link, "out of pinned memory");
    if (link->has_device_handle &&
        device->calls->map(link->engine->device, link->device_handle, link->num_pages * link->page_nbytes,
                           &link->device_pool) != NULL)
        link->device_pool = NULL;
}

static void close_on_device(kvt_link *link)
{
    for (int i = 0; i < NUM_QUEUES; i++)
        calls_of(link)->close_queue(&link->queues[i]);
    calls_of(link)->close_queue(&link->landing_queue);
    if (link->pinned != NULL)
        calls_of(link)->unpin(link->pinned);
    if (link->device_pool != NULL)
        calls_of(link)->unmap(link->engine->device, link->device_pool, link->num_pages * link->page_nbytes);
}

/* Whether the device has done all that it was given for this link, or never will. */
static bool has_device_finished(kvt_link *link)
{
    if (link->engine->device == NULL || link->has_device_failed)
        return true;
    bool is_done = is_idle(&link->landing_queue);
    for (int i = 0; i < NUM_QUEUES; i++)
        is_done = is_done && is_idle(&link->queues[i]);
    return is_done;
}

/* A device that fails tells nobody: look, now and then, while it has work. */
static void check_device(kvt_link *link)
{
    if (has_device_finished(link))
        return;
    for (int i = 0; i < NUM_QUEUES; i++)
        device_did(link, calls_of(link)->check(&link->queues[i]));
    device_did(link, calls_of(link)->check(&link->landing_queue));
}

/* Queues take turns, so that one piece begins while the one before it ends. */
static device_queue *next_queue(kvt_link *link)
{
    link->queue_turn = (link->queue_turn + 1) % NUM_QUEUES;
    return &link->queues[link->queue_turn];
}

static void await_device(kvt_link *link, piece *piece, device_queue *queue)
{
    if (!device_did(link, calls_of(link)->mark(queue)))
        return;
    piece->queue = queue;
    piece->mark = queue->num_marks;
    piece->num_left++;
}

static uint64_t *sum_of(const kvt_link *link, const piece *piece)
{
    return (uint64_t *)(link->pinned + 2 * SLOTS_BYTES) + (piece - link->pieces);
}

/* The next pages of a copy, as a device takes them: whole windows, as many as `max_bytes` begin. */
static page_move next_move(const kvt_link *link, const page_copy *copy, size_t max_bytes)
{
    uint64_t wanted = (max_bytes + copy->page_part - 1) / copy->page_part;
    return (page_move){
        .src = link->engine->pool,
        .dst = link->device_pool,
        .pages = &copy->pages[copy->num_posted],
        .num_pages = (uint32_t)smaller(copy->num_pages - copy->num_posted, smaller(wanted, MOVE_PAGES)),
        .src_page_nbytes = link->engine->page_nbytes,
        .dst_page_nbytes = link->page_nbytes,
        .src_offset = copy->src_offset,
        .dst_offset = copy->dst_offset,
        .len = copy->page_part,
    };
}

static void digest_move(kvt_link *link, const operation *op, piece *piece, device_queue *queue, const page_move *move)
{
    piece->has_sum = op->with_digest && device_did(link, calls_of(link)->digest(queue, move, sum_of(link, piece)));
}

static size_t move_pages(kvt_link *link, operation *op, size_t max_bytes)
{
    page_copy *copy = &op->copies[op->num_copied];
    piece *piece = take_piece(link, op);
    device_queue *queue = next_queue(link);
    page_move move = next_move(link, copy, max_bytes);
    digest_move(link, op, piece, queue, &move);
    if (device_did(link, calls_of(link)->move(queue, &move)))
        await_device(link, piece, queue);
    copy->num_posted += move.num_pages;
    count_piece(link, piece, move.num_pages * move.len);
    release_piece(link, piece);
    return move.num_pages * move.len;
}

static size_t put_device_pages(kvt_link *link, operation *op, size_t max_bytes)
{
    page_copy *copy = &op->copies[op->num_copied];
    piece *piece = take_piece(link, op);
    page_move move = next_move(link, copy, max_bytes);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH,
        .cb.send = on_piece_request,
        .user_data = piece,
        .memh = link->engine->memory,
    };
    digest_move(link, op, piece, &link->queues[0], &move);
    if (piece->has_sum)
        await_device(link, piece, &link->queues[0]);
    for (uint64_t end = copy->num_posted + move.num_pages; copy->num_posted < end;) {
        byte_run run = next_run(link, copy, (end - copy->num_posted) * copy->page_part);
        ucs_status_ptr_t put = ucp_put_nbx(link->ep, link->engine->pool + run.src, run.len, link->pool_base + run.dst,
                                           link->rkey, &param);
        piece->num_left += is_pending(link, put, "page write");
    }
    param.op_attr_mask &= ~(uint32_t)UCP_OP_ATTR_FIELD_MEMH;
    piece->num_left += is_pending(link, ucp_ep_flush_nbx(link->ep, &param), "flush");
    count_piece(link, piece, move.num_pages * move.len);
    release_piece(link, piece);
    return move.num_pages * move.len;
}

static char *slot_of(const kvt_link *link, const piece *piece)
{
    return link->pinned + (size_t)(piece - link->pieces) * MESSAGE_BYTES;
}

static size_t stage_pages(kvt_link *link, operation *op, size_t max_bytes)
{
    page_copy *copy = &op->copies[op->num_copied];
    piece *piece = take_piece(link, op);
    device_queue *queue = next_queue(link);
    size_t staged = 0;
    while (piece->num_staged < MESSAGE_RUNS && staged < max_bytes && copy->num_posted < copy->num_pages) {
        byte_run run = next_run(link, copy, max_bytes - staged);
        piece->targets[piece->num_staged++] = (byte_target){run.dst, run.len};
        device_did(link, calls_of(link)->copy_out(queue, slot_of(link, piece) + staged, link->engine->pool + run.src,
                                                  run.len));
        staged += run.len;
    }
    piece->iov[1] = (ucp_dt_iov_t){slot_of(link, piece), staged};
    await_device(link, piece, queue);
    count_piece(link, piece, staged);
    release_piece(link, piece);
    return staged;
}

static void send_staged(kvt_link *link, piece *piece)
{
    const char *bytes = slot_of(link, piece);
    for (uint64_t i = 0; i < piece->num_staged && piece->op->with_digest; i++) {
        piece->op->digest += digest_bytes(bytes, piece->targets[i].dst, piece->targets[i].len);
        bytes += piece->targets[i].len;
    }
    send_piece(link, piece, piece->num_staged, 1);
}

/* The device is done with the piece. */
static void continue_piece(kvt_link *link, piece *piece)
{
    piece->queue = NULL;
    if (piece->has_sum)
        piece->op->digest += *sum_of(link, piece);
    if (piece->num_staged > 0 && link->state == LINK_UP)
        send_staged(link, piece);
    release_piece(link, piece);
}

static void look_at_queues(kvt_link *link)
{
    for (int i = 0; i < NUM_QUEUES; i++)
        if (!is_idle(&link->queues[i]))
            calls_of(link)->look(&link->queues[i]);
    if (!is_idle(&link->landing_queue))
        calls_of(link)->look(&link->landing_queue);
}

/* Go on with what the device has done. Returns whether that was anything. */
static bool settle_device(kvt_link *link)
{
    if (link->engine->device == NULL)
        return false;
    look_at_queues(link);
    bool busy = settle_landings(link);
    for (piece *piece = link->pieces; piece < link->pieces + MAX_PIECES; piece++)
        if (piece->op != NULL && piece->queue != NULL && is_reached(piece->queue, piece->mark)) {
            continue_piece(link, piece);
            busy = true;
        }
    return busy;
}
