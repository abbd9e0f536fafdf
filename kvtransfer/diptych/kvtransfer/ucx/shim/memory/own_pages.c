/* Work on our own pages: digests, and unpacking. The progress thread does it, a slice at a time between other work, in
 * the order in which it was asked for. */

#define SLICE_BYTES ((size_t)4 << 20)
#define UNPACK_LISTS 2 /* of pages, for a device to unpack a region of them */

/* How pages are unpacked; `scratch` is as large as a page. A device has memory of its own for that. */
typedef struct unpacking {
    char *scratch;
    uint64_t num_regions;
    struct page_parts regions[]; /* and behind them their heads, and the scratch */
} unpacking;

static uint64_t unpacking_bytes(const kvt_engine *engine, uint64_t num_regions, const struct page_parts *regions)
{
    uint64_t scratch_bytes = engine->device == NULL ? engine->page_nbytes : 0;
    uint64_t num_heads = 0;
    for (uint64_t i = 0; i < num_regions; i++)
        num_heads += (uint64_t)regions[i].num_parts;
    return sizeof(unpacking) + num_regions * sizeof *regions + num_heads * sizeof(int64_t) + scratch_bytes;
}

static unpacking *set_unpacking(void *memory, uint64_t num_regions, const struct page_parts *regions)
{
    unpacking *unpacking = memory;
    int64_t *heads = (int64_t *)&unpacking->regions[num_regions];
    unpacking->num_regions = num_regions;
    for (uint64_t i = 0; i < num_regions; i++) {
        unpacking->regions[i] = regions[i];
        unpacking->regions[i].part_heads = memcpy(heads, regions[i].part_heads, (size_t)regions[i].num_parts * sizeof *heads);
        heads += regions[i].num_parts;
    }
    unpacking->scratch = (char *)heads;
    return unpacking;
}

static void append_own_work(kvt_engine *engine, operation *op)
{
    op->next = NULL;
    if (engine->own_work == NULL)
        engine->own_work = op;
    else
        engine->last_own_work->next = op;
    engine->last_own_work = op;
}

/* The pages of an operation on our own: NULL when all of them are done. */
static page_copy *pages_left(const operation *op)
{
    return op->num_copied < op->num_copies ? &op->copies[op->num_copied] : NULL;
}

static void digest_slice(const kvt_engine *engine, operation *op)
{
    page_copy *copy;
    for (size_t left = SLICE_BYTES; left > 0 && (copy = pages_left(op)) != NULL; skip_copied(op)) {
        uint64_t begin = copy->pages[copy->num_posted].src * engine->page_nbytes + copy->part_posted;
        size_t rest = engine->page_nbytes - copy->part_posted, len = rest < left ? rest : left;
        op->digest += digest_bytes(engine->pool + begin, begin, len);
        copy->part_posted += len;
        copy->num_posted += copy->part_posted / engine->page_nbytes;
        copy->part_posted %= engine->page_nbytes;
        left -= len;
    }
}

static void unpack_slice(const kvt_engine *engine, operation *op)
{
    const unpacking *unpacking = op->unpacking;
    page_copy *copy;
    for (size_t done = 0; done < SLICE_BYTES && (copy = pages_left(op)) != NULL; done += engine->page_nbytes, skip_copied(op)) {
        char *page = engine->pool + copy->pages[copy->num_posted++].src * engine->page_nbytes;
        for (uint64_t i = 0; i < unpacking->num_regions; i++)
            unpack_page(&unpacking->regions[i], page, unpacking->scratch);
    }
}

/* Let the device digest the next pages. */
static const char *digest_on_device(kvt_engine *engine, operation *op)
{
    page_copy *copy = pages_left(op);
    page_move pages = {
        .src = engine->pool,
        .pages = &copy->pages[copy->num_posted],
        .num_pages = (uint32_t)smaller(copy->num_pages - copy->num_posted, MOVE_PAGES),
        .src_page_nbytes = engine->page_nbytes,
        .dst_page_nbytes = engine->page_nbytes,
        .len = engine->page_nbytes,
    };
    copy->num_posted += pages.num_pages;
    skip_copied(op);
    return engine->device->calls->digest(&engine->own_queue, &pages, engine->digest_sum);
}

