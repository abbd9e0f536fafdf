/* An operation's pages are posted in pieces, a few of them in flight on a link. */

#define HOT_S 500e-6 /* two pieces at 150 GB/s */

/* Waking from a sleep takes as long as moving tens of MB. So while a device has pieces the thread looks instead of sleeping,
 * for at most HOT_S since the last one was posted or ended. */
static void keep_hot(kvt_link *link)
{
    if (link->engine->device != NULL)
        link->engine->hot_until_s = now_s() + HOT_S;
}

static piece *take_piece(kvt_link *link, operation *op)
{
    piece *piece = link->pieces;
    while (piece->op != NULL)
        piece++;
    piece->op = op;
    piece->queue = NULL;
    piece->num_staged = 0;
    piece->has_sum = false;
    piece->image_slot = -1;
    piece->num_left = 1; /* ours, until everything was posted */
    op->num_pieces++;
    link->num_pieces++;
    return piece;
}

static void count_piece(kvt_link *link, piece *piece, size_t bytes)
{
    keep_hot(link);
    piece->bytes = bytes;
    atomic_fetch_add(&link->in_flight_bytes, bytes);
}

static void release_piece(kvt_link *link, piece *piece)
{
    if (--piece->num_left > 0)
        return;
    keep_hot(link);
    piece->op->num_pieces--;
    piece->op = NULL;
    atomic_fetch_sub(&link->in_flight_bytes, piece->bytes);
    link->num_pieces--;
}

static uint64_t bytes_to_post(const operation *op)
{
    uint64_t bytes = 0;
    for (const page_copy *copy = op->copies + op->num_copied; copy < op->copies + op->num_copies; copy++)
        bytes += (copy->num_pages - copy->num_posted) * copy->page_part - copy->part_posted;
    return bytes;
}

/* Go on to the next pages of the operation, if these are done. */
static void skip_copied(operation *op)
{
    const page_copy *copy = &op->copies[op->num_copied];
    op->num_copied += copy->num_posted == copy->num_pages;
}

/* How many of the next pages are neighbours on both sides, and moved as a whole. */
static uint64_t run_length(const kvt_link *link, const page_copy *copy, uint64_t max_pages)
{
    const page_pair *first = &copy->pages[copy->num_posted];
    uint64_t left = copy->num_pages - copy->num_posted, length = 1;
    if (copy->packing != NULL || copy->page_part != link->engine->page_nbytes || copy->page_part != link->page_nbytes)
        return 1;
    while (length < left && length < max_pages && first[length].src == first->src + length &&
           first[length].dst == first->dst + length)
        length++;
    return length;
}

/* Take the next run of bytes off what moves, at most `max_bytes`; it may begin and end inside a page. */
static byte_run next_run(const kvt_link *link, page_copy *copy, uint64_t max_bytes)
{
    page_pair first = copy->pages[copy->num_posted];
    uint64_t left = run_length(link, copy, max_bytes / copy->page_part + 1) * copy->page_part - copy->part_posted;
    uint64_t begin = copy->packing ? 0 : first.src * link->engine->page_nbytes;
    byte_run run = {
        .src = begin + copy->src_offset + copy->part_posted,
        .dst = first.dst * link->page_nbytes + copy->dst_offset + copy->part_posted,
        .len = left < max_bytes ? left : max_bytes,
        .copy = copy,
        .page = copy->num_posted,
    };
    copy->part_posted += run.len;
    copy->num_posted += copy->part_posted / copy->page_part;
    copy->part_posted %= copy->page_part;
    return run;
}

static void on_piece_request(void *request, ucs_status_t status, void *user_data)
{
    piece *piece = user_data;
    kvt_link *link = piece->op->link;
    settle_request(link, request, status, "page write");
    release_piece(link, piece);
}

/* Send the piece as a message: its first `num_targets` targets, and the bytes in iov[1] to iov[num_parts]. */
static void send_piece(kvt_link *link, piece *piece, uint64_t num_targets, uint64_t num_parts)
{
    piece->iov[0] = (ucp_dt_iov_t){piece->targets, num_targets * sizeof piece->targets[0]};
    piece->header = make_header(link, MESSAGE_PAGES);
    piece->header.number = link->num_sent++;
    piece->header.pages.num_runs = num_targets;
    piece->is_unacknowledged = true;
    piece->num_left++; /* until the peer acknowledges it */
    piece->num_left += send_message(link, &piece->header, piece->iov, num_parts + 1, ucp_dt_make_iov(),
                                    on_piece_request, piece);
}
