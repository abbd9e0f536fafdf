/* Pages in device memory for a pool with another layout. A kernel packs the images of some pages into other memory of our
 * device, one behind the other; from there they travel as pages do: the mover stores them, UCX puts them, or they are staged.
 *
 * A link has as much of that memory as its pieces in flight need, from its first packed page on. While one piece moves the
 * next one is packed: a queue packs and sums, another moves. (If each piece kept to a queue, two that began together would move
 * together, end together, and be packed together while nothing moves, again and again.) A page that is larger than a piece is
 * packed and sent a part at a time.
 */

static bool is_packed_on_device(const kvt_link *link, const operation *op)
{
    return link->engine->device != NULL && op->copies[op->num_copied].packing != NULL;
}

static size_t image_slot_bytes(const kvt_link *link)
{
    return link->path == PATH_STAGED ? MESSAGE_BYTES : IMAGE_BYTES;
}

/* A slot that no piece of the link holds. Negative: there is none now. */
static int32_t free_image_slot(const kvt_link *link)
{
    int32_t slot = link->path == PATH_STAGED ? MAX_PIECES : NUM_IMAGE_SLOTS;
    bool is_free = false;
    while (!is_free && --slot >= 0) {
        is_free = true;
        for (const piece *piece = link->pieces; piece < link->pieces + MAX_PIECES; piece++)
            is_free &= piece->op == NULL || piece->image_slot != slot;
    }
    return slot;
}

static char *image_slot(const kvt_link *link, const piece *piece)
{
    return link->images + (size_t)piece->image_slot * image_slot_bytes(link);
}

/* UCX puts from memory that it knows. */
static void register_images(kvt_link *link, size_t bytes)
{
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = link->images,
        .length = bytes,
        .memory_type = (ucs_memory_type_t)link->engine->device->memory_type,
    };
    if (ucp_mem_map(link->engine->context, &params, &link->images_handle) == UCS_OK)
        return;
    link->images_handle = NULL;
    fail_link(link, "UCX can't reach the memory that pages are packed into");
}

/* Returns whether there is memory to pack pages into. */
static bool have_images(kvt_link *link)
{
    _Static_assert(NUM_IMAGE_SLOTS * IMAGE_BYTES >= MAX_PIECES * MESSAGE_BYTES, "pieces that are staged have slots, too");
    const size_t bytes = NUM_IMAGE_SLOTS * IMAGE_BYTES;
    if (link->image_pages == NULL)
        link->image_pages = malloc(MOVE_PAGES * sizeof *link->image_pages);
    if (link->images == NULL && calls_of(link)->lend(link->engine->device, bytes, &link->images) != NULL)
        link->images = NULL;
    if (link->image_pages == NULL || link->images == NULL)
        fail_link(link, "out of memory of the device for %zu bytes of packed pages", bytes);
    else if (link->path == PATH_PUT && link->images_handle == NULL)
        register_images(link, bytes);
    return link->state == LINK_UP;
}

/* The next images of a copy, as many as `max_bytes` hold; or the next rows of one that is larger than that. */
static image_pack next_images(const kvt_link *link, const page_copy *copy, uint64_t max_bytes, uint64_t max_images)
{
    const packing *packing = copy->packing;
    const page_pair *images = &copy->pages[copy->num_posted];
    const int64_t row = packed_row_bytes(&packing->how);
    uint64_t left = copy->page_part - copy->part_posted, bytes = smaller(left, whole_units(copy, max_bytes)), count = 1;
    uint64_t wanted = smaller(copy->num_pages - copy->num_posted, smaller(max_bytes / copy->page_part, max_images));
    while (copy->part_posted == 0 && count < wanted &&
           (uint64_t)num_source_pages(&packing->how, packing->num_source, images[0].src, images[count].src) + count < PACK_ENTRIES)
        count++;
    return (image_pack){
        .pool = link->engine->pool,
        .how = &packing->how,
        .source = packing->source,
        .num_source = packing->num_source,
        .images = images,
        .num_images = (uint32_t)count,
        .first_row = (int64_t)(copy->src_offset + copy->part_posted) / row,
        .num_rows = (int64_t)bytes / row,
    };
}

