/* CUDA as a device. */
#include <stdlib.h>
#include <string.h>

static const char *cuda_enter(device *base)
{
    return cuda_words(cuda.set_context(((cuda_device *)base)->context));
}

static void cuda_close(device *base)
{
    cuda_device *device = (cuda_device *)base;
    for (int i = 0; i < KVT_NUM_KERNELS; i++)
        if (device->kernels[i].module != NULL)
            cuda.unload_module(device->kernels[i].module);
    free(device);
}

static const char *cuda_allocate(device *base, size_t bytes, char **memory)
{
    cu_address address;
    (void)base;
    const char *words = cuda_words(cuda.allocate(&address, bytes));
    if (words != NULL)
        return words;
    *memory = (char *)(uintptr_t)address;
    return cuda_words(cuda.set(address, 0, bytes));
}

static void cuda_release(device *base, char *memory)
{
    (void)base;
    cuda.release((uintptr_t)memory);
}

static const char *cuda_lend(device *base, size_t bytes, char **memory)
{
    cu_address address = 0;
    (void)base;
    const char *words = cuda_words(cuda.allocate(&address, bytes));
    *memory = (char *)(uintptr_t)address;
    return words;
}

static const char *cuda_share(device *base, char *memory, char handle[KVT_HANDLE_BYTES])
{
    (void)base;
    return cuda_words(cuda.share((cu_ipc_handle *)handle, (uintptr_t)memory));
}

static const char *cuda_map(device *base, const char handle[KVT_HANDLE_BYTES], size_t bytes, char **memory)
{
    cu_ipc_handle copy;
    cu_address address = 0;
    (void)base, (void)bytes;
    memcpy(&copy, handle, sizeof copy);
    const char *words = cuda_words(cuda.map(&address, copy, CU_IPC_LAZY_PEER_ACCESS));
    *memory = (char *)(uintptr_t)address;
    return words;
}

static void cuda_unmap(device *base, char *memory, size_t bytes)
{
    (void)base, (void)bytes;
    cuda.unmap((uintptr_t)memory);
}

static char *cuda_pin(size_t bytes)
{
    void *memory;
    return cuda.pin(&memory, bytes, CU_PIN_PORTABLE) == CU_SUCCESS ? memory : NULL;
}

static void cuda_unpin(char *memory)
{
    cuda.unpin(memory);
}

/* Before the model's own kernels, which fill the device: a hand-off is short, and somebody waits for it. */
static const char *cuda_open_queue(device_queue *queue)
{
    int lowest, highest;
    cuda_queue *work = queue->work = calloc(1, sizeof *work);
    if (work == NULL)
        return "out of memory";
    cu_result result = cuda.priorities(&lowest, &highest);
    if (result == CU_SUCCESS)
        result = cuda.open_stream(&work->stream, CU_STREAM_NON_BLOCKING, highest);
    if (result == CU_SUCCESS)
        result = cuda.open_stream(&work->telling, CU_STREAM_NON_BLOCKING, highest);
    for (int i = 0; i < NUM_EVENTS && result == CU_SUCCESS; i++)
        result = cuda.make_event(&work->events[i], CU_EVENT_DISABLE_TIMING);
    return cuda_words(result);
}

static void cuda_close_queue(device_queue *queue)
{
    cuda_queue *work = queue->work;
    if (work == NULL)
        return;
    for (int i = 0; i < 2; i++) {
        cu_object stream = i == 0 ? work->stream : work->telling;
        if (stream != NULL) {
            cuda.wait_stream(stream);
            cuda.close_stream(stream);
        }
    }
    for (int i = 0; i < NUM_EVENTS; i++)
        if (work->events[i] != NULL)
            cuda.drop_event(work->events[i]);
    if (work->lists != NULL)
        cuda.unpin(work->lists);
    if (work->device_lists != 0)
        cuda.release(work->device_lists);
    free(work);
    queue->work = NULL;
}

/* Let `later` go on only after all that `earlier` has been given so far. */
static cu_result cuda_order(cu_object earlier, cu_object later, cu_object event)
{
    cu_result result = cuda.record_event(event, earlier);
    return result == CU_SUCCESS ? cuda.follow_event(later, event, 0) : result;
}

