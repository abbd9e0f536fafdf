/* CUDA's driver API: what we use of it, loaded at run time, so that nothing of CUDA is needed to build or to run without. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

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
    X(cuCtxGetStreamPriorityRange, priorities, (int *, int *))                                                         \
    X(cuStreamCreateWithPriority, open_stream, (cu_object *, unsigned, int))                                           \
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
