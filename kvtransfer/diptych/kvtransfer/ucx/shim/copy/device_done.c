/* Goes on with what a device has done for the pieces of a link. */

static void send_staged(kvt_link *link, piece *piece)
{
    const char *bytes = slot_of(link, piece);
    for (uint64_t i = 0; i < piece->num_staged && piece->op->with_digest; i++) {
        piece->op->digest += digest_bytes(bytes, piece->targets[i].dst, piece->targets[i].len);
        bytes += piece->targets[i].len;
    }
    send_piece(link, piece, piece->num_staged, 1);
}

static void send_on(kvt_link *link, piece *piece)
{
    if (link->path == PATH_PUT)
        put_images(link, piece);
    else
        send_staged(link, piece);
}

/* The device is done with the piece. */
static void continue_piece(kvt_link *link, piece *piece)
{
    piece->queue = NULL;
    if (piece->has_sum)
        piece->op->digest += *sum_of(link, piece);
    if (piece->num_staged > 0 && link->state == LINK_UP)
        send_on(link, piece);
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
