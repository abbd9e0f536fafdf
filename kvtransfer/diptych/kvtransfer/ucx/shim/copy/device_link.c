/* What a link has of the device: queues, pinned memory, the peer's pool as our device sees it. */

static void open_queue(kvt_link *link, device_queue *queue)
{
    *queue = (device_queue){.device = link->engine->device, .wake_fd = link->engine->wake_fd};
    device_did(link, calls_of(link)->open_queue(queue));
}

/* The peer's pool is mapped where that can be: memory of a device of this host, within reach of ours. */
static void open_on_device(kvt_link *link)
{
    const device *device = link->engine->device;
    for (int i = 0; i < NUM_QUEUES; i++)
        open_queue(link, &link->queues[i]);
    open_queue(link, &link->landing_queue);
    link->pinned = device->calls->pin(2 * SLOTS_BYTES + MAX_PIECES * sizeof(uint64_t));
    if (link->pinned == NULL)
        fail_link(link, "out of pinned memory");
    if (link->has_device_handle &&
        device->calls->map(link->engine->device, link->device_handle, link->num_pages * link->page_nbytes,
                           &link->device_pool) != NULL)
        link->device_pool = NULL;
}

static void close_on_device(kvt_link *link)
{
    for (int i = 0; i < NUM_QUEUES; i++)
        calls_of(link)->close_queue(&link->queues[i]);
    calls_of(link)->close_queue(&link->landing_queue);
    if (link->pinned != NULL)
        calls_of(link)->unpin(link->pinned);
    if (link->images_handle != NULL)
        ucp_mem_unmap(link->engine->context, link->images_handle);
    if (link->images != NULL)
        calls_of(link)->take_back(link->engine->device, link->images);
    free(link->image_pages);
    if (link->device_pool != NULL)
        calls_of(link)->unmap(link->engine->device, link->device_pool, link->num_pages * link->page_nbytes);
}

/* Whether the device has done all that it was given for this link, or never will. */
static bool has_device_finished(kvt_link *link)
{
    if (link->engine->device == NULL || link->has_device_failed)
        return true;
    bool is_done = is_idle(&link->landing_queue);
    for (int i = 0; i < NUM_QUEUES; i++)
        is_done = is_done && is_idle(&link->queues[i]);
    return is_done;
}

/* A device that fails tells nobody: look, now and then, while it has work. */
static void check_device(kvt_link *link)
{
    if (has_device_finished(link))
        return;
    for (int i = 0; i < NUM_QUEUES; i++)
        device_did(link, calls_of(link)->check(&link->queues[i]));
    device_did(link, calls_of(link)->check(&link->landing_queue));
}

/* Queues take turns, so that one piece begins while the one before it ends. */
static device_queue *next_queue(kvt_link *link)
{
    link->queue_turn = (link->queue_turn + 1) % NUM_QUEUES;
    return &link->queues[link->queue_turn];
}

static void await_device(kvt_link *link, piece *piece, device_queue *queue)
{
    if (!device_did(link, calls_of(link)->mark(queue)))
        return;
    piece->queue = queue;
    piece->mark = queue->num_marks;
    piece->num_left++;
}

static uint64_t *sum_of(const kvt_link *link, const piece *piece)
{
    return (uint64_t *)(link->pinned + 2 * SLOTS_BYTES) + (piece - link->pieces);
}
