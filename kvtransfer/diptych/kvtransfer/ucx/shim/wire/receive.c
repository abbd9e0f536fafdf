/* Takes in what peers send. Runs inside ucp_worker_progress, so it only notes things; step_link acts on them.
 *
 * Notes and pages are numbered together and dealt with in that order. UCX keeps the order of a lane, but not while it
 * changes the lanes of a new endpoint: what comes early waits here.
 */

#define RTT_WEIGHT 0.25 /* of the last one, in their average */

/* In a time that does not depend on how much of it is right. */
static bool is_key(const uint8_t *ours, const uint8_t *theirs)
{
    uint8_t difference = 0;
    for (size_t i = 0; i < KVT_KEY_BYTES; i++)
        difference |= ours[i] ^ theirs[i];
    return difference == 0;
}

/* Read a header that carries our key. Nothing else of it is believed before. */
static bool read_header(const uint8_t *key, const void *bytes, size_t len, message_header *header)
{
    if (len != sizeof *header)
        return false;
    memcpy(header, bytes, sizeof *header);
    return is_key(key, header->key) & (header->version == HEADER_VERSION);
}

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
    take_acknowledgement(link, header->received);
    return true;
}

/* Hellos carry the sender's clock, and ours as it last heard it: the time between is a round trip. */
static void take_clocks(kvt_link *link, const message_header *header)
{
    double now = now_s(), known_s = link->rtt_s;
    link->peer_clock_s = header->hello.sent_s;
    link->peer_clock_at_s = now;
    if (header->hello.echo_s == 0)
        return;
    double rtt_s = now - header->hello.echo_s - header->hello.held_s;
    if (!(rtt_s >= 0))
        return; /* nonsense; and no number stays one in an average */
    link->rtt_s = known_s == 0 ? rtt_s : known_s + (rtt_s - known_s) * RTT_WEIGHT;
}

static void take_note(kvt_link *link, const message_header *header, const void *data, size_t len)
{
    kvt_engine *engine = link->engine;
    event_node *node = len > KVT_MAX_NOTE_BYTES ? NULL : malloc(sizeof *node + len);
    if (node == NULL) {
        fail_link(link, "no room for a note of %zu bytes", len);
        return;
    }
    char *copy = memcpy(node + 1, data, len);
    *node = (event_node){
        .event = {.kind = KVT_NOTE,
                  .has_digest = header->note.has_digest != 0,
                  .digest = header->note.digest,
                  .peer = link->peer,
                  .data = copy,
                  .data_len = len},
        .memory = node,
    };
    pthread_mutex_lock(&engine->lock);
    engine->num_notes_waiting++;
    engine->note_bytes_waiting += len;
    append_event(engine, node);
    pthread_mutex_unlock(&engine->lock);
}

/* Whether the run lies in pages that were granted to the peer. Needs the lock of the grants. */
static bool may_write(kvt_link *link, byte_target target)
{
    const kvt_engine *engine = link->engine;
    uint64_t last = target.dst + (target.len > 0 ? target.len - 1 : 0);
    return is_granted(&engine->grants, link->peer, target.dst / engine->page_nbytes, last / engine->page_nbytes);
}

/* Check all runs of a page message before the first byte is written. Returns what is wrong. Needs the lock of the grants. */
static const char *check_runs(kvt_link *link, uint64_t num_runs, const char *data, size_t len)
{
    uint64_t pool_bytes = link->engine->page_nbytes * link->engine->num_pages, left = len - num_runs * sizeof(byte_target);
    for (uint64_t i = 0; i < num_runs; i++) {
        byte_target target;
        memcpy(&target, data + i * sizeof target, sizeof target);
        if (target.len == 0 || target.len > left || target.len > pool_bytes || target.dst > pool_bytes - target.len)
            return "a page message that does not fit our pool";
        if (!may_write(link, target)) {
            atomic_fetch_add(&link->engine->num_ungranted, 1);
            return "a page message for pages that were not granted to the peer";
        }
        left -= target.len;
    }
    return NULL;
}

