/* The functions that callers see, on the caller's side of the queues; those about our own pages stand in own_pages_calls.c. */

kvt_engine *kvt_create(const kvt_options *options, char *error, size_t error_size)
{
    error[0] = '\0';
    if (atomic_flag_test_and_set(&engine_exists)) {
        snprintf(error, error_size, "this process has a transfer engine already");
        return NULL;
    }
    kvt_engine *engine = new_engine(options);
    if (engine == NULL) {
        snprintf(error, error_size, "no memory or no descriptor for the transfer engine");
        atomic_flag_clear(&engine_exists);
        return NULL;
    }
    ucs_status_t status = open_context(engine, options, error, error_size);
    if (status == UCS_OK)
        status = open_worker(engine);
    if (status == UCS_OK)
        return engine;
    set_error(error, error_size, "UCX does not start", status);
    free_engine(engine);
    return NULL;
}

static int run_engine(kvt_engine *engine, uint64_t page_nbytes, uint64_t num_pages, char *error, size_t error_size)
{
    engine->page_nbytes = page_nbytes;
    engine->num_pages = num_pages;
    if ((!engine->only_granted || open_grants(&engine->grants, num_pages)) && start_thread(engine) == 0)
        return KVT_OK;
    snprintf(error, error_size, "no thread or no memory for the transfer engine");
    return KVT_OUT_OF_MEMORY;
}

int kvt_allocate(kvt_engine *engine, uint64_t page_nbytes, uint64_t num_pages, void **base, char *error, size_t error_size)
{
    ucs_status_t status = map_pool(engine, page_nbytes * num_pages);
    if (status != UCS_OK) {
        set_error(error, error_size, "no memory for the page pool", status);
        return KVT_OUT_OF_MEMORY;
    }
    memset(engine->pool, 0, page_nbytes * num_pages);
    *base = engine->pool;
    return run_engine(engine, page_nbytes, num_pages, error, error_size);
}

int kvt_allocate_on_device(kvt_engine *engine, const kvt_device_options *options, uint64_t page_nbytes, uint64_t num_pages,
                           void **base, char *error, size_t error_size)
{
    const char *trouble = make_device_pool(engine, options, page_nbytes * num_pages);
    if (trouble != NULL) {
        snprintf(error, error_size, "no page pool on the device: %s", trouble);
        return KVT_OUT_OF_MEMORY;
    }
    *base = engine->pool;
    return run_engine(engine, page_nbytes, num_pages, error, error_size);
}

void kvt_self(kvt_engine *engine, kvt_peer *out)
{
    *out = (kvt_peer){
        .address = engine->address,
        .address_len = engine->address_len,
        .pool_key = engine->pool_key,
        .pool_key_len = engine->pool_key_len,
        .pool_base = (uintptr_t)engine->pool,
        .num_pages = engine->num_pages,
        .page_nbytes = engine->page_nbytes,
        .device_handle = engine->is_shared ? engine->pool_handle : NULL,
    };
}

void kvt_own_addresses(char *out, size_t size)
{
    list_own_addresses(out, size);
}

static void *copy_bytes(const void *bytes, size_t len)
{
    void *copy = malloc(len ? len : 1);
    return copy ? memcpy(copy, bytes, len) : NULL;
}

kvt_link *kvt_connect(kvt_engine *engine, uint64_t peer, const kvt_peer *info)
{
    kvt_link *link = calloc(1, sizeof *link);
    if (link == NULL)
        return NULL;
    link->engine = engine;
    link->peer = peer;
    link->session = ++engine->num_sessions;
    link->pool_base = info->pool_base;
    link->num_pages = info->num_pages;
    link->page_nbytes = info->page_nbytes;
    memcpy(link->key, info->key, sizeof link->key);
    link->connect = (command){.kind = COMMAND_CONNECT, .link = link};
    link->disconnect = (command){.kind = COMMAND_DISCONNECT, .link = link};
    link->use_path = (command){.kind = COMMAND_USE_PATH, .link = link};
    link->up.event = (kvt_event){.kind = KVT_LINK_UP, .peer = peer};
    link->down.event = (kvt_event){.kind = KVT_LINK_DOWN, .peer = peer};
    link->address = copy_bytes(info->address, info->address_len);
    link->pool_key = info->pool_key_len > 0 ? copy_bytes(info->pool_key, info->pool_key_len) : NULL;
    link->has_device_handle = info->device_handle != NULL;
    if (link->has_device_handle)
        memcpy(link->device_handle, info->device_handle, sizeof link->device_handle);
    if (link->address == NULL || (link->pool_key == NULL && info->pool_key_len > 0)) {
        kvt_release(link);
        return NULL;
    }
    pthread_mutex_lock(&engine->lock);
    append_command(engine, &link->connect);
    pthread_mutex_unlock(&engine->lock);
    return link;
}