static uint64_t unpack_memory_bytes(const kvt_engine *engine)
{
    return engine->page_nbytes > UNPACK_BYTES ? engine->page_nbytes : UNPACK_BYTES;
}

/* Copy a region of some pages aside, and put its parts where they belong. */
static const char *unpack_region(kvt_engine *engine, page_pair *pages, uint32_t num_pages, const struct page_parts *how)
{
    const device_calls *calls = engine->device->calls;
    uint64_t len = parts_bytes(how);
    page_move aside = {
        .src = engine->pool,
        .dst = engine->unpack_memory,
        .pages = pages,
        .num_pages = num_pages,
        .src_page_nbytes = engine->page_nbytes,
        .dst_page_nbytes = len,
        .src_offset = (uint64_t)how->offset,
        .len = len,
    };
    page_unpack back = {engine->unpack_memory, engine->pool, how, pages, num_pages, engine->page_nbytes};
    const char *trouble = calls->move(&engine->own_queue, &aside);
    return trouble ? trouble : calls->unpack(&engine->own_queue, &back);
}

/* Let the device unpack the next pages: as many as it has memory for. */
static const char *unpack_on_device(kvt_engine *engine, operation *op)
{
    const unpacking *unpacking = op->unpacking;
    page_copy *copy = pages_left(op);
    page_pair *pages = &copy->pages[copy->num_posted];
    uint64_t left = copy->num_pages - copy->num_posted, bytes = unpack_memory_bytes(engine);
    uint32_t num_pages = (uint32_t)smaller(left, smaller(bytes / engine->page_nbytes, MOVE_PAGES));
    const char *trouble = NULL;
    if (unpacking->num_regions > 0 && engine->unpack_memory == NULL) /* without parts all ranks but this one work */
        trouble = engine->device->calls->lend(engine->device, bytes, &engine->unpack_memory);
    for (uint32_t i = 0; i < num_pages; i++)
        pages[i].dst = i;
    for (uint64_t i = 0; i < unpacking->num_regions && trouble == NULL; i++)
        trouble = unpack_region(engine, pages, num_pages, &unpacking->regions[i]);
    copy->num_posted += num_pages;
    skip_copied(op);
    return trouble;
}

/* Let the device go on with the operation: with as much at a time as its queue has room for. */
static const char *ask_device(kvt_engine *engine, operation *op)
{
    const char *trouble = NULL;
    uint64_t lists = op->unpacking ? UNPACK_LISTS * op->unpacking->num_regions : MOVE_SLOTS;
    for (uint64_t used = lists; used <= MOVE_SLOTS && pages_left(op) != NULL && trouble == NULL; used += lists)
        trouble = op->unpacking ? unpack_on_device(engine, op) : digest_on_device(engine, op);
    engine->is_asked = true;
    return trouble ? trouble : engine->device->calls->mark(&engine->own_queue);
}

/* Take the device's last answer, and ask it for the next. Returns whether it has not answered yet. */
static bool await_own_work(kvt_engine *engine, operation *op)
{
    if (engine->is_asked && !is_idle(&engine->own_queue)) {
        op->error = engine->device->calls->check(&engine->own_queue);
        return op->error == NULL;
    }
    op->digest += engine->is_asked && op->unpacking == NULL ? *engine->digest_sum : 0;
    engine->is_asked = false;
    if (pages_left(op) != NULL)
        op->error = ask_device(engine, op);
    return engine->is_asked && op->error == NULL;
}

/* Returns whether there was anything to do. */
static bool do_some_own_work(kvt_engine *engine)
{
    operation *op = engine->own_work;
    if (op == NULL)
        return false;
    if (engine->device != NULL && (!is_open(engine, op) || await_own_work(engine, op)))
        return false;
    if (engine->device == NULL && op->unpacking != NULL)
        unpack_slice(engine, op);
    else if (engine->device == NULL)
        digest_slice(engine, op);
    if (pages_left(op) == NULL || op->error != NULL) {
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
