/* Performs the operations of a link: puts in pieces, a flush behind each piece, then the note.
 *
 * Puts and active messages are not ordered by UCX, and a put is complete at the target only after a flush. So a note is
 * handed to UCX when every piece of its operation was flushed and every earlier note was handed over.
 */
#ifndef KVT_WRITE_H
#define KVT_WRITE_H

#include "queue.h"

#define MESSAGE_ID 1

static void on_put_or_flush(void *request, ucs_status_t status, void *user_data);
static void on_note_sent(void *request, ucs_status_t status, void *user_data);

static message_header make_header(const kvt_link *link, uint32_t kind, uint64_t number)
{
    return (message_header){
        .version = HEADER_VERSION,
        .kind = kind,
        .sender = link->engine->instance_id,
        .target = link->peer,
        .session = link->session,
        .echo = link->peer_session,
        .number = number,
    };
}

/* Account for what a UCX call returned: true when a callback will come. */
static bool is_pending(kvt_link *link, ucs_status_ptr_t result, const char *what)
{
    if (UCS_PTR_IS_ERR(result)) {
        fail_link(link, "%s failed: %s", what, ucs_status_string(UCS_PTR_STATUS(result)));
        return false;
    }
    if (result == NULL)
        return false; /* complete already */
    link->num_requests++;
    return true;
}

static void settle_request(kvt_link *link, void *request, ucs_status_t status, const char *what)
{
    ucp_request_free(request);
    link->num_requests--;
    if (status != UCS_OK)
        fail_link(link, "%s failed: %s", what, ucs_status_string(status));
}

/* `header` and `data` must live until the callback. Eager: the receiver gets the data with the callback. */
static bool send_message(kvt_link *link, const message_header *header, const void *data, size_t len,
                         ucp_send_nbx_callback_t callback, void *user_data)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = callback,
        .user_data = user_data,
    };
    return is_pending(link, ucp_am_send_nbx(link->ep, MESSAGE_ID, header, sizeof *header, data, len, &param), "send");
}

static void release_piece(kvt_link *link, piece *piece)
{
    if (--piece->num_left > 0)
        return;
    piece->op->num_pieces--;
    piece->op = NULL;
    link->num_pieces--;
}

static void on_put_or_flush(void *request, ucs_status_t status, void *user_data)
{
    piece *piece = user_data;
    kvt_link *link = piece->op->link;
    settle_request(link, request, status, "page write");
    release_piece(link, piece);
}

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

/* How many of the next pages are neighbours on both sides: one put moves them all. */
static uint64_t run_length(const operation *op, uint64_t max_pages)
{
    const page_pair *first = &op->pages[op->num_posted];
    uint64_t left = op->num_pages - op->num_posted, length = 1;
    while (length < left && length < max_pages && first[length].src == first->src + length &&
           first[length].dst == first->dst + length)
        length++;
    return length;
}

/* Post the next piece of `op` and the flush behind it. Returns its bytes. */
static size_t post_piece(kvt_link *link, operation *op)
{
    const kvt_engine *engine = link->engine;
    piece *piece = take_piece(link, op);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH,
        .cb.send = on_put_or_flush,
        .user_data = piece,
        .memh = engine->memory,
    };
    uint64_t max_pages = PIECE_BYTES / engine->page_bytes ? PIECE_BYTES / engine->page_bytes : 1, num_pages = 0;
    for (int puts = 0; puts < PIECE_PUTS && num_pages < max_pages && op->num_posted < op->num_pages; puts++) {
        page_pair at = op->pages[op->num_posted];
        uint64_t length = run_length(op, max_pages - num_pages);
        piece->num_left += is_pending(link,
                                      ucp_put_nbx(link->ep, engine->pool + at.src * engine->page_bytes,
                                                  length * engine->page_bytes,
                                                  link->pool_base + at.dst * engine->page_bytes, link->rkey, &param),
                                      "page write");
        op->num_posted += length;
        num_pages += length;
        if (link->state == LINK_FAILED)
            break;
    }
    param.op_attr_mask &= ~(uint32_t)UCP_OP_ATTR_FIELD_MEMH;
    piece->num_left += is_pending(link, ucp_ep_flush_nbx(link->ep, &param), "flush");
    release_piece(link, piece);
    atomic_fetch_add(&link->bytes_sent, num_pages * engine->page_bytes);
    return num_pages * engine->page_bytes;
}

static bool is_written(const operation *op)
{
    return op->num_posted == op->num_pages && op->num_pieces == 0;
}

static void on_note_sent(void *request, ucs_status_t status, void *user_data)
{
    operation *op = user_data;
    op->note_sent = true;
    settle_request(op->link, request, status, "note");
}

static void send_note(kvt_link *link, operation *op)
{
    op->header = make_header(link, MESSAGE_NOTE, link->notes_sent++);
    op->note_sent = !send_message(link, &op->header, op->note, op->note_len, on_note_sent, op);
}

/* Take the first operation off the link. Its event is what the caller sees next of it. */
static operation *pop_operation(kvt_link *link)
{
    operation *op = link->first;
    link->first = op->next;
    return op;
}

static void append_operation(kvt_link *link, operation *op)
{
    op->next = NULL;
    if (link->first == NULL)
        link->first = op;
    else
        link->last->next = op;
    link->last = op;
    if (link->posting == NULL)
        link->posting = op;
    if (link->noting == NULL)
        link->noting = op;
}

/* Do what can be done now: about one piece, so that links take turns. Returns whether anything was posted. */
static bool pump_operations(kvt_link *link)
{
    size_t posted = 0;
    bool busy = false;
    while (link->posting != NULL && link->num_pieces < MAX_PIECES && posted < PIECE_BYTES && link->state == LINK_UP) {
        if (link->posting->num_posted == link->posting->num_pages)
            link->posting = link->posting->next;
        else
            posted += post_piece(link, link->posting);
        busy = true;
    }
    while (link->noting != NULL && link->noting != link->posting && is_written(link->noting) && link->state == LINK_UP) {
        operation *op = link->noting;
        link->noting = op->next;
        if (op->note_len > 0)
            send_note(link, op);
        else
            op->note_sent = true;
        busy = true;
    }
    while (link->first != NULL && link->first != link->noting && link->first->note_sent && link->state == LINK_UP)
        push_event(link->engine, &pop_operation(link)->done);
    return busy;
}

#endif
