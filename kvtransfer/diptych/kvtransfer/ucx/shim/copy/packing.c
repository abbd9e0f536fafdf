/* Pages for a pool with another layout: what they hold is packed as it is posted, a run at a time. See plan.py. */

/* How images are made. The `src` of a page pair is its image's first token, of those in `source`. */
typedef struct packing {
    struct page_pack how;
    int64_t num_source;
    int64_t source[]; /* pages of ours */
} packing;

/* What is moved comes in whole words of digests, on a device in whole lines. */
static uint64_t word_bytes(const kvt_engine *engine)
{
    return engine->device != NULL ? LINE_BYTES : 8;
}

/* Runs come in whole rows, and in whole words: so the digests of runs add up. */
static uint64_t packed_unit(const struct page_pack *how, uint64_t word)
{
    uint64_t row = (uint64_t)packed_row_bytes(how), unit = row;
    while (unit % word != 0)
        unit += row;
    return unit;
}

static uint64_t image_bytes(const struct page_pack *how)
{
    return (uint64_t)(how->num_layers * how->num_planes * how->dst_page_size * packed_row_bytes(how));
}

/* Whether what is packed is a region of pages as large as ours. */
static bool packs_from(const struct page_pack *how, uint64_t page_nbytes)
{
    return (uint64_t)how->src_page_bytes == page_nbytes && how->src_offset >= 0 &&
           (uint64_t)how->src_offset + source_region_bytes(how) <= page_nbytes;
}

/* Of `num_source` pages, those from the one with the first token of the first image to the one with the last of the last. */
static int64_t num_source_pages(const struct page_pack *how, int64_t num_source, int64_t first_token, int64_t last_image)
{
    int64_t first = first_token / how->src_page_size, end = (last_image + how->dst_page_size - 1) / how->src_page_size + 1;
    end = fewer(end, num_source);
    return end > first ? end - first : 0;
}

/* Whether a device can pack an image in one go, in the worst case of where it begins, and send some of it in a message.
 * Of heads that are not whole chunks its kernel would pack less, or nothing. */
static bool fits_device(const device *device, const struct page_pack *how)
{
    int64_t chunk = device->chunks[KVT_PACKERS + how->src_type * KVT_NUM_CELL_TYPES + how->dst_type];
    if (chunk != 0 && how->head_dim % chunk != 0)
        return false;
    return how->dst_page_size / how->src_page_size + 3 <= PACK_ENTRIES && packed_unit(how, LINE_BYTES) <= MESSAGE_BYTES;
}

static uint64_t packing_bytes(const kvt_copy *wanted)
{
    return wanted->pack == NULL ? 0 : sizeof(packing) + wanted->num_src * sizeof(int64_t);
}

static void set_packing(page_copy *copy, const kvt_copy *wanted, uint64_t word, void *memory)
{
    copy->packing = memory;
    copy->packing->how = *wanted->pack;
    copy->packing->num_source = (int64_t)wanted->num_src;
    memcpy(copy->packing->source, wanted->src, wanted->num_src * sizeof(int64_t));
    copy->unit = packed_unit(wanted->pack, word);
}

/* The bytes of a run: where they lie in our pool, or packed into `room`. */
static const char *run_bytes(const kvt_link *link, byte_run run, char *room)
{
    const packing *packing = run.copy->packing;
    const char *pool = link->engine->pool;
    if (packing == NULL)
        return pool + run.src;
    const struct source_pages source = {pool, packing->source, packing->num_source};
    const int64_t row = packed_row_bytes(&packing->how);
    pack_rows(&packing->how, &source, run.copy->pages[run.page].src, (int64_t)run.src / row, (int64_t)run.len / row, room);
    return room;
}

/* At most `bytes` that are whole units, but one at least. */
static uint64_t whole_units(const page_copy *copy, uint64_t bytes)
{
    return bytes < copy->unit ? copy->unit : bytes / copy->unit * copy->unit;
}
