/* Performs the operations of a link's streams: pages first, then the note, when every page is in the peer's pool. */
#include <math.h>

static bool is_written(const operation *op)
{
    return op->num_pieces == 0 && !has_pages_to_post(op);
}

static void on_note_sent(void *request, ucs_status_t status, void *user_data)
{
    operation *op = user_data;
    op->note_sent = true;
    settle_request(op->link, request, status, "note");
}

static void send_note(kvt_link *link, stream *stream, operation *op)
{
    op->header = make_header(link, MESSAGE_NOTE);
    op->header.number = link->num_sent++;
    op->header.note.has_digest = stream->has_digest || op->has_note_digest;
    op->header.note.digest = op->has_note_digest ? op->note_digest : stream->digest;
    stream->has_digest = false;
    stream->digest = 0;
    op->note_sent = !send_bytes(link, &op->header, op->note, op->note_len, on_note_sent, op);
}

/* The pages of the operation are written, or it failed and what it posted has ended. */
static void conclude(kvt_link *link, stream *stream, operation *op)
{
    if (op->error == NULL && op->with_digest) {
        stream->has_digest = true;
        stream->digest += op->digest;
    }
    if (op->error == NULL && op->note_len > 0)
        send_note(link, stream, op);
    else
        op->note_sent = true;
}

static void report(kvt_link *link, operation *op)
{
    op->done.event.text = op->error;
    op->done.event.has_digest = op->with_digest && op->error == NULL;
    op->done.event.digest = op->digest;
    op->done.event.seconds = now_s() - op->began_s;
    push_event(link->engine, &op->done);
}

static bool pump_stream(kvt_link *link, stream *stream)
{
    bool busy = false;
    while (stream->noting != stream->posting && is_written(stream->noting) && link->state == LINK_UP) {
        operation *op = stream->noting;
        stream->noting = op->next;
        conclude(link, stream, op);
        busy = true;
    }
    while (stream->first != stream->noting && stream->first->note_sent && link->state == LINK_UP)
        report(link, pop_operation(stream));
    return busy;
}

static bool pump_pages(kvt_link *link)
{
    size_t posted = 0;
    stream *stream;
    while (link->num_pieces < MAX_PIECES && posted < quantum_of(link) && link->state == LINK_UP &&
           (stream = whose_turn(link)) != NULL)
        posted += take_turn(link, stream);
    return posted > 0;
}

/* Do what can be done now. Returns whether that was anything: then there may be more. */
static bool pump_operations(kvt_link *link)
{
    bool busy = pump_pages(link);
    for (stream *stream = link->streams; stream != NULL; stream = stream->next)
        busy |= pump_stream(link, stream);
    drop_streams_that_are_over(link);
    return busy;
}

static bool is_late(const operation *op, double now)
{
    return op != NULL && op->deadline_s > 0 && now > op->deadline_s;
}

/* Fail an operation that took too long; and the link, when what was posted of it does not end. */
static void check_deadline(kvt_link *link, stream *stream, operation *op, double now)
{
    if (is_late(op, now) && op->error == NULL)
        fail_stream(stream, op, "timed out");
    else if (is_late(op, now - link->engine->silence_s) && op->num_pieces > 0)
        fail_link(link, "pages that were posted are not complete long after their deadline");
}

static void check_deadlines(kvt_link *link, double now)
{
    for (stream *stream = link->streams; stream != NULL; stream = stream->next) {
        check_deadline(link, stream, stream->noting, now);
        check_deadline(link, stream, stream->posting, now);
    }
}

/* When check_deadline has something to do. */
static double late_s(const operation *op, double silence_s)
{
    if (op == NULL || op->deadline_s == 0)
        return INFINITY;
    return op->error == NULL ? op->deadline_s : op->deadline_s + silence_s;
}

static double deadline_due_s(const kvt_link *link, double due)
{
    for (const stream *stream = link->streams; stream != NULL; stream = stream->next) {
        due = fmin(due, late_s(stream->noting, link->engine->silence_s));
        due = fmin(due, late_s(stream->posting, link->engine->silence_s));
    }
    return due;
}
