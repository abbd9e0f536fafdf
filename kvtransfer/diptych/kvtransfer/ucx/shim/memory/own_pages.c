/* Work on our own pages: digests, and unpacking. The progress thread does it, a slice at a time between other work, in
 * the order in which it was asked for. */

#define SLICE_BYTES ((size_t)4 << 20)

/* How pages are unpacked; `scratch` is as large as a page. */
typedef struct unpacking {
    struct page_parts parts;
    char *scratch;
    int64_t part_heads[];
} unpacking;

static void append_own_work(kvt_engine *engine, operation *op)
{
    op->next = NULL;
    if (engine->own_work == NULL)
        engine->own_work = op;
    else
        engine->last_own_work->next = op;
    engine->last_own_work = op;
}

static void digest_slice(const kvt_engine *engine, operation *op)
{
    size_t left = SLICE_BYTES;
    while (left > 0 && op->num_posted < op->num_pages) {
        uint64_t begin = op->pages[op->num_posted].src * engine->page_nbytes + op->part_posted;
        size_t rest = engine->page_nbytes - op->part_posted, len = rest < left ? rest : left;
        op->digest += digest_bytes(engine->pool + begin, begin, len);
        op->part_posted += len;
        op->num_posted += op->part_posted / engine->page_nbytes;
        op->part_posted %= engine->page_nbytes;
        left -= len;
    }
}

static void unpack_slice(const kvt_engine *engine, operation *op)
{
    for (size_t done = 0; done < SLICE_BYTES && op->num_posted < op->num_pages; done += engine->page_nbytes) {
        char *page = engine->pool + op->pages[op->num_posted++].src * engine->page_nbytes;
        unpack_page(&op->unpacking->parts, page, op->unpacking->scratch);
    }
}

/* Let the device digest the next pages. */
static const char *ask_device(kvt_engine *engine, operation *op)
{
    page_move pages = {
        .src = engine->pool,
        .pages = &op->pages[op->num_posted],
        .num_pages = (uint32_t)smaller(op->num_pages - op->num_posted, MOVE_PAGES),
        .src_page_nbytes = engine->page_nbytes,
        .dst_page_nbytes = engine->page_nbytes,
        .len = engine->page_nbytes,
    };
    op->num_posted += pages.num_pages;
    engine->is_digesting = true;
    const char *trouble = engine->device->calls->digest(&engine->digest_queue, &pages, engine->digest_sum);
    return trouble ? trouble : engine->device->calls->mark(&engine->digest_queue);
}

/* Take the device's last answer, and ask it for the next. Returns whether it has not answered yet. */
static bool digest_on_device(kvt_engine *engine, operation *op)
{
    if (engine->is_digesting && !is_idle(&engine->digest_queue)) {
        op->error = engine->device->calls->check(&engine->digest_queue);
        return op->error == NULL;
    }
    op->digest += engine->is_digesting ? *engine->digest_sum : 0;
    engine->is_digesting = false;
    if (op->num_posted < op->num_pages)
        op->error = ask_device(engine, op);
    return engine->is_digesting && op->error == NULL;
}

/* Returns whether there was anything to do. */
static bool do_some_own_work(kvt_engine *engine)
{
    operation *op = engine->own_work;
    if (op == NULL)
        return false;
    if (op->unpacking != NULL)
        unpack_slice(engine, op);
    else if (engine->device == NULL)
        digest_slice(engine, op);
    else if (!is_open(engine, op) || digest_on_device(engine, op))
        return false;
    if (op->num_posted == op->num_pages || op->error != NULL) {
        engine->own_work = op->next;
        op->done.event.has_digest = op->error == NULL && op->unpacking == NULL;
        op->done.event.text = op->error;
        op->done.event.digest = op->digest;
        push_event(engine, &op->done);
    }
    return true;
}

static void drop_own_work(kvt_engine *engine)
{
    while (engine->own_work != NULL) {
        operation *op = engine->own_work;
        engine->own_work = op->next;
        free(op);
    }
}
