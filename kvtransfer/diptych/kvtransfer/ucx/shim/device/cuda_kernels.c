/* Launches the kernels, compiled by Triton, on lists of pages. */

typedef struct {
    cu_object module, function;
    unsigned num_threads, shared_nbytes, num_programs;
    int32_t chunk;
} cuda_kernel;

typedef struct {
    device device;
    cu_device ordinal;
    cu_object context;
    cuda_kernel kernels[KVT_NUM_KERNELS];
} cuda_device;

/* The page lists of the work under way, in pinned memory and on the device. */
typedef struct {
    int64_t places[2 * MOVE_PAGES];
} cuda_page_list;

_Static_assert(PACK_ENTRIES <= 2 * MOVE_PAGES, "the list of a pack has no more room");

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
    kernel->chunk = (int32_t)image->chunk;
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

/* Room for the next list, in pinned memory. */
static cu_result cuda_take_list(cuda_queue *work, int64_t **list)
{
    cu_result result = work->lists == NULL ? cuda_make_lists(work) : CU_SUCCESS;
    if (result == CU_SUCCESS)
        *list = work->lists[work->num_lists++ % MOVE_SLOTS].places;
    return result;
}

static cu_result cuda_bring_list(cuda_queue *work, const int64_t *list, size_t count, cu_address *at)
{
    *at = work->device_lists + (size_t)((const char *)list - (const char *)work->lists);
    return cuda.copy_in(*at, list, count * sizeof *list, work->stream);
}

/* Bring to the device where the pages begin in their pools: the source's in lines, the target's in units of `unit`. */
static cu_result cuda_send_list(cuda_queue *work, const page_move *move, uint64_t unit, cu_address *src, cu_address *dst)
{
    int64_t *list;
    cu_result result = cuda_take_list(work, &list);
    if (result != CU_SUCCESS)
        return result;
    for (uint32_t i = 0; i < move->num_pages; i++) {
        list[i] = (int64_t)((move->pages[i].src * move->src_page_nbytes + move->src_offset) / LINE_BYTES);
        list[move->num_pages + i] = (int64_t)((move->pages[i].dst * move->dst_page_nbytes + move->dst_offset) / unit);
    }
    result = cuda_bring_list(work, list, 2 * move->num_pages, src);
    *dst = *src + move->num_pages * sizeof list[0];
    return result;
}

static cu_result cuda_launch(const cuda_kernel *kernel, cu_object stream, void **arguments)
{
    return cuda.launch(kernel->function, kernel->num_programs, 1, 1, kernel->num_threads, 1, 1, kernel->shared_nbytes,
                       stream, arguments, NULL);
}

static const cuda_kernel *kernel_of(const device_queue *queue, int64_t which)
{
    return &((const cuda_device *)queue->device)->kernels[which];
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
    return cuda_words(cuda_launch(kernel_of(queue, KVT_MOVER), work->stream, arguments));
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
        result = cuda_launch(kernel_of(queue, KVT_DIGESTER), work->stream, arguments);
    if (result == CU_SUCCESS)
        result = cuda.copy_out(pinned_sum, sum, sizeof *pinned_sum, work->stream);
    return cuda_words(result);
}

/* Of the source's pages only those that these images are made of, and tokens counted from the first of them. */
static cu_result cuda_send_images(cuda_queue *work, const image_pack *pack, int64_t num_source, cu_address *src, cu_address *tokens)
{
    int64_t *list, first = pack->images[0].src / pack->how->src_page_size;
    cu_result result = cuda_take_list(work, &list);
    if (result != CU_SUCCESS)
        return result;
    memcpy(list, pack->source + first, (size_t)num_source * sizeof *list);
    for (uint32_t i = 0; i < pack->num_images; i++)
        list[num_source + i] = pack->images[i].src - first * pack->how->src_page_size;
    result = cuda_bring_list(work, list, (size_t)num_source + pack->num_images, src);
    *tokens = *src + (size_t)num_source * sizeof *list;
    return result;
}

#define MAX_ARGUMENTS 20

