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
