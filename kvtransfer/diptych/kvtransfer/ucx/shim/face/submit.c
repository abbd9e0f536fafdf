/* Turns what the caller wants into operations, and hands them to the progress thread. */

static bool in_range(uint64_t num, const int64_t *pages, uint64_t num_pages)
{
    for (uint64_t i = 0; i < num; i++)
        if (pages[i] < 0 || (uint64_t)pages[i] >= num_pages)
            return false;
    return true;
}

/* Whether images can be made so, of pages of ours. */
static bool can_pack(const kvt_engine *engine, const kvt_copy *wanted)
{
    return packs_from(wanted->pack, engine->page_nbytes) && (engine->device == NULL || fits_device(engine->device, wanted->pack)) &&
           in_range(wanted->num_pages, wanted->first_tokens, UINT32_MAX);
}

/* Whether the bytes that are wanted of each page are in the pages, or images, of both sides. */
static bool fits(const kvt_link *link, const kvt_copy *wanted)
{
    const struct page_pack *pack = wanted->pack;
    uint64_t ours = pack ? image_bytes(pack) : link->engine->page_nbytes, theirs = link->page_nbytes;
    uint64_t word = word_bytes(link->engine), unit = pack ? packed_unit(pack, word) : word;
    uint64_t num_src = pack ? wanted->num_src : wanted->num_pages;
    return wanted->num_pages == 0 ||
           (wanted->nbytes > 0 && wanted->nbytes % unit == 0 && wanted->src_offset % unit == 0 &&
            wanted->dst_offset % word == 0 && wanted->nbytes <= ours && wanted->src_offset <= ours - wanted->nbytes &&
            wanted->nbytes <= theirs && wanted->dst_offset <= theirs - wanted->nbytes &&
            (!pack || can_pack(link->engine, wanted)) && in_range(num_src, wanted->src, link->engine->num_pages) &&
            in_range(wanted->num_pages, wanted->dst, link->num_pages));
}

static bool all_fit(const kvt_link *link, const kvt_operation *wanted)
{
    for (uint64_t i = 0; i < wanted->num_copies; i++)
        if (!fits(link, &wanted->copies[i]))
            return false;
    return true;
}

static uint64_t copies_bytes(const kvt_operation *wanted)
{
    uint64_t bytes = wanted->num_copies * sizeof(page_copy);
    for (uint64_t i = 0; i < wanted->num_copies; i++)
        bytes += wanted->copies[i].num_pages * sizeof(page_pair) + packing_bytes(&wanted->copies[i]);
    return bytes;
}

/* Copies what is wanted of some pages, and how, to `memory`. Returns the memory behind that. */
static char *set_copy(page_copy *copy, const kvt_copy *wanted, uint64_t word, char *memory)
{
    const int64_t *src = wanted->pack ? wanted->first_tokens : wanted->src;
    *copy = (page_copy){
        .num_pages = wanted->num_pages,
        .pages = (page_pair *)memory,
        .src_offset = wanted->src_offset,
        .dst_offset = wanted->dst_offset,
        .page_part = wanted->nbytes,
        .unit = 8,
    };
    for (uint64_t i = 0; i < wanted->num_pages; i++)
        copy->pages[i] = (page_pair){(uint32_t)src[i], (uint32_t)wanted->dst[i]};
    memory += wanted->num_pages * sizeof(page_pair);
    if (wanted->pack != NULL)
        set_packing(copy, wanted, word, memory);
    return memory + packing_bytes(wanted);
}

/* `extra` is made to point to as many bytes as are asked for. */
static operation *make_operation(kvt_link *link, const kvt_operation *wanted, uint64_t extra_bytes, void **extra)
{
    operation *op = calloc(1, sizeof *op + copies_bytes(wanted) + extra_bytes + wanted->note_len);
    if (op == NULL)
        return NULL;
    op->link = link;
    op->submit = (command){.kind = link ? COMMAND_SUBMIT : COMMAND_OWN_WORK, .link = link, .op = op};
    op->done.memory = op;
    op->stream_id = wanted->stream;
    op->priority = wanted->priority;
    op->gate = link ? link->engine->gate : 0;
    op->began_s = now_s();
    op->deadline_s = wanted->timeout_s > 0 ? op->began_s + wanted->timeout_s : 0;
    op->with_digest = wanted->with_digest;
    op->has_note_digest = wanted->has_digest;
    op->note_digest = wanted->digest;
    op->note_len = wanted->note_len;
    op->copies = (page_copy *)op->memory;
    uint64_t word = link ? word_bytes(link->engine) : 8;
    char *memory = op->memory + wanted->num_copies * sizeof *op->copies;
    for (uint64_t i = 0; i < wanted->num_copies; i++)
        if (wanted->copies[i].num_pages > 0)
            memory = set_copy(&op->copies[op->num_copies++], &wanted->copies[i], word, memory);
    if (extra != NULL)
        *extra = memory;
    op->note = memory + extra_bytes;
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
            atomic_fetch_add(&link->queued_bytes, bytes_to_post(op));
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
    bool is_first = false, is_note = op->num_copies == 0;
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