static const char *cuda_wait_for(device_queue *queue, cu_object stream)
{
    cu_object event;
    cu_result result = cuda.make_event(&event, CU_EVENT_DISABLE_TIMING);
    if (result != CU_SUCCESS)
        return cuda_words(result);
    result = cuda_order(stream, ((cuda_queue *)queue->work)->stream, event);
    cuda.drop_event(event); /* it is gone when it is over */
    return cuda_words(result);
}

static const char *cuda_follow(device_queue *queue, uint64_t stream)
{
    return cuda_wait_for(queue, (cu_object)(uintptr_t)stream);
}

static const char *cuda_behind(device_queue *queue, device_queue *earlier)
{
    return cuda_wait_for(queue, ((cuda_queue *)earlier->work)->stream);
}

static const char *cuda_copy_out(device_queue *queue, char *pinned, const char *memory, size_t bytes)
{
    return cuda_words(cuda.copy_out(pinned, (uintptr_t)memory, bytes, ((cuda_queue *)queue->work)->stream));
}

static const char *cuda_copy_in(device_queue *queue, char *memory, const char *pinned, size_t bytes)
{
    return cuda_words(cuda.copy_in((uintptr_t)memory, pinned, bytes, ((cuda_queue *)queue->work)->stream));
}

/* In a thread of the driver's, which may not call CUDA. */
static void cuda_tell(void *arg)
{
    device_queue *queue = arg;
    int wake_fd = queue->wake_fd; /* the queue may be gone once the mark is reached */
    atomic_fetch_add_explicit(&queue->num_reached, 1, memory_order_release);
    set_fd(wake_fd);
}

static const char *cuda_mark(device_queue *queue)
{
    cuda_queue *work = queue->work;
    cu_object event = work->events[queue->num_marks++ % NUM_EVENTS];
    cu_result result = cuda_order(work->stream, work->telling, event);
    if (result == CU_SUCCESS)
        result = cuda.call_host(work->telling, cuda_tell, queue);
    return cuda_words(result);
}

/* An event that was used again since is reached later than its first mark: no harm. */
static void cuda_look(device_queue *queue)
{
    const cuda_queue *work = queue->work;
    while (queue->num_seen < queue->num_marks && cuda.query_event(work->events[queue->num_seen % NUM_EVENTS]) == CU_SUCCESS)
        queue->num_seen++;
}

static const char *cuda_check(device_queue *queue)
{
    cu_result result = cuda.query_stream(((cuda_queue *)queue->work)->stream);
    return result == CU_NOT_READY ? NULL : cuda_words(result);
}

static const device_calls CUDA_DEVICE = {
    .enter = cuda_enter,
    .close = cuda_close,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .lend = cuda_lend,
    .take_back = cuda_release,
    .share = cuda_share,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .open_queue = cuda_open_queue,
    .close_queue = cuda_close_queue,
    .follow = cuda_follow,
    .behind = cuda_behind,
    .copy_out = cuda_copy_out,
    .copy_in = cuda_copy_in,
    .move = cuda_move,
    .digest = cuda_digest,
    .pack = cuda_pack,
    .unpack = cuda_unpack,
    .mark = cuda_mark,
    .look = cuda_look,
    .check = cuda_check,
};

/* The memory is of the primary context, which PyTorch and everybody else uses too: so it is never released. */
static const char *open_cuda(const kvt_device_options *options, device **out)
{
    const char *words = cuda.init == NULL ? load_cuda() : NULL;
    cuda_device *opened = words == NULL ? calloc(1, sizeof *opened) : NULL;
    if (opened == NULL)
        return words == NULL ? "out of memory" : words;
    cu_result result = cuda.get_device(&opened->ordinal, options->ordinal);
    if (result == CU_SUCCESS)
        result = cuda.retain_context(&opened->context, opened->ordinal);
    if (result != CU_SUCCESS) {
        free(opened);
        return cuda_words(result);
    }
    opened->device.calls = &CUDA_DEVICE;
    opened->device.memory_type = UCS_MEMORY_TYPE_CUDA;
    *out = &opened->device;
    words = cuda_enter(*out);
    for (int i = 0; i < KVT_NUM_KERNELS && words == NULL; i++)
        if (options->kernels[i].binary != NULL)
            words = load_kernel(&opened->kernels[i], &options->kernels[i]);
    return words;
}
