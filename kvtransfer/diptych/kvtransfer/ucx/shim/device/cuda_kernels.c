/* Launches the two kernels, compiled by Triton, on lists of pages. */

typedef struct {
    cu_object module, function;
    unsigned num_threads, shared_nbytes, num_programs;
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

static const char *load_kernel(cuda_kernel *kernel, const kvt_kernel *image)
{
    kernel->num_threads = image->num_warps * 32;
    kernel->shared_nbytes = image->shared_nbytes;
    kernel->num_programs = image->num_programs;
    cu_result result = cuda.load_module(&kernel->module, image->binary);
    if (result == CU_SUCCESS)
        result = cuda.get_function(&kernel->function, kernel->module, image->name);
    return cuda_words(result);
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
        list[i] = (int64_t)((move->pages[i].src * move->src_page_nbytes + move->src_offset) / LINE_BYTES);
        list[move->num_pages + i] = (int64_t)((move->pages[i].dst * move->dst_page_nbytes + move->dst_offset) / unit);
    }
    *src = work->device_lists + slot * sizeof work->lists[0];
    *dst = *src + move->num_pages * sizeof list[0];
    return cuda.copy_in(*src, list, 2 * move->num_pages * sizeof list[0], work->stream);
}

static cu_result cuda_launch(const cuda_kernel *kernel, cu_object stream, void **arguments)
{
    return cuda.launch(kernel->function, kernel->num_programs, 1, 1, kernel->num_threads, 1, 1, kernel->shared_nbytes,
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
