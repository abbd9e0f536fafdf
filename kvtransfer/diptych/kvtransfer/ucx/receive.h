/* Takes in what peers send. Runs inside ucp_worker_progress, so it only notes things; step_link acts on them. */
#ifndef KVT_RECEIVE_H
#define KVT_RECEIVE_H

#include "link.h"

/* The link that a message belongs to; NULL when it is for a former instance, for a former link, or for none. */
static kvt_link *find_link(kvt_engine *engine, const message_header *header)
{
    kvt_link *link = engine->links;
    while (link != NULL && (link->peer != header->sender || link->state > LINK_UP))
        link = link->next;
    if (link == NULL || header->target != engine->instance_id || header->session < link->peer_session)
        return NULL;
    return link;
}

/* Learn from the header where the peer is. Returns whether the message is part of the link as it is now. */
static bool meet(kvt_link *link, const message_header *header)
{
    if (header->session > link->peer_session) {
        if (link->state == LINK_UP) {
            fail_link(link, "the peer began a new link");
            return false;
        }
        link->peer_session = header->session;
        link->answer_due = true;
    }
    if (header->echo != link->session) {
        link->answer_due = true;
        return false;
    }
    atomic_store(&link->last_heard_s, now_s());
    if (link->state == LINK_CONNECTING)
        come_up(link);
    return true;
}

static void take_note(kvt_link *link, const message_header *header, const void *data, size_t len)
{
    kvt_engine *engine = link->engine;
    if (header->number != link->notes_received++) {
        fail_link(link, "note %lu came in the place of %lu", (unsigned long)header->number,
                  (unsigned long)link->notes_received - 1);
        return;
    }
    event_node *node = malloc(sizeof *node + len);
    if (node == NULL) {
        fail_link(link, "out of memory for a note of %zu bytes", len);
        return;
    }
    char *copy = memcpy(node + 1, data, len);
    *node = (event_node){
        .event = {.kind = KVT_NOTE, .peer = link->peer, .data = copy, .data_len = len},
        .memory = node,
    };
    pthread_mutex_lock(&engine->lock);
    engine->num_notes_waiting++;
    engine->note_bytes_waiting += len;
    append_event(engine, node);
    pthread_mutex_unlock(&engine->lock);
}

static ucs_status_t on_message(void *arg, const void *header_bytes, size_t header_len, void *data, size_t len,
                               const ucp_am_recv_param_t *param)
{
    kvt_engine *engine = arg;
    message_header header;
    kvt_link *link = NULL;
    if (header_len == sizeof header && !(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        memcpy(&header, header_bytes, sizeof header);
        link = header.version == HEADER_VERSION ? find_link(engine, &header) : NULL;
    }
    if (link == NULL || !meet(link, &header)) {
        atomic_fetch_add(&engine->num_dropped_messages, link == NULL);
    } else if (header.kind == MESSAGE_NOTE) {
        take_note(link, &header, data, len);
    } else if (header.kind == MESSAGE_BYE) {
        fail_link(link, "the peer closed the link");
    }
    return UCS_OK;
}

#endif
