/* CUDA as a device, through its driver API. The driver is loaded at run time, so that nothing of CUDA is needed to build. */
#ifndef KVT_DEVICE_CUDA_H
#define KVT_DEVICE_CUDA_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "queue.h"

typedef int cu_result;
typedef int cu_device;
typedef uint64_t cu_address;
typedef void *cu_object;
typedef struct {
    char bytes[64];
} cu_ipc_handle;

#define CU_SUCCESS 0
#define CU_NOT_READY 600
#define CU_STREAM_NON_BLOCKING 1
#define CU_EVENT_DISABLE_TIMING 2
#define CU_PIN_PORTABLE 1
#define CU_IPC_LAZY_PEER_ACCESS 1

/* name in the driver, as a field, its arguments */
#define CUDA_CALLS(X)                                                                                                  \
    X(cuInit, init, (unsigned))                                                                                        \
    X(cuDeviceGet, get_device, (cu_device *, int))                                                                     \
    X(cuDevicePrimaryCtxRetain, retain_context, (cu_object *, cu_device))                                              \
    X(cuCtxSetCurrent, set_context, (cu_object))                                                                       \
    X(cuGetErrorString, error_string, (cu_result, const char **))                                                      \
    X(cuMemAlloc_v2, allocate, (cu_address *, size_t))                                                                 \
    X(cuMemFree_v2, release, (cu_address))                                                                             \
    X(cuMemsetD8_v2, set, (cu_address, unsigned char, size_t))                                                         \
    X(cuMemHostAlloc, pin, (void **, size_t, unsigned))                                                                \
    X(cuMemFreeHost, unpin, (void *))                                                                                  \
    X(cuIpcGetMemHandle, share, (cu_ipc_handle *, cu_address))                                                         \
    X(cuIpcOpenMemHandle_v2, map, (cu_address *, cu_ipc_handle, unsigned))                                             \
    X(cuIpcCloseMemHandle, unmap, (cu_address))                                                                        \
    X(cuStreamCreate, open_stream, (cu_object *, unsigned))                                                            \
    X(cuStreamDestroy_v2, close_stream, (cu_object))                                                                   \
    X(cuStreamSynchronize, wait_stream, (cu_object))                                                                   \
    X(cuStreamQuery, query_stream, (cu_object))                                                                        \
    X(cuStreamWaitEvent, follow_event, (cu_object, cu_object, unsigned))                                               \
    X(cuLaunchHostFunc, call_host, (cu_object, void (*)(void *), void *))                                              \
    X(cuEventCreate, make_event, (cu_object *, unsigned))                                                              \
    X(cuEventQuery, query_event, (cu_object))                                                                          \
    X(cuEventRecord, record_event, (cu_object, cu_object))                                                             \
    X(cuEventDestroy_v2, drop_event, (cu_object))                                                                      \
    X(cuMemcpyDtoHAsync_v2, copy_out, (void *, cu_address, size_t, cu_object))                                         \
    X(cuMemcpyHtoDAsync_v2, copy_in, (cu_address, const void *, size_t, cu_object))                                    \
    X(cuMemsetD32Async, set_words, (cu_address, unsigned, size_t, cu_object))                                          \
    X(cuModuleLoadData, load_module, (cu_object *, const void *))                                                      \
    X(cuModuleUnload, unload_module, (cu_object))                                                                      \
    X(cuModuleGetFunction, get_function, (cu_object *, cu_object, const char *))                                       \
    X(cuLaunchKernel, launch,                                                                                          \
      (cu_object, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cu_object, void **, void **))

#define CUDA_FIELD(symbol, field, arguments) cu_result(*field) arguments;
typedef struct {
    CUDA_CALLS(CUDA_FIELD)
} cuda_calls;
#undef CUDA_FIELD

typedef struct {
    cu_object module, function;
    unsigned num_threads, shared_bytes, num_programs;
} cuda_kernel;

typedef struct {
    device device;
    cu_device ordinal;
    cu_object context;
    cuda_kernel mover, digester;
} cuda_device;