/* Bring the runs of a page message into our pool. The message is `num_runs` targets, then their bytes. */
static void spread_pages(kvt_link *link, uint64_t num_runs, const char *data, char *pinned)
{
    const char *first = data + num_runs * sizeof(byte_target), *bytes = first;
    for (uint64_t i = 0; i < num_runs && link->state == LINK_UP; i++) {
        byte_target target;
        memcpy(&target, data + i * sizeof target, sizeof target);
        if (pinned != NULL)
            land_bytes(link, pinned + (bytes - first), target.dst, bytes, target.len);
        else
            memcpy(link->engine->pool + target.dst, bytes, target.len);
        bytes += target.len;
    }
}

static void take_pages(kvt_link *link, const message_header *header, const char *data, size_t len)
{
    uint64_t num_runs = header->pages.num_runs, targets_bytes = num_runs * sizeof(byte_target);
    char *pinned = NULL;
    if (num_runs > MESSAGE_RUNS || targets_bytes > len || len - targets_bytes > MESSAGE_BYTES) {
        fail_link(link, "a page message that makes no sense");
        return;
    }
    if (link->engine->device != NULL && (pinned = begin_landing(link, header->number)) == NULL)
        return;
    pthread_mutex_lock(&link->engine->grants.lock);
    const char *trouble = check_runs(link, num_runs, data, len);
    if (trouble == NULL)
        spread_pages(link, num_runs, data, pinned);
    pthread_mutex_unlock(&link->engine->grants.lock);
    if (trouble != NULL)
        fail_link(link, "%s", trouble);
    else if (pinned != NULL)
        end_landing(link);
    else
        link->answer_due = true; /* a hello acknowledges it */
}

/* Deal with the next message in order. */
static void take_message(kvt_link *link, const message_header *header, const void *data, size_t len)
{
    link->num_received++;
    if (header->kind == MESSAGE_NOTE)
        take_note(link, header, data, len);
    else
        take_pages(link, header, data, len);
}

/* Keep a message whose turn has not come, in order. */
static void keep_early(kvt_link *link, const message_header *header, const void *data, size_t len)
{
    bool has_room = link->num_early < MAX_EARLY && len <= MAX_EARLY_BYTES - link->early_bytes;
    early_message *early = has_room ? malloc(sizeof *early + len) : NULL, **at = &link->early;
    if (early == NULL) {
        fail_link(link, "message %lu is missing", (unsigned long)link->num_received);
        return;
    }
    *early = (early_message){.header = *header, .len = len, .since_s = now_s()};
    memcpy(early->data, data, len);
    while (*at != NULL && (*at)->header.number < header->number)
        at = &(*at)->next;
    early->next = *at;
    *at = early;
    link->num_early++;
    link->early_bytes += len;
}

static void take_in_order(kvt_link *link, const message_header *header, const void *data, size_t len)
{
    if (header->number < link->num_received) {
        fail_link(link, "message %lu came twice", (unsigned long)header->number);
        return;
    }
    if (header->number > link->num_received) {
        keep_early(link, header, data, len);
        return;
    }
    take_message(link, header, data, len);
    while (link->early != NULL && link->early->header.number == link->num_received) {
        early_message *early = link->early;
        take_message(link, &early->header, early->data, early->len);
        drop_early(link);
    }
}

static ucs_status_t on_message(void *arg, const void *header_bytes, size_t header_len, void *data, size_t len,
                               const ucp_am_recv_param_t *param)
{
    kvt_engine *engine = arg;
    message_header header;
    if (!read_header(engine->key, header_bytes, header_len, &header)) {
        atomic_fetch_add(&engine->num_unauthenticated, 1);
        return UCS_OK;
    }
    kvt_link *link = param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV ? NULL : find_link(engine, &header);
    if (link == NULL || !meet(link, &header))
        atomic_fetch_add(&engine->num_dropped_messages, link == NULL);
    else if (header.kind == MESSAGE_NOTE || header.kind == MESSAGE_PAGES)
        take_in_order(link, &header, data, len);
    else if (header.kind == MESSAGE_HELLO)
        take_clocks(link, &header);
    else if (header.kind == MESSAGE_BYE)
        fail_link(link, "the peer closed the link");
    return UCS_OK;
}