/* How packed images move on. */
static page_move move_of(const kvt_link *link, const page_copy *copy, const image_pack *images)
{
    uint64_t len = (uint64_t)(images->num_rows * packed_row_bytes(images->how));
    for (uint32_t i = 0; i < images->num_images; i++)
        link->image_pages[i] = (page_pair){i, images->images[i].dst};
    return (page_move){
        .src = images->to,
        .dst = link->device_pool,
        .pages = link->image_pages,
        .num_pages = images->num_images,
        .src_page_nbytes = len,
        .dst_page_nbytes = link->page_nbytes,
        .dst_offset = copy->dst_offset + copy->part_posted,
        .len = len,
    };
}

/* Remember where images go that leave once they are packed. */
static void set_targets(piece *piece, const page_move *move)
{
    piece->num_staged = move->num_pages;
    for (uint32_t i = 0; i < move->num_pages; i++)
        piece->targets[i] = (byte_target){move->pages[i].dst * move->dst_page_nbytes + move->dst_offset, move->len};
}

/* Let the device store images behind their packing. */
static void move_images(kvt_link *link, piece *piece, device_queue *packed, const page_move *move)
{
    device_queue *moving = &link->queues[1];
    if (device_did(link, calls_of(link)->behind(moving, packed)) && device_did(link, calls_of(link)->move(moving, move)))
        await_device(link, piece, moving);
}

/* Let the device go on with images behind their packing. */
static void send_images(kvt_link *link, const operation *op, piece *piece, device_queue *queue, const page_move *move)
{
    size_t bytes = move->num_pages * move->len;
    if (link->path == PATH_STAGED) {
        device_did(link, calls_of(link)->copy_out(queue, slot_of(link, piece), move->src, bytes));
        piece->iov[1] = (ucp_dt_iov_t){slot_of(link, piece), bytes};
    } else {
        digest_move(link, op, piece, queue, move);
    }
    if (link->path == PATH_MOVER) {
        move_images(link, piece, queue, move);
        return;
    }
    set_targets(piece, move);
    await_device(link, piece, queue);
}

static size_t post_images(kvt_link *link, operation *op, size_t max_bytes)
{
    page_copy *copy = &op->copies[op->num_copied];
    if (!have_images(link))
        return 0;
    piece *piece = take_piece(link, op);
    device_queue *queue = link->path == PATH_MOVER ? &link->queues[0] : next_queue(link);
    uint64_t max_images = link->path == PATH_MOVER ? MOVE_PAGES : MESSAGE_RUNS;
    image_pack images = next_images(link, copy, smaller(max_bytes, image_slot_bytes(link)), max_images);
    piece->image_slot = free_image_slot(link);
    images.to = image_slot(link, piece);
    page_move move = move_of(link, copy, &images);
    if (device_did(link, calls_of(link)->pack(queue, &images)))
        send_images(link, op, piece, queue, &move);
    copy->part_posted += move.len;
    copy->num_posted += move.num_pages - 1 + copy->part_posted / copy->page_part;
    copy->part_posted %= copy->page_part;
    count_piece(link, piece, move.num_pages * move.len);
    release_piece(link, piece);
    return move.num_pages * move.len;
}

/* The images are packed. */
static void put_images(kvt_link *link, piece *piece)
{
    const char *bytes = image_slot(link, piece);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH,
        .cb.send = on_piece_request,
        .user_data = piece,
        .memh = link->images_handle,
    };
    for (uint64_t i = 0; i < piece->num_staged; bytes += piece->targets[i++].len)
        piece->num_left += is_pending(link, ucp_put_nbx(link->ep, bytes, piece->targets[i].len,
                                                        link->pool_base + piece->targets[i].dst, link->rkey, &param),
                                      "page write");
    param.op_attr_mask &= ~(uint32_t)UCP_OP_ATTR_FIELD_MEMH;
    piece->num_left += is_pending(link, ucp_ep_flush_nbx(link->ep, &param), "flush");
}
