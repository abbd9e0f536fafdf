/* Opens and frees what an engine is made of: UCX's context and worker, the pool, the thread. */
#include <signal.h>
#include <stdio.h>

static atomic_flag engine_exists = ATOMIC_FLAG_INIT; /* two UCX contexts in a process disturb each other */

static void set_error(char *error, size_t size, const char *what, ucs_status_t status)
{
    snprintf(error, size, "%s: %s", what, ucs_status_string(status));
}

static kvt_engine *new_engine(const kvt_options *options)
{
    kvt_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return NULL;
    engine->instance_id = options->instance_id;
    engine->only_granted = options->only_granted;
    engine->with_remote_access = options->with_remote_access;
    memcpy(engine->key, options->key, sizeof engine->key);
    engine->heartbeat_s = options->heartbeat_s;
    engine->silence_s = options->heartbeat_s * options->heartbeat_misses;
    engine->connect_timeout_s = options->connect_timeout_s;
    engine->max_operations = options->max_operations;
    engine->max_waiting_notes = options->max_waiting_notes;
    engine->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    engine->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_mutex_init(&engine->progress_lock, NULL);
    pthread_mutex_init(&engine->grants.lock, NULL);
    if (engine->wake_fd >= 0 && engine->event_fd >= 0)
        return engine;
    close(engine->wake_fd);
    close(engine->event_fd);
    free(engine);
    return NULL;
}

/* Apply settings one by one; an older UCX does not know all of them. Their names go to `error`.
 *
 * With the feature for remote memory access UCX also emulates it over TCP, and then writes wherever in this process
 * somebody who reaches its port tells it to. So we ask for it only where hardware does it. */
static ucs_status_t open_context(kvt_engine *engine, const kvt_options *options, char *error, size_t size)
{
    const char *const *settings = options->settings;
    ucp_config_t *config;
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES,
        .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP | (options->with_remote_access ? UCP_FEATURE_RMA : 0),
    };
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK)
        return status;
    for (size_t used = 0; *settings != NULL; settings += 2)
        if (ucp_config_modify(config, settings[0], settings[1]) != UCS_OK && used < size)
            used += (size_t)snprintf(error + used, size - used, "%s%s", used ? ", " : "", settings[0]);
    status = ucp_init_version(1, 12, &params, config, &engine->context);
    ucp_config_release(config);
    return status;
}

static ucs_status_t open_worker(kvt_engine *engine)
{
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
    };
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = MESSAGE_ID,
        .cb = on_message,
        .arg = engine,
    };
    ucs_status_t status = ucp_worker_create(engine->context, &params, &engine->worker);
    if (status == UCS_OK)
        status = ucp_worker_set_am_recv_handler(engine->worker, &handler);
    if (status == UCS_OK)
        status = ucp_worker_get_efd(engine->worker, &engine->worker_fd);
    if (status == UCS_OK)
        status = ucp_worker_get_address(engine->worker, &engine->address, &engine->address_len);
    return status;
}

static void close_device(kvt_engine *engine)
{
    engine->device->calls->enter(engine->device);
    engine->device->calls->close_queue(&engine->own_queue);
    engine->device->calls->close_queue(&engine->gate_queue);
    if (engine->digest_sum != NULL)
        engine->device->calls->unpin((char *)engine->digest_sum);
    if (engine->unpack_memory != NULL)
        engine->device->calls->take_back(engine->device, engine->unpack_memory);
    if (engine->pool != NULL)
        engine->device->calls->release(engine->device, engine->pool);
    engine->device->calls->close(engine->device);
}

static void free_engine(kvt_engine *engine)
{
    if (engine->pool_key != NULL)
        ucp_rkey_buffer_release(engine->pool_key);
    if (engine->memory != NULL)
        ucp_mem_unmap(engine->context, engine->memory);
    if (engine->address != NULL)
        ucp_worker_release_address(engine->worker, engine->address);
    if (engine->worker != NULL)
        ucp_worker_destroy(engine->worker);
    if (engine->context != NULL)
        ucp_cleanup(engine->context);
    if (engine->device != NULL)
        close_device(engine);
    drop_own_work(engine);
    close(engine->wake_fd);
    close(engine->event_fd);
    free(engine->grants.peers);
    pthread_mutex_destroy(&engine->grants.lock);
    pthread_mutex_destroy(&engine->progress_lock);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
    atomic_flag_clear(&engine_exists);
}

static ucs_status_t map_pool(kvt_engine *engine, uint64_t bytes)
{
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .length = bytes,
        .flags = UCP_MEM_MAP_ALLOCATE, /* as shared memory where it can: peers on this host then copy straight into it */
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    ucp_mem_attr_t attributes = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    ucs_status_t status = ucp_mem_map(engine->context, &params, &engine->memory);
    if (status == UCS_OK)
        status = ucp_mem_query(engine->memory, &attributes);
    if (status == UCS_OK)
        status = ucp_rkey_pack(engine->context, engine->memory, &engine->pool_key, &engine->pool_key_len);
    if (status == UCS_OK)
        engine->pool = attributes.address;
    return status;
}

static const char *open_device(kvt_engine *engine, const kvt_device_options *options)
{
    const char *trouble = options->kind == KVT_CUDA ? open_cuda(options, &engine->device) : open_emulated(&engine->device);
    if (trouble != NULL)
        return trouble;
    for (int i = 0; i < KVT_NUM_KERNELS; i++)
        engine->device->chunks[i] = options->kernels[i].chunk;
    engine->own_queue = engine->gate_queue = (device_queue){.device = engine->device, .wake_fd = engine->wake_fd};
    engine->digest_sum = (uint64_t *)engine->device->calls->pin(sizeof *engine->digest_sum);
    if (engine->digest_sum == NULL)
        return "out of pinned memory";
    trouble = engine->device->calls->open_queue(&engine->own_queue);
    return trouble ? trouble : engine->device->calls->open_queue(&engine->gate_queue);
}

/* Not every UCX can reach a device's memory. There are other paths than puts. */
static void register_device_pool(kvt_engine *engine, uint64_t bytes)
{
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = engine->pool,
        .length = bytes,
        .memory_type = (ucs_memory_type_t)engine->device->memory_type,
    };
    if (ucp_mem_map(engine->context, &params, &engine->memory) != UCS_OK)
        engine->memory = NULL;
    else if (ucp_rkey_pack(engine->context, engine->memory, &engine->pool_key, &engine->pool_key_len) != UCS_OK)
        engine->pool_key_len = 0;
}

static const char *make_device_pool(kvt_engine *engine, const kvt_device_options *options, uint64_t bytes)
{
    const char *trouble = open_device(engine, options);
    if (trouble == NULL)
        trouble = engine->device->calls->allocate(engine->device, bytes, &engine->pool);
    if (trouble != NULL)
        return trouble;
    engine->is_shared = engine->device->calls->share(engine->device, engine->pool, engine->pool_handle) == NULL;
    register_device_pool(engine, bytes);
    return NULL;
}

/* The thread takes no signals: they are the caller's. */
static int start_thread(kvt_engine *engine)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(&engine->thread, NULL, run_progress, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    engine->has_thread = failure == 0;
    return failure;
}

static void stop_thread(kvt_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    engine->is_stopping = true;
    set_fd(engine->wake_fd);
    pthread_mutex_unlock(&engine->lock);
    pthread_join(engine->thread, NULL);
}
