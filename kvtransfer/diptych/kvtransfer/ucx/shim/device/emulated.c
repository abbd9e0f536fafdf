/* A device for machines without one: memory of the host, shared by its descriptor, and a thread that does the work of all
 * queues in order. It is what tests drive the device's side of the engine with; nobody should want it for anything else. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *emulated_enter(device *base)
{
    (void)base;
    return NULL;
}

static void emulated_close(device *base)
{
    emulated_device *device = (emulated_device *)base;
    if (give_work(base, (emulated_work){.kind = WORK_STOP}, NULL, 0) == NULL)
        pthread_join(device->thread, NULL);
    free(device);
}

static const char *map_shared(int fd, size_t bytes, char **memory)
{
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return "the memory can't be mapped";
    *memory = mapped;
    return NULL;
}

static const char *emulated_allocate(device *base, size_t bytes, char **memory)
{
    emulated_device *device = (emulated_device *)base;
    device->memory_bytes = bytes;
    device->memory_fd = memfd_create("kv-pool", MFD_CLOEXEC);
    if (device->memory_fd < 0 || ftruncate(device->memory_fd, (off_t)bytes) != 0)
        return "no shared memory";
    return map_shared(device->memory_fd, bytes, memory);
}

static void emulated_release(device *base, char *memory)
{
    emulated_device *device = (emulated_device *)base;
    munmap(memory, device->memory_bytes);
    close(device->memory_fd);
}

static const char *emulated_lend(device *base, size_t bytes, char **memory)
{
    (void)base;
    *memory = malloc(bytes);
    return *memory == NULL ? "out of memory" : NULL;
}

static void emulated_take_back(device *base, char *memory)
{
    (void)base;
    free(memory);
}

static const char *emulated_share(device *base, char *memory, char handle[KVT_HANDLE_BYTES])
{
    (void)memory;
    snprintf(handle, KVT_HANDLE_BYTES, "/proc/%ld/fd/%d", (long)getpid(), ((emulated_device *)base)->memory_fd);
    return NULL;
}

static const char *emulated_map(device *base, const char handle[KVT_HANDLE_BYTES], size_t bytes, char **memory)
{
    (void)base;
    int fd = open(handle, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return "the peer's memory can't be opened";
    const char *words = map_shared(fd, bytes, memory);
    close(fd);
    return words;
}

static void emulated_unmap(device *base, char *memory, size_t bytes)
{
    (void)base;
    munmap(memory, bytes);
}

static char *emulated_pin(size_t bytes)
{
    return malloc(bytes);
}

static void emulated_unpin(char *memory)
{
    free(memory);
}

static const char *emulated_open_queue(device_queue *queue)
{
    queue->work = queue;
    return NULL;
}

static void emulated_close_queue(device_queue *queue)
{
    emulated_device *device = (emulated_device *)queue->device;
    if (queue->work == NULL)
        return;
    pthread_mutex_lock(&device->lock);
    while (device->first != NULL || device->is_busy)
        pthread_cond_wait(&device->done, &device->lock);
    pthread_mutex_unlock(&device->lock);
    queue->work = NULL;
}

/* The program's own work on emulated memory is done when it returns. */
static const char *emulated_follow(device_queue *queue, uint64_t stream)
{
    (void)queue, (void)stream;
    return NULL;
}

/* One thread does the work of all queues in the order in which it was given. */
static const char *emulated_behind(device_queue *queue, device_queue *earlier)
{
    (void)queue, (void)earlier;
    return NULL;
}

static const char *emulated_copy(device_queue *queue, char *to, const char *from, size_t bytes)
{
    return give_work(queue->device, (emulated_work){.kind = WORK_COPY, .to = to, .from = from, .bytes = bytes}, NULL, 0);
}

static const char *emulated_move(device_queue *queue, const page_move *move)
{
    return give_work(queue->device, (emulated_work){.kind = WORK_MOVE, .move = *move}, move->pages, move->num_pages);
}

static const char *emulated_digest(device_queue *queue, const page_move *move, uint64_t *pinned_sum)
{
    emulated_work work = {.kind = WORK_DIGEST, .move = *move, .sum = pinned_sum};
    return give_work(queue->device, work, move->pages, move->num_pages);
}

static const char *emulated_pack(device_queue *queue, const image_pack *pack)
{
    return give_work(queue->device, (emulated_work){.kind = WORK_PACK, .pack = *pack}, pack->images, pack->num_images);
}

static const char *emulated_unpack(device_queue *queue, const page_unpack *unpack)
{
    emulated_work work = {.kind = WORK_UNPACK, .unpack = *unpack};
    return give_work(queue->device, work, unpack->pages, unpack->num_pages);
}

static const char *emulated_mark(device_queue *queue)
{
    queue->num_marks++;
    return give_work(queue->device, (emulated_work){.kind = WORK_MARK, .queue = queue}, NULL, 0);
}

static void emulated_look(device_queue *queue)
{
    (void)queue; /* the wake-up is quick enough */
}

static const char *emulated_check(device_queue *queue)
{
    (void)queue;
    return NULL;
}

static const device_calls EMULATED_DEVICE = {
    .enter = emulated_enter,
    .close = emulated_close,
    .allocate = emulated_allocate,
    .release = emulated_release,
    .lend = emulated_lend,
    .take_back = emulated_take_back,
    .share = emulated_share,
    .map = emulated_map,
    .unmap = emulated_unmap,
    .pin = emulated_pin,
    .unpin = emulated_unpin,
    .open_queue = emulated_open_queue,
    .close_queue = emulated_close_queue,
    .follow = emulated_follow,
    .behind = emulated_behind,
    .copy_out = emulated_copy,
    .copy_in = emulated_copy,
    .move = emulated_move,
    .digest = emulated_digest,
    .pack = emulated_pack,
    .unpack = emulated_unpack,
    .mark = emulated_mark,
    .look = emulated_look,
    .check = emulated_check,
};

static const char *open_emulated(device **out)
{
    emulated_device *opened = calloc(1, sizeof *opened);
    if (opened == NULL)
        return "out of memory";
    opened->device = (device){
        .calls = &EMULATED_DEVICE,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    pthread_mutex_init(&opened->lock, NULL);
    pthread_cond_init(&opened->came, NULL);
    pthread_cond_init(&opened->done, NULL);
    if (pthread_create(&opened->thread, NULL, run_emulated, opened) != 0) {
        free(opened);
        return "no thread for the emulated device";
    }
    *out = &opened->device;
    return NULL;
}
