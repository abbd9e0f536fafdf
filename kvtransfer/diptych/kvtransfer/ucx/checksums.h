/* Digests of our own pages: computed by the progress thread, a slice at a time between other work. */
#ifndef KVT_CHECKSUMS_H
#define KVT_CHECKSUMS_H

#include "digest.h"
#include "queue.h"

#define SLICE_BYTES ((size_t)4 << 20)

static void append_digest(kvt_engine *engine, operation *op)
{
    op->next = NULL;
    if (engine->digests == NULL)
        engine->digests = op;
    else
        engine->last_digest->next = op;
    engine->last_digest = op;
}

static void digest_slice(const kvt_engine *engine, operation *op)
{
    size_t left = SLICE_BYTES;
    while (left > 0 && op->num_posted < op->num_pages) {
        uint64_t begin = op->pages[op->num_posted].src * engine->page_bytes + op->part_posted;
        size_t rest = engine->page_bytes - op->part_posted, len = rest < left ? rest : left;
        op->digest += digest_bytes(engine->pool + begin, begin, len);
        op->part_posted += len;
        op->num_posted += op->part_posted / engine->page_bytes;
        op->part_posted %= engine->page_bytes;
        left -= len;
    }
}

/* Returns whether there was anything to do. */
static bool digest_some(kvt_engine *engine)
{
    operation *op = engine->digests;
    if (op == NULL)
        return false;
    digest_slice(engine, op);
    if (op->num_posted == op->num_pages) {
        engine->digests = op->next;
        op->done.event.has_digest = true;
        op->done.event.digest = op->digest;
        push_event(engine, &op->done);
    }
    return true;
}

static void drop_digests(kvt_engine *engine)
{
    while (engine->digests != NULL) {
        operation *op = engine->digests;
        engine->digests = op->next;
        free(op);
    }
}

#endif
