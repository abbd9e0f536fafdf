/* The thread of the emulated device: does the work of all queues, in order. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct emulated_work {
    struct emulated_work *next;
    enum { WORK_COPY, WORK_MOVE, WORK_DIGEST, WORK_PACK, WORK_UNPACK, WORK_MARK, WORK_STOP } kind;
    device_queue *queue;
    char *to;
    const char *from;
    size_t bytes;
    page_move move;
    uint64_t *sum;
    image_pack pack;
    page_unpack unpack;
    page_pair pages[];
} emulated_work;

typedef struct {
    device device;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t came, done;
    emulated_work *first, *last;
    bool is_busy;
    int memory_fd;
    size_t memory_bytes;
} emulated_device;

static const char *give_work(device *base, emulated_work wanted, const page_pair *pages, uint32_t num_pages)
{
    emulated_device *device = (emulated_device *)base;
    emulated_work *work = malloc(sizeof *work + num_pages * sizeof *pages);
    if (work == NULL)
        return "out of memory";
    *work = wanted;
    if (num_pages > 0)
        memcpy(work->pages, pages, num_pages * sizeof *pages);
    work->move.pages = work->pack.images = work->unpack.pages = work->pages;
    pthread_mutex_lock(&device->lock);
    if (device->first == NULL)
        device->first = work;
    else
        device->last->next = work;
    device->last = work;
    pthread_cond_signal(&device->came);
    pthread_mutex_unlock(&device->lock);
    return NULL;
}

static emulated_work *next_work(emulated_device *device)
{
    pthread_mutex_lock(&device->lock);
    device->is_busy = false;
    pthread_cond_broadcast(&device->done);
    while (device->first == NULL)
        pthread_cond_wait(&device->came, &device->lock);
    emulated_work *work = device->first;
    device->first = work->next;
    device->is_busy = true;
    pthread_mutex_unlock(&device->lock);
    return work;
}

static void move_emulated(const page_move *move)
{
    for (uint32_t i = 0; i < move->num_pages; i++)
        memcpy(move->dst + move->pages[i].dst * move->dst_page_nbytes + move->dst_offset,
               move->src + move->pages[i].src * move->src_page_nbytes + move->src_offset, move->len);
}

static uint64_t digest_emulated(const page_move *move)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < move->num_pages; i++)
        sum += digest_bytes(move->src + move->pages[i].src * move->src_page_nbytes + move->src_offset,
                            move->pages[i].dst * move->dst_page_nbytes + move->dst_offset, move->len);
    return sum;
}

static void pack_emulated(const image_pack *pack)
{
    const struct source_pages source = {pack->pool, pack->source, pack->num_source};
    const int64_t image = pack->num_rows * packed_row_bytes(pack->how);
    for (uint32_t i = 0; i < pack->num_images; i++)
        pack_rows(pack->how, &source, pack->images[i].src, pack->first_row, pack->num_rows, pack->to + i * image);
}

static void unpack_emulated(const page_unpack *unpack)
{
    const uint64_t region = parts_bytes(unpack->how);
    for (uint32_t i = 0; i < unpack->num_pages; i++)
        unpack_page(unpack->how, unpack->pool + unpack->pages[i].src * unpack->page_nbytes, unpack->copied + i * region);
}

static void tell_emulated(device_queue *queue)
{
    int wake_fd = queue->wake_fd; /* the queue may be gone once the mark is reached */
    atomic_fetch_add_explicit(&queue->num_reached, 1, memory_order_release);
    set_fd(wake_fd);
}

static void *run_emulated(void *arg)
{
    bool is_running = true;
    while (is_running) {
        emulated_work *work = next_work(arg);
        switch (work->kind) {
        case WORK_COPY:
            memcpy(work->to, work->from, work->bytes);
            break;
        case WORK_MOVE:
            move_emulated(&work->move);
            break;
        case WORK_DIGEST:
            *work->sum = digest_emulated(&work->move);
            break;
        case WORK_PACK:
            pack_emulated(&work->pack);
            break;
        case WORK_UNPACK:
            unpack_emulated(&work->unpack);
            break;
        case WORK_MARK:
            tell_emulated(work->queue);
            break;
        case WORK_STOP:
            is_running = false;
            break;
        }
        free(work);
    }
    return NULL;
}
