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

/* How many of the next pages are neighbours on both sides, and moved as a whole. */
static uint64_t run_length(const operation *op, uint64_t max_pages)
{
    const page_pair *first = &op->pages[op->num_posted];
    uint64_t left = op->num_pages - op->num_posted, length = 1;
    if (op->packing != NULL || op->page_part != op->link->engine->page_nbytes || op->page_part != op->link->page_nbytes)
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
    uint64_t begin = op->packing ? 0 : first.src * op->link->engine->page_nbytes;
    byte_run run = {
        .src = begin + op->src_offset + op->part_posted,
        .dst = first.dst * op->link->page_nbytes + op->dst_offset + op->part_posted,
        .len = left < max_bytes ? left : max_bytes,
        .page = op->num_posted,
    };
    op->part_posted += run.len;
    op->num_posted += op->part_posted / op->page_part;
    op->part_posted %= op->page_part;
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
