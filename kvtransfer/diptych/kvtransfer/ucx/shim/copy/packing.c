/* Pages for a pool with another layout: what they hold is packed as it is posted, a run at a time. See plan.py. */

/* How an operation's images are made. The `src` of a page pair is its image's first token, of those in `source`. */
typedef struct packing {
    struct page_pack how;
    int64_t num_source;
    int64_t source[]; /* pages of ours */
} packing;

/* Runs come in whole rows, and in whole words: so the digests of runs add up. */
static uint64_t packed_unit(const struct page_pack *how)
{
    uint64_t row = (uint64_t)packed_row_bytes(how), unit = row;
    while (unit % 8 != 0)
        unit += row;
    return unit;
}

static uint64_t image_bytes(const struct page_pack *how)
{
    return (uint64_t)(how->num_layers * 2 * how->dst_page_size * packed_row_bytes(how));
}

static uint64_t packing_bytes(const kvt_operation *wanted)
{
    return wanted->pack == NULL ? 0 : sizeof(packing) + wanted->num_src * sizeof(int64_t);
}

static void set_packing(operation *op, const kvt_operation *wanted)
{
    op->packing = op->extra;
    op->packing->how = *wanted->pack;
    op->packing->num_source = (int64_t)wanted->num_src;
    memcpy(op->packing->source, wanted->src, wanted->num_src * sizeof(int64_t));
    op->unit = packed_unit(wanted->pack);
}

/* The bytes of a run: where they lie in our pool, or packed into `room`. */
static const char *run_bytes(const operation *op, byte_run run, char *room)
{
    const packing *packing = op->packing;
    const char *pool = op->link->engine->pool;
    if (packing == NULL)
        return pool + run.src;
    const struct source_pages source = {pool, packing->source, packing->num_source};
    const int64_t row = packed_row_bytes(&packing->how);
    pack_rows(&packing->how, &source, op->pages[run.page].src, (int64_t)run.src / row, (int64_t)run.len / row, room);
    return room;
}

/* At most `bytes` of an operation that are whole units, but one at least. */
static uint64_t whole_units(const operation *op, uint64_t bytes)
{
    return bytes < op->unit ? op->unit : bytes / op->unit * op->unit;
}
