/* The streams of a link, and whose turn it is to post pages: deficit round robin by bytes.
 *
 * Among those of the highest priority that have pages to post, the first in the list may post a quantum of bytes, then it
 * is the last in the list. What a piece leaves of the quantum stays its credit for as long as it has pages to post.
 */

static const char *const FAILED_BEFORE = "an earlier operation of its stream failed";

static bool has_pages_to_post(const operation *op)
{
    return op->error == NULL && op->num_copied < op->num_copies;
}

static void skip_posted(stream *stream)
{
    while (stream->posting != NULL && !has_pages_to_post(stream->posting))
        stream->posting = stream->posting->next;
}

/* The stream that the operation belongs to, made of its spare if there is none. */
static stream *find_stream(kvt_link *link, operation *op)
{
    stream **at = &link->streams;
    while (*at != NULL && (*at)->id != op->stream_id)
        at = &(*at)->next;
    if (*at == NULL) {
        *at = op->spare;
        (*at)->id = op->stream_id;
    } else {
        free(op->spare);
    }
    op->spare = NULL;
    return *at;
}

static void append_operation(kvt_link *link, operation *op)
{
    stream *stream = find_stream(link, op);
    stream->priority = op->priority;
    if (stream->is_broken)
        op->error = FAILED_BEFORE;
    op->next = NULL;
    if (stream->first == NULL)
        stream->first = op;
    else
        stream->last->next = op;
    stream->last = op;
    if (stream->posting == NULL)
        stream->posting = op;
    if (stream->noting == NULL)
        stream->noting = op;
    skip_posted(stream);
}

/* Take the first operation off the stream. Its event is what the caller sees next of it. */
static operation *pop_operation(stream *stream)
{
    operation *op = stream->first;
    stream->first = op->next;
    atomic_fetch_sub(&op->link->queued_bytes, bytes_to_post(op));
    return op;
}

/* Post no more of an operation and of those behind it; each ends when what it posted has. */
static void fail_stream(stream *stream, operation *op, const char *reason)
{
    op->error = reason;
    stream->is_broken = stream->id != 0;
    for (op = op->next; op != NULL && stream->is_broken; op = op->next)
        op->error = FAILED_BEFORE;
    skip_posted(stream);
}

/* A stream without operations is nothing, unless its digest waits for a note or it is broken. */
static bool is_over(const stream *stream)
{
    return stream->first == NULL && !stream->has_digest && !stream->is_broken;
}

/* A broken one is kept for what its caller submits before it polls the failure: the last MAX_BROKEN of them. */
static bool is_broken_off(const stream *stream)
{
    return stream->first == NULL && stream->is_broken;
}

static void drop_streams_that_are_over(kvt_link *link)
{
    size_t num_broken_off = 0;
    for (const stream *stream = link->streams; stream != NULL; stream = stream->next)
        num_broken_off += is_broken_off(stream);
    for (stream **at = &link->streams; *at != NULL;) {
        stream *stream = *at;
        bool is_forgotten = is_broken_off(stream) && num_broken_off > MAX_BROKEN; /* the oldest are first */
        if (is_over(stream) || is_forgotten) {
            num_broken_off -= is_forgotten;
            *at = stream->next;
            free(stream);
        } else {
            at = &stream->next;
        }
    }
}

/* Whether kernels are done with the pages, and what they are packed into is free. */
static bool may_post(const kvt_link *link, const operation *op)
{
    return is_open(link->engine, op) && (!is_packed_on_device(link, op) || free_image_slot(link) >= 0);
}

static stream *whose_turn(const kvt_link *link)
{
    stream *found = NULL;
    for (stream *stream = link->streams; stream != NULL; stream = stream->next)
        if (stream->posting != NULL && may_post(link, stream->posting) && (found == NULL || stream->priority > found->priority))
            found = stream;
    return found;
}

static void move_to_end(kvt_link *link, stream *moved)
{
    stream **at = &link->streams;
    while (*at != moved)
        at = &(*at)->next;
    *at = moved->next;
    while (*at != NULL)
        at = &(*at)->next;
    moved->next = NULL;
    *at = moved;
}

/* What a stream may post in its turn; and a link, before whatever else there is to do. */
static size_t quantum_of(const kvt_link *link)
{
    static const size_t quantum[] = QUANTUM_BYTES;
    return link->engine->device && link->path == PATH_PUT ? MOVE_BYTES : quantum[link->path];
}

/* Post a piece of a stream's pages. Returns its bytes. */
static size_t take_turn(kvt_link *link, stream *stream)
{
    if (stream->credit == 0)
        stream->credit = quantum_of(link);
    size_t posted = post_pages(link, stream->posting, stream->credit);
    stream->credit -= smaller(stream->credit, posted); /* a device takes whole pages, and what is packed comes in whole units */
    skip_posted(stream);
    if (stream->posting == NULL)
        stream->credit = 0;
    if (stream->credit == 0)
        move_to_end(link, stream);
    return posted;
}
