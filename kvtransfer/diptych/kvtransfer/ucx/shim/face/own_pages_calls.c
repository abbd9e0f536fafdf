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

int64_t kvt_digest_pages(kvt_engine *engine, uint64_t num_pages, const int64_t *pages)
{
    kvt_operation wanted = {.num_pages = num_pages, .src = pages, .dst = pages};
    if (!in_range(num_pages, pages, engine->num_pages))
        return KVT_OUT_OF_RANGE;
    operation *op = make_operation(NULL, &wanted, 0);
    if (op == NULL)
        return KVT_OUT_OF_MEMORY;
    op->gate = engine->gate;
    return submit(engine, op);
}

int64_t kvt_unpack_pages(kvt_engine *engine, uint64_t num_pages, const int64_t *pages, const struct page_parts *parts)
{
    kvt_operation wanted = {.num_pages = num_pages, .src = pages, .dst = pages};
    size_t heads_bytes = (size_t)parts->num_parts * sizeof(int64_t);
    if (!in_range(num_pages, pages, engine->num_pages) || parts_bytes(parts) != engine->page_nbytes)
        return KVT_OUT_OF_RANGE;
    operation *op = make_operation(NULL, &wanted, sizeof(unpacking) + heads_bytes + engine->page_nbytes);
    if (op == NULL)
        return KVT_OUT_OF_MEMORY;
    op->unpacking = op->extra;
    op->unpacking->parts = *parts;
    op->unpacking->parts.part_heads = memcpy(op->unpacking->part_heads, parts->part_heads, heads_bytes);
    op->unpacking->scratch = (char *)op->unpacking->part_heads + heads_bytes;
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
