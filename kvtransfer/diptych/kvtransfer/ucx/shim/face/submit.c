/* Turns what the caller wants into operations, and hands them to the progress thread. */

static bool in_range(uint64_t num, const int64_t *pages, uint64_t num_pages)
{
    for (uint64_t i = 0; i < num; i++)
        if (pages[i] < 0 || (uint64_t)pages[i] >= num_pages)
            return false;
    return true;
}

/* Whether the bytes that are wanted of each page are in the pages, or images, of both sides. */
static bool fits(const kvt_link *link, const kvt_operation *wanted)
{
    const struct page_pack *pack = wanted->pack;
    uint64_t ours = pack ? image_bytes(pack) : link->engine->page_nbytes, theirs = link->page_nbytes;
    uint64_t unit = pack ? packed_unit(pack) : link->engine->device ? LINE_BYTES : 8;
    uint64_t num_src = pack ? wanted->num_src : wanted->num_pages;
    return wanted->num_pages == 0 ||
           (wanted->nbytes > 0 && wanted->nbytes % unit == 0 && wanted->src_offset % unit == 0 &&
            wanted->dst_offset % (pack ? 8 : unit) == 0 && wanted->nbytes <= ours && wanted->src_offset <= ours - wanted->nbytes &&
            wanted->nbytes <= theirs && wanted->dst_offset <= theirs - wanted->nbytes &&
            in_range(num_src, wanted->src, link->engine->num_pages) &&
            in_range(wanted->num_pages, wanted->dst, link->num_pages) &&
            (!pack || in_range(wanted->num_pages, wanted->first_tokens, UINT32_MAX)));
}

static operation *make_operation(kvt_link *link, const kvt_operation *wanted, uint64_t extra_bytes)
{
    const int64_t *src = wanted->pack ? wanted->first_tokens : wanted->src;
    uint64_t pages_bytes = wanted->num_pages * sizeof(page_pair);
    operation *op = calloc(1, sizeof *op + pages_bytes + extra_bytes + wanted->note_len);
    if (op == NULL)
        return NULL;
    op->link = link;
    op->submit = (command){.kind = link ? COMMAND_SUBMIT : COMMAND_OWN_WORK, .link = link, .op = op};
    op->done.memory = op;
    op->stream_id = wanted->stream;
    op->priority = wanted->priority;
    op->gate = link ? link->engine->gate : 0;
    op->num_pages = wanted->num_pages;
    op->src_offset = wanted->src_offset;
    op->dst_offset = wanted->dst_offset;
    op->page_part = wanted->nbytes;
    op->began_s = now_s();
    op->deadline_s = wanted->timeout_s > 0 ? op->began_s + wanted->timeout_s : 0;
    op->with_digest = wanted->with_digest;
    op->has_note_digest = wanted->has_digest;
    op->note_digest = wanted->digest;
    op->note_len = wanted->note_len;
    op->unit = 8;
    op->extra = &op->pages[wanted->num_pages];
    op->note = (char *)op->extra + extra_bytes;
    for (uint64_t i = 0; i < wanted->num_pages; i++)
        op->pages[i] = (page_pair){(uint32_t)src[i], (uint32_t)wanted->dst[i]};
    if (wanted->pack != NULL)
        set_packing(op, wanted);
    if (wanted->note_len > 0)
        memcpy(op->note, wanted->note, wanted->note_len);
    return op;
}

/* Count the operation in and hand it over, unless that would exceed a bound. */
static int admit(kvt_engine *engine, operation *op, bool *is_first)
{
    kvt_link *link = op->link;
    int verdict = KVT_OK;
    pthread_mutex_lock(&engine->lock);
    if (link != NULL && (!link->is_up || link->is_down || link->is_leaving))
        verdict = KVT_NO_LINK;
    else if (engine->num_ops_open >= engine->max_operations || engine->note_bytes_open + op->note_len > MAX_NOTE_BYTES)
        verdict = KVT_FULL;
    if (verdict == KVT_OK) {
        engine->num_ops_open++;
        engine->note_bytes_open += op->note_len;
        if (link != NULL) {
            link->num_ops_open++;
            atomic_fetch_add(&link->queued_bytes, op->num_pages * op->page_part);
        }
        *is_first = append_command_quietly(engine, &op->submit);
    }
    pthread_mutex_unlock(&engine->lock);
    return verdict;
}

static int64_t submit(kvt_engine *engine, operation *op)
{
    kvt_link *link = op->link; /* the operation may be over and gone once it was admitted */
    int64_t id = (int64_t)(engine->num_ops + 1);
    op->done.event = (kvt_event){.kind = KVT_OP_DONE, .peer = op->link ? op->link->peer : 0, .op = (uint64_t)id};
    bool is_first = false, is_note = op->num_pages == 0;
    int verdict = admit(engine, op, &is_first);
    if (verdict != KVT_OK) {
        free(op->spare);
        free(op);
        return verdict;
    }
    engine->num_ops++;
    if (is_first && !(link != NULL && take_shortcut(engine, link, is_note)))
        set_fd(engine->wake_fd);
    return id;
}
