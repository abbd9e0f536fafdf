/* Rotate, store, attend: attention of one layer, split into parts for the thread pool.
 *
 * Decode, one token a request or a few: each (request, KV head) rotates its heads, writes its key and value and attends,
 * token by token, with no step between. Extend: all new keys and values are stored, then each (request, KV head, block of tokens) attends. */
#pragma once

#include "attend_block.h"
#include "attend_few.h"
#include "threads.h"

enum { STORE_TOKENS = 32 }; /* stored by one part */

static void decode_part(const void *attention, int64_t part) {
    const struct attention *job = attention;
    const struct attention_step *step = job->step;
    const int64_t request = part / step->num_kv_heads, kv_head = part % step->num_kv_heads;
    const struct head head = {step, job->layer, step->page_table + request * step->table_width, kv_head, NULL};
    for (int64_t token = step->first_tokens[request]; token < step->first_tokens[request + 1]; token++) {
        store_kv(job, token, kv_head);
        attend_token(job, &head, token);
    }
}

struct extend {
    struct attention attention;
    const int64_t *first_blocks; /* [batch_size + 1]: of each request, in units of (block, KV head) */
    int64_t block_tokens;
};

static void extend_part(const void *extend, int64_t part) {
    const struct extend *job = extend;
    const struct attention_step *step = job->attention.step;
    int64_t request = 0;
    while (job->first_blocks[request + 1] <= part) request++;
    const int64_t index = part - job->first_blocks[request], end = step->first_tokens[request + 1];
    const int64_t first = step->first_tokens[request] + index / step->num_kv_heads * job->block_tokens;
    const int64_t last = min_of(first + job->block_tokens, end);
    const int32_t *pages = step->page_table + request * step->table_width;
    const struct head head = {step, job->attention.layer, pages, index % step->num_kv_heads, NULL};
    if (can_tile(step)) {
        attend_block(&job->attention, &head, first, last);
    } else {
        for (int64_t token = first; token < last; token++) attend_token(&job->attention, &head, token);
    }
}

static void store_part(const void *attention, int64_t part) {
    const struct attention *job = attention;
    const int64_t num_tokens = job->step->first_tokens[job->step->batch_size];
    for (int64_t token = part * STORE_TOKENS; token < min_of((part + 1) * STORE_TOKENS, num_tokens); token++)
        for (int64_t kv_head = 0; kv_head < job->step->num_kv_heads; kv_head++) store_kv(job, token, kv_head);
}