/* Launch a kernel whose arguments are addresses, then numbers, then the two scratch pointers. */
static const char *cuda_launch_with(device_queue *queue, const cuda_kernel *kernel, cu_address *addresses, size_t num_addresses,
                                    int32_t *numbers, size_t num_numbers)
{
    cu_address none = 0;
    void *arguments[MAX_ARGUMENTS], **end = arguments;
    for (size_t i = 0; i < num_addresses; i++)
        *end++ = &addresses[i];
    for (size_t i = 0; i < num_numbers; i++)
        *end++ = &numbers[i];
    *end++ = &none;
    *end++ = &none;
    return cuda_words(cuda_launch(kernel, ((cuda_queue *)queue->work)->stream, arguments));
}

/* With the arguments of `pack_pages_kernel`. */
static const char *cuda_pack(device_queue *queue, const image_pack *pack)
{
    const struct page_pack *how = pack->how;
    const cuda_kernel *kernel = kernel_of(queue, KVT_PACKERS + how->src_type * KVT_NUM_CELL_TYPES + how->dst_type);
    if (kernel->function == NULL)
        return "no kernel packs cells of these types";
    int64_t first = pack->images[0].src, last = pack->images[pack->num_images - 1].src;
    int64_t num_source = num_source_pages(how, pack->num_source, first, last);
    cu_address addresses[] = {(uintptr_t)pack->pool + (uint64_t)how->src_offset, (uintptr_t)pack->to, 0, 0};
    cu_result result = cuda_send_images(queue->work, pack, num_source, &addresses[2], &addresses[3]);
    if (result != CU_SUCCESS)
        return cuda_words(result);
    int32_t numbers[] = {
        (int32_t)pack->num_images,
        (int32_t)num_source,
        (int32_t)(how->src_page_bytes / cell_bytes(how->src_type)),
        (int32_t)how->src_page_size,
        (int32_t)(how->src_num_heads * how->head_dim),
        (int32_t)(how->first_head * how->head_dim),
        (int32_t)how->dst_page_size,
        (int32_t)(how->num_heads * how->head_dim / kernel->chunk),
        (int32_t)pack->first_row,
        (int32_t)pack->num_rows,
    };
    return cuda_launch_with(queue, kernel, addresses, 4, numbers, sizeof numbers / sizeof numbers[0]);
}

static cu_result cuda_send_pages(cuda_queue *work, const page_unpack *unpack, cu_address *pages)
{
    int64_t *list;
    cu_result result = cuda_take_list(work, &list);
    if (result != CU_SUCCESS)
        return result;
    for (uint32_t i = 0; i < unpack->num_pages; i++)
        list[i] = unpack->pages[i].src;
    return cuda_bring_list(work, list, unpack->num_pages, pages);
}

/* With the arguments of `unpack_part_kernel`, a launch for each part. */
static const char *cuda_unpack(device_queue *queue, const page_unpack *unpack)
{
    const struct page_parts *how = unpack->how;
    const cuda_kernel *kernel = kernel_of(queue, KVT_UNPACKER);
    if (kernel->function == NULL)
        return "no kernel puts parts of pages together";
    cu_address addresses[] = {(uintptr_t)unpack->copied, (uintptr_t)unpack->pool + (uint64_t)how->offset, 0};
    const char *trouble = cuda_words(cuda_send_pages(queue->work, unpack, &addresses[2]));
    const int64_t chunk_bytes = 8 * kernel->chunk;
    int32_t numbers[] = {(int32_t)unpack->num_pages,
                         (int32_t)(parts_bytes(how) / 8),
                         (int32_t)(unpack->page_nbytes / 8),
                         (int32_t)how->num_rows,
                         (int32_t)(parts_row_bytes(how) / chunk_bytes),
                         0,
                         0};
    for (int64_t part = 0; part < how->num_parts && trouble == NULL; part++, numbers[5] += numbers[6]) {
        numbers[6] = (int32_t)(how->part_heads[part] * how->head_bytes / chunk_bytes);
        trouble = cuda_launch_with(queue, kernel, addresses, 3, numbers, sizeof numbers / sizeof numbers[0]);
    }
    return trouble;
}