/* The page lists of the moves under way, in pinned memory and on the device. */
typedef struct {
    int64_t places[2 * MOVE_PAGES];
} cuda_page_list;

#define NUM_EVENTS 32

/* Work goes to `stream`; marks are told from `telling`, which follows it, so that telling does not hold up work. */
typedef struct {
    cu_object stream, telling;
    cuda_page_list *lists;
    cu_object events[NUM_EVENTS]; /* of the last marks */
    cu_address device_lists, sums;
    uint64_t num_lists;
} cuda_queue;

static cuda_calls cuda; /* set once, by the first device */

static const char *cuda_words(cu_result result)
{
    const char *words = NULL;
    if (result == CU_SUCCESS)
        return NULL;
    if (cuda.error_string(result, &words) != CU_SUCCESS || words == NULL)
        return "a CUDA error without a name";
    return words;
}

static const char *load_cuda(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL)
        return "no CUDA driver (libcuda.so.1) on this machine";
#define CUDA_LOAD(symbol, field, arguments)                                                                            \
    if ((*(void **)&cuda.field = dlsym(driver, #symbol)) == NULL)                                                      \
        return "the CUDA driver has no " #symbol;
    CUDA_CALLS(CUDA_LOAD)
#undef CUDA_LOAD
    return cuda_words(cuda.init(0));
}

static const char *cuda_enter(device *base)
{
    return cuda_words(cuda.set_context(((cuda_device *)base)->context));
}

static void cuda_close(device *base)
{
    cuda_device *device = (cuda_device *)base;
    if (device->mover.module != NULL)
        cuda.unload_module(device->mover.module);
    if (device->digester.module != NULL)
        cuda.unload_module(device->digester.module);
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

static const char *cuda_open_queue(device_queue *queue)
{
    cuda_queue *work = queue->work = calloc(1, sizeof *work);
    if (work == NULL)
        return "out of memory";
    cu_result result = cuda.open_stream(&work->stream, CU_STREAM_NON_BLOCKING);
    if (result == CU_SUCCESS)
        result = cuda.open_stream(&work->telling, CU_STREAM_NON_BLOCKING);
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

static const char *cuda_follow(device_queue *queue, uint64_t stream)
{
    cu_object event;
    cu_result result = cuda.make_event(&event, CU_EVENT_DISABLE_TIMING);
    if (result != CU_SUCCESS)
        return cuda_words(result);
    result = cuda_order((cu_object)(uintptr_t)stream, ((cuda_queue *)queue->work)->stream, event);
    cuda.drop_event(event); /* it is gone when it is over */
    return cuda_words(result);
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

static cu_result cuda_make_lists(cuda_queue *work)
{
    size_t bytes = MOVE_SLOTS * sizeof(cuda_page_list);
    void *lists;
    cu_result result = cuda.pin(&lists, bytes, CU_PIN_PORTABLE);
    if (result != CU_SUCCESS)
        return result;
    work->lists = lists;
    result = cuda.allocate(&work->device_lists, bytes + sizeof(uint64_t) * (MOVE_SLOTS + 1));
    work->sums = work->device_lists + bytes;
    return result;
}

/* Bring to the device where the pages begin in their pools: the source's in lines, the target's in units of `unit`. */
static cu_result cuda_send_list(cuda_queue *work, const page_move *move, uint64_t unit, cu_address *src, cu_address *dst)
{
    cu_result result = work->lists == NULL ? cuda_make_lists(work) : CU_SUCCESS;
    if (result != CU_SUCCESS)
        return result;
    uint64_t slot = work->num_lists++ % MOVE_SLOTS;
    int64_t *list = work->lists[slot].places;
    for (uint32_t i = 0; i < move->num_pages; i++) {
        list[i] = (int64_t)((move->pages[i].src * move->src_page_bytes + move->src_offset) / LINE_BYTES);
        list[move->num_pages + i] = (int64_t)((move->pages[i].dst * move->dst_page_bytes + move->dst_offset) / unit);
    }
    *src = work->device_lists + slot * sizeof work->lists[0];
    *dst = *src + move->num_pages * sizeof list[0];
    return cuda.copy_in(*src, list, 2 * move->num_pages * sizeof list[0], work->stream);
}

static cu_result cuda_launch(const cuda_kernel *kernel, cu_object stream, void **arguments)
{
    return cuda.launch(kernel->function, kernel->num_programs, 1, 1, kernel->num_threads, 1, 1, kernel->shared_bytes,
                       stream, arguments, NULL);
}

/* The arguments are those of `move_pages_kernel`, and two scratch pointers that Triton's kernels end with. To the kernel,
 * pages are of one line each: so the two pools may have pages of different sizes. */
static const char *cuda_move(device_queue *queue, const page_move *move)
{
    cuda_queue *work = queue->work;
    cu_address src_lines, dst_lines, none = 0;
    cu_result result = cuda_send_list(work, move, LINE_BYTES, &src_lines, &dst_lines);
    if (result != CU_SUCCESS)
        return cuda_words(result);
    cu_address src = (uintptr_t)move->src, dst = (uintptr_t)move->dst, counter = work->sums;
    int32_t num_pages = (int32_t)move->num_pages, line_words = LINE_BYTES / 8, num_words = (int32_t)(move->len / 8);
    void *arguments[] = {&src, &dst, &src_lines, &dst_lines, &num_pages, &line_words, &num_words, &counter, &none, &none};
    return cuda_words(cuda_launch(&((cuda_device *)queue->device)->mover, work->stream, arguments));
}

/* The same for `page_digest_kernel`. The host may read the sum once the next mark is reached. */
static const char *cuda_digest(device_queue *queue, const page_move *move, uint64_t *pinned_sum)
{
    cuda_queue *work = queue->work;
    cu_address src_lines, dst_bytes, none = 0;
    cu_result result = cuda_send_list(work, move, 1, &src_lines, &dst_bytes);
    cu_address sum = work->sums + sizeof(uint64_t) * (1 + work->num_lists % MOVE_SLOTS), pool = (uintptr_t)move->src;
    if (result == CU_SUCCESS)
        result = cuda.set_words(sum, 0, 2, work->stream);
    int32_t num_pages = (int32_t)move->num_pages, line_words = LINE_BYTES / 8, num_words = (int32_t)(move->len / 8);
    void *arguments[] = {&sum, &pool, &src_lines, &dst_bytes, &num_pages, &line_words, &num_words, &none, &none};
    if (result == CU_SUCCESS)
        result = cuda_launch(&((cuda_device *)queue->device)->digester, work->stream, arguments);
    if (result == CU_SUCCESS)
        result = cuda.copy_out(pinned_sum, sum, sizeof *pinned_sum, work->stream);
    return cuda_words(result);
}

static const device_calls CUDA_DEVICE = {
    .enter = cuda_enter,
    .close = cuda_close,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .share = cuda_share,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .open_queue = cuda_open_queue,
    .close_queue = cuda_close_queue,
    .follow = cuda_follow,
    .copy_out = cuda_copy_out,
    .copy_in = cuda_copy_in,
    .move = cuda_move,
    .digest = cuda_digest,
    .mark = cuda_mark,
    .look = cuda_look,
    .check = cuda_check,
};

static const char *load_kernel(cuda_kernel *kernel, const kvt_kernel *image)
{
    kernel->num_threads = image->num_warps * 32;
    kernel->shared_bytes = image->shared_bytes;
    kernel->num_programs = image->num_programs;
    cu_result result = cuda.load_module(&kernel->module, image->binary);
    if (result == CU_SUCCESS)
        result = cuda.get_function(&kernel->function, kernel->module, image->name);
    return cuda_words(result);
}

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
    if (words == NULL)
        words = load_kernel(&opened->mover, &options->mover);
    if (words == NULL)
        words = load_kernel(&opened->digester, &options->digester);
    return words;
}

#endif
