/* The paged KV pool as one step and one layer see it: where keys and values lie, rotation, storing, softmax weights.
 *
 * kv[page][layer][2][page_size][kv_head][head_dim]: index 2 is keys, then values. */
#pragma once

#include <math.h>

#include "linear.h"
#include "simd.h"

enum { KEY_BLOCK = 64 }; /* keys between two updates of the running maximum; blocks are aligned to position 0 */

/* One step, all layers. Mirrored in paged_attention.py. */
struct attention_step {
    float *kv;
    const int64_t *positions, *out_slots; /* [num_tokens] */
    const int64_t *first_tokens; /* [batch_size + 1]: of each request, and the end */
    const int32_t *page_table; /* [batch_size][table_width] */
    int64_t table_width, batch_size;
    int64_t num_layers, page_size, num_heads, num_kv_heads, head_dim;
};

/* How one layer attends, in every step. Mirrored in paged_attention.py. */
struct attention_layer {
    const float *rope;        /* [context_len][2][rope_dim / 2]: cosines, sines */
    int64_t index, rope_dim;  /* the first dimensions of a head rotate */
    int64_t window;           /* a token sees itself and the newest before it, so many in all */
    float scale, softcap;     /* of scores; softcap 0: none */
};

struct attention {
    const struct attention_step *step;
    const struct attention_layer *layer;
    float *qkv; /* [num_tokens][num_heads + 2 * num_kv_heads][head_dim] */
    float *out; /* [num_tokens][num_heads][head_dim] */
};

struct head { /* one KV head of one request */
    const struct attention_step *step;
    const struct attention_layer *layer;
    const int32_t *pages;
    int64_t kv_head;
};

static inline int64_t group_size(const struct attention_step *step) { return step->num_heads / step->num_kv_heads; }

static inline float *kv_at(const struct attention_step *step, int64_t page, int64_t layer, int value, int64_t offset) {
    const int64_t token = ((page * step->num_layers + layer) * 2 + value) * step->page_size + offset;
    return step->kv + token * step->num_kv_heads * step->head_dim;
}

struct keys { /* up to KEY_BLOCK keys of a head, the last one repeated to fill; a value lies value_offset() further */
    const float *rows[KEY_BLOCK];
    int count;
};

/* Finds the block of keys that begins at position `start`; it is empty from num_keys on. */
static void locate(const struct head *head, int64_t start, int64_t num_keys, struct keys *keys) {
    const struct attention_step *step = head->step;
    int64_t page = start / step->page_size, offset = start % step->page_size;
    keys->count = (int)min_of(KEY_BLOCK, num_keys - start > 0 ? num_keys - start : 0);
    for (int i = 0; i < keys->count; page++, offset = 0) {
        const float *row = kv_at(step, head->pages[page], head->layer->index, 0, offset) + head->kv_head * step->head_dim;
        for (; offset < step->page_size && i < keys->count; i++, offset++, row += step->num_kv_heads * step->head_dim)
            keys->rows[i] = row;
    }
    for (int i = keys->count; keys->count && i < KEY_BLOCK; i++) keys->rows[i] = keys->rows[keys->count - 1];
}

/* The first key that a token sees, and the block of keys it is in. */
static inline int64_t first_key(const struct attention_layer *layer, int64_t position) {
    return position < layer->window ? 0 : position + 1 - layer->window;
}
static inline int64_t block_of(int64_t key) { return key / KEY_BLOCK * KEY_BLOCK; }

static inline int64_t value_offset(const struct attention_step *step) {
    return step->page_size * step->num_kv_heads * step->head_dim;
}

static inline float *state_at(const struct attention *job, int64_t token, int64_t head) {
    const struct attention_step *step = job->step;
    return job->qkv + (token * (step->num_heads + 2 * step->num_kv_heads) + head) * step->head_dim;
}

INLINE void rotate(const float *from, float *to, const struct attention *job, int64_t position) {
    const int64_t dim = job->layer->rope_dim, half = dim / 2;
    const float *cosines = job->layer->rope + position * dim, *sines = cosines + half;
    for (int64_t i = 0; i < half; i++) {
        const float first = from[i], second = from[half + i];
        to[i] = first * cosines[i] - second * sines[i];
        to[half + i] = second * cosines[i] + first * sines[i];
    }
    memcpy(to + dim, from + dim, (job->step->head_dim - dim) * sizeof *to);
}

static void store_kv(const struct attention *job, int64_t token, int64_t kv_head) {
    const struct attention_step *step = job->step;
    const int64_t slot = step->out_slots[token], page = slot / step->page_size, offset = slot % step->page_size;
    float *key = kv_at(step, page, job->layer->index, 0, offset) + kv_head * step->head_dim;
    float *value = kv_at(step, page, job->layer->index, 1, offset) + kv_head * step->head_dim;
    rotate(state_at(job, token, step->num_heads + kv_head), key, job, step->positions[token]);
    const float *from = state_at(job, token, step->num_heads + step->num_kv_heads + kv_head);
    memcpy(value, from, step->head_dim * sizeof *value);
}

/* Rotates and scales one query head. */
INLINE void prepare_query(const struct attention *job, int64_t token, int64_t query_head, float *to) {
    const struct attention_step *step = job->step;
    rotate(state_at(job, token, query_head), to, job, step->positions[token]);
    for (int64_t i = 0; i < step->head_dim; i++) to[i] *= job->layer->scale;
}

/* softcap * tanh(score / softcap) for a block; a masked score is masked after it. */
INLINE void cap_scores(float *scores, float softcap) {
    if (softcap == 0.0f) return;
    for (int i = 0; i < KEY_BLOCK; i += LANES) {
        const vec grown = vec_exp(load(scores + i) * (2.0f / softcap));
        store(scores + i, softcap - 2.0f * softcap / (grown + 1.0f));
    }
}

/* Turns a block's scores into weights. Returns what earlier sums have to be multiplied with. */
INLINE vec weigh(float *scores, float *running_max, float *total) {
    vec largest = load(scores);
    for (int i = LANES; i < KEY_BLOCK; i += LANES) largest = vec_max(largest, load(scores + i));
    const float new_max = max_of(*running_max, maximum(largest));
    const vec shrink = vec_exp(splat(*running_max - new_max));
    vec weights = splat(0.0f);
    for (int i = 0; i < KEY_BLOCK; i += LANES) {
        const vec weight = vec_exp(load(scores + i) - new_max);
        store(scores + i, weight);
        weights += weight;
    }
    *total = *total * shrink[0] + sum(weights);
    *running_max = new_max;
    return shrink;
}
