/* The functions that callers see, as far as they are about our own pages. See shim.h for what they promise. */

int kvt_copy_page(kvt_engine *engine, int64_t page, void *bytes, int to_device)
{
    const device_calls *calls = engine->device->calls;
    device_queue queue = {.device = engine->device, .wake_fd = engine->wake_fd};
    if (!in_range(1, &page, engine->num_pages))
        return KVT_OUT_OF_RANGE;
    char *memory = engine->pool + (uint64_t)page * engine->page_nbytes;
    const char *trouble = calls->enter(engine->device);
    char *pinned = trouble == NULL ? calls->pin(engine->page_nbytes) : NULL;
    if (pinned == NULL)
        return KVT_DEVICE;
    trouble = calls->open_queue(&queue);
    if (trouble == NULL && to_device)
        trouble = calls->copy_in(&queue, memory, memcpy(pinned, bytes, engine->page_nbytes), engine->page_nbytes);
    else if (trouble == NULL)
        trouble = calls->copy_out(&queue, pinned, memory, engine->page_nbytes);
    calls->close_queue(&queue); /* when it has ended */
    if (trouble == NULL && !to_device)
        memcpy(bytes, pinned, engine->page_nbytes);
    calls->unpin(pinned);
    return trouble == NULL ? KVT_OK : KVT_DEVICE;
}

/* An operation on all of some pages of ours. */
static operation *make_own_work(uint64_t num_pages, const int64_t *pages, uint64_t extra_bytes, void **extra)
{
    const kvt_copy copy = {.num_pages = num_pages, .src = pages, .dst = pages};
    const kvt_operation wanted = {.num_copies = 1, .copies = &copy};
    return make_operation(NULL, &wanted, extra_bytes, extra);
}

int64_t kvt_digest_pages(kvt_engine *engine, uint64_t num_pages, const int64_t *pages)
{
    if (!in_range(num_pages, pages, engine->num_pages))
        return KVT_OUT_OF_RANGE;
    operation *op = make_own_work(num_pages, pages, 0, NULL);
    if (op == NULL)
        return KVT_OUT_OF_MEMORY;
    op->gate = engine->gate;
    return submit(engine, op);
}

static bool are_in_page(const kvt_engine *engine, uint64_t num_regions, const struct page_parts *regions)
{
    for (uint64_t i = 0; i < num_regions; i++)
        if (regions[i].offset < 0 || (uint64_t)regions[i].offset + parts_bytes(&regions[i]) > engine->page_nbytes)
            return false;
    return engine->device == NULL || UNPACK_LISTS * num_regions <= MOVE_SLOTS;
}

int64_t kvt_unpack_pages(kvt_engine *engine, uint64_t num_pages, const int64_t *pages, uint64_t num_regions,
                         const struct page_parts *regions)
{
    if (!in_range(num_pages, pages, engine->num_pages) || !are_in_page(engine, num_regions, regions))
        return KVT_OUT_OF_RANGE;
    void *extra;
    operation *op = make_own_work(num_pages, pages, unpacking_bytes(engine, num_regions, regions), &extra);
    if (op == NULL)
        return KVT_OUT_OF_MEMORY;
    op->unpacking = set_unpacking(extra, num_regions, regions);
    return submit(engine, op);
}

int kvt_grant_pages(kvt_engine *engine, uint64_t peer, uint64_t num_pages, const int64_t *pages)
{
    if (!in_range(num_pages, pages, engine->num_pages))
        return KVT_OUT_OF_RANGE;
    set_grants(&engine->grants, peer, num_pages, pages);
    return KVT_OK;
}

int kvt_revoke_pages(kvt_engine *engine, uint64_t num_pages, const int64_t *pages)
{
    return kvt_grant_pages(engine, 0, num_pages, pages);
}
