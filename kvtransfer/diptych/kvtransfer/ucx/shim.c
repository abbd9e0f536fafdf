/* The functions that callers see, on the caller's side of the queues. See shim.h for what they promise. */
#define _GNU_SOURCE
#include "engine.h"

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
    ucs_status_t status = open_context(engine, options->settings, error, error_size);
    if (status == UCS_OK)
        status = open_worker(engine);
    if (status == UCS_OK)
        return engine;
    set_error(error, error_size, "UCX does not start", status);
    free_engine(engine);
    return NULL;
}

int kvt_allocate(kvt_engine *engine, uint64_t page_bytes, uint64_t num_pages, void **base, char *error, size_t error_size)
{
    ucs_status_t status = map_pool(engine, page_bytes * num_pages);
    if (status != UCS_OK) {
        set_error(error, error_size, "no memory for the page pool", status);
        return KVT_MEMORY;
    }
    engine->page_bytes = page_bytes;
    engine->num_pages = num_pages;
    memset(engine->pool, 0, page_bytes * num_pages);
    *base = engine->pool;
    if (start_thread(engine) == 0)
        return KVT_OK;
    snprintf(error, error_size, "no thread for the transfer engine");
    return KVT_MEMORY;
}

void kvt_self(kvt_engine *engine, kvt_peer *out)
{
    *out = (kvt_peer){
        .address = engine->address,
        .address_len = engine->address_len,
        .rkey = engine->rkey_buffer,
        .rkey_len = engine->rkey_len,
        .pool_base = (uintptr_t)engine->pool,
        .num_pages = engine->num_pages,
    };
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
    link->connect = (command){.kind = COMMAND_CONNECT, .link = link};
    link->disconnect = (command){.kind = COMMAND_DISCONNECT, .link = link};
    link->up.event = (kvt_event){.kind = KVT_LINK_UP, .peer = peer};
    link->down.event = (kvt_event){.kind = KVT_LINK_DOWN, .peer = peer};
    link->address = copy_bytes(info->address, info->address_len);
    link->rkey_buffer = copy_bytes(info->rkey, info->rkey_len);
    if (link->address == NULL || link->rkey_buffer == NULL) {
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
    free(link->rkey_buffer);
    free(link);
}

static bool in_range(uint64_t num, const int64_t *pages, uint64_t num_pages)
{
    for (uint64_t i = 0; i < num; i++)
        if (pages[i] < 0 || (uint64_t)pages[i] >= num_pages)
            return false;
    return true;
}

static operation *make_operation(kvt_link *link, uint64_t num_pages, const int64_t *src, const int64_t *dst,
                                 const void *note, uint64_t note_len)
{
    operation *op = calloc(1, sizeof *op + num_pages * sizeof op->pages[0] + note_len);
    if (op == NULL)
        return NULL;
    op->link = link;
    op->num_pages = num_pages;
    op->note_len = note_len;
    op->note = (char *)&op->pages[num_pages];
    op->submit = (command){.kind = COMMAND_SUBMIT, .link = link, .op = op};
    op->done.memory = op;
    for (uint64_t i = 0; i < num_pages; i++)
        op->pages[i] = (page_pair){(uint32_t)src[i], (uint32_t)dst[i]};
    if (note_len > 0)
        memcpy(op->note, note, note_len);
    return op;
}

/* Count the operation in and hand it over, unless that would exceed a bound. */
static int admit(kvt_engine *engine, kvt_link *link, operation *op)
{
    int verdict = KVT_OK;
    pthread_mutex_lock(&engine->lock);
    if (!link->is_up || link->is_down || link->is_leaving)
        verdict = KVT_NO_LINK;
    else if (engine->num_ops_open >= engine->max_operations || engine->note_bytes_open + op->note_len > MAX_NOTE_BYTES)
        verdict = KVT_FULL;
    if (verdict == KVT_OK) {
        engine->num_ops_open++;
        engine->note_bytes_open += op->note_len;
        append_command(engine, &op->submit);
    }
    pthread_mutex_unlock(&engine->lock);
    return verdict;
}

int64_t kvt_submit(kvt_link *link, uint64_t num_pages, const int64_t *src, const int64_t *dst, const void *note,
                   uint64_t note_len)
{
    kvt_engine *engine = link->engine;
    if (note_len > KVT_MAX_NOTE_BYTES)
        return KVT_TOO_LONG;
    if (!in_range(num_pages, src, engine->num_pages) || !in_range(num_pages, dst, link->num_pages))
        return KVT_RANGE;
    operation *op = make_operation(link, num_pages, src, dst, note, note_len);
    if (op == NULL)
        return KVT_MEMORY;
    int64_t id = (int64_t)(engine->num_ops + 1);
    op->done.event = (kvt_event){.kind = KVT_OP_DONE, .peer = link->peer, .op = (uint64_t)id};
    int verdict = admit(engine, link, op);
    if (verdict != KVT_OK) {
        free(op);
        return verdict;
    }
    engine->num_ops++;
    return id;
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

void kvt_describe(kvt_link *link, kvt_link_info *out)
{
    *out = (kvt_link_info){
        .bytes_sent = atomic_load(&link->bytes_sent),
        .last_heard_s = now_s() - atomic_load(&link->last_heard_s),
    };
    pthread_mutex_lock(&link->engine->lock); /* lanes are written before is_up */
    if (link->is_up)
        memcpy(out->lanes, link->lanes, sizeof out->lanes);
    pthread_mutex_unlock(&link->engine->lock);
}

uint64_t kvt_num_dropped_messages(kvt_engine *engine)
{
    return atomic_load(&engine->num_dropped_messages);
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
