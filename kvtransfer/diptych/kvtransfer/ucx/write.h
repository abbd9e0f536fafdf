/* Performs the operations of a link, in order: pages first, then the note, when every page is in the peer's pool. */
#ifndef KVT_WRITE_H
#define KVT_WRITE_H

#include "pages.h"

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
    op->header = make_header(link, MESSAGE_NOTE);
    op->header.number = link->num_sent++;
    op->note_sent = !send_bytes(link, &op->header, op->note, op->note_len, on_note_sent, op);
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

static bool pump_pages(kvt_link *link)
{
    size_t posted = 0;
    bool busy = false;
    while (link->posting != NULL && link->num_pieces < MAX_PIECES && posted < PIECE_BYTES && link->state == LINK_UP) {
        if (link->posting->num_posted == link->posting->num_pages)
            link->posting = link->posting->next;
        else
            posted += post_pages(link, link->posting);
        busy = true;
    }
    return busy;
}

static bool pump_notes(kvt_link *link)
{
    bool busy = false;
    while (link->noting != link->posting && is_written(link->noting) && link->state == LINK_UP) {
        operation *op = link->noting;
        link->noting = op->next;
        if (op->note_len > 0)
            send_note(link, op);
        else
            op->note_sent = true;
        busy = true;
    }
    return busy;
}

/* Do what can be done now. Returns whether that was anything: then there may be more. */
static bool pump_operations(kvt_link *link)
{
    bool busy = pump_pages(link) | pump_notes(link);
    while (link->first != link->noting && link->first->note_sent && link->state == LINK_UP)
        push_event(link->engine, &pop_operation(link)->done);
    return busy;
}

#endif