void kvt_disconnect(kvt_link *link)
{
    pthread_mutex_lock(&link->engine->lock);
    if (!link->is_down && !link->is_leaving) {
        link->is_leaving = true;
        append_command(link->engine, &link->disconnect);
    }
    pthread_mutex_unlock(&link->engine->lock);
}

void kvt_release(kvt_link *link)
{
    free(link->address);
    free(link->pool_key);
    for (int i = 0; i < MAX_PIECES; i++)
        free(link->pieces[i].room);
    while (link->streams != NULL) {
        stream *stream = link->streams;
        link->streams = stream->next;
        free(stream);
    }
    free(link);
}

int64_t kvt_submit(kvt_link *link, const kvt_operation *wanted)
{
    if (wanted->note_len > KVT_MAX_NOTE_BYTES)
        return KVT_TOO_LONG;
    if (!all_fit(link, wanted))
        return KVT_OUT_OF_RANGE;
    operation *op = make_operation(link, wanted, 0, NULL);
    if (op == NULL)
        return KVT_OUT_OF_MEMORY;
    op->spare = calloc(1, sizeof *op->spare);
    if (op->spare == NULL) {
        free(op);
        return KVT_OUT_OF_MEMORY;
    }
    return submit(link->engine, op);
}

int kvt_follow(kvt_engine *engine, uint64_t stream)
{
    device *device = engine->device;
    if (device->calls->enter(device) != NULL || device->calls->follow(&engine->gate_queue, stream) != NULL ||
        device->calls->mark(&engine->gate_queue) != NULL)
        return KVT_DEVICE;
    engine->gate = engine->gate_queue.num_marks;
    return KVT_OK;
}

int kvt_use_path(kvt_link *link, int32_t path)
{
    int verdict = KVT_OK;
    pthread_mutex_lock(&link->engine->lock);
    if (!link->is_up || link->is_down || link->is_leaving)
        verdict = KVT_NO_LINK;
    else if (path < 0 || path > KVT_PATH_STAGED || !(link->paths >> path & 1))
        verdict = KVT_NO_PATH;
    else if (link->num_ops_open > 0)
        verdict = KVT_BUSY;
    if (verdict == KVT_OK) {
        link->wanted_path = path;
        if (!link->is_path_due)
            append_command(link->engine, &link->use_path);
        link->is_path_due = true;
    }
    pthread_mutex_unlock(&link->engine->lock);
    return verdict;
}

int kvt_poll(kvt_engine *engine, kvt_event *events, int capacity)
{
    int count = 0;
    event_node *node;
    free_spent(engine);
    pthread_mutex_lock(&engine->lock);
    while (count < capacity && (node = pop_event(engine)) != NULL) {
        settle_event(engine, node);
        events[count++] = node->event;
        if (node->memory != NULL) {
            node->next = engine->spent;
            engine->spent = node;
        }
    }
    if (engine->is_paused && !notes_exceed(engine, 2))
        set_fd(engine->wake_fd);
    pthread_mutex_unlock(&engine->lock);
    return count;
}

int kvt_event_fd(kvt_engine *engine)
{
    return engine->event_fd;
}

void kvt_describe(kvt_link *link, kvt_link_status *out)
{
    *out = (kvt_link_status){
        .bytes_sent = atomic_load(&link->bytes_sent),
        .last_heard_s = now_s() - atomic_load(&link->last_heard_s),
        .rtt_s = atomic_load(&link->rtt_s),
        .in_flight_bytes = atomic_load(&link->in_flight_bytes),
        .queued_bytes = atomic_load(&link->queued_bytes),
    };
    pthread_mutex_lock(&link->engine->lock); /* lanes and paths are written before is_up */
    if (link->is_up) {
        out->paths = link->paths;
        out->path = link->is_path_due ? link->wanted_path : (int32_t)link->path;
        memcpy(out->lanes, link->lanes, sizeof out->lanes);
    }
    pthread_mutex_unlock(&link->engine->lock);
}

uint64_t kvt_num_dropped_messages(kvt_engine *engine)
{
    return atomic_load(&engine->num_dropped_messages);
}

uint64_t kvt_num_unauthenticated(kvt_engine *engine)
{
    return atomic_load(&engine->num_unauthenticated);
}

uint64_t kvt_num_ungranted(kvt_engine *engine)
{
    return atomic_load(&engine->num_ungranted);
}

/* Free what the caller has not polled. */
static void drop_events(kvt_engine *engine)
{
    event_node *node;
    while ((node = pop_event(engine)) != NULL)
        free(node->memory);
    free_spent(engine);
}

void kvt_destroy(kvt_engine *engine)
{
    if (engine->has_thread)
        stop_thread(engine);
    drop_events(engine);
    free_engine(engine);
}
