/* The paged KV pool as one step and one layer see it: where keys and values lie, rotation, storing, softmax weights.
 *
 * kv[page][layer][num_planes][page_size][kv_head][head_dim]: planes are keys, then values; pages are page_bytes apart, for
 * other regions may lie between; of one plane, values are the
 * first value_dim dimensions of the keys. Narrow types are widened when they are read; a token reads its own chunk's keys from the pool, too, so that its result does not depend on the chunk. */
#pragma once

#include <math.h>

#include "linear.h"
#include "narrow.h"

enum { KEY_BLOCK = 64 }; /* keys between two updates of the running maximum; blocks are aligned to position 0 */
enum { MAX_HEAD_DIM = 1024 };
enum kv_type { KV_FLOAT32, KV_BFLOAT16, KV_FP8 }; /* mirrored in paged_attention.py */

/* One step, all layers. Mirrored in paged_attention.py. */
struct attention_step {
    char *kv;
    const int64_t *positions, *out_slots; /* [num_tokens] */
    const int64_t *first_tokens; /* [batch_size + 1]: of each request, and the end */
    const int32_t *page_table; /* [batch_size][table_width] */
    int64_t table_width, batch_size;
    int64_t num_layers, num_planes, page_size, num_heads, num_kv_heads, head_dim, value_dim;
    int64_t page_bytes; /* from a page to the next: other regions may lie between */
    int64_t num_states; /* floats of a token in `attention.qkv`: an indexer's may lie behind queries, keys and values */
    int64_t kv_type;
    int64_t num_borrowing_states; /* num_states in layers that borrow: queries alone, unless an indexer's lie behind */
    const int64_t *seen_ends; /* [num_tokens]: behind the last key that each sees, never falling within a request; NULL:
                                 itself is the last */
};

/* How one layer attends, in every step. Mirrored in paged_attention.py. */
struct attention_layer {
    const float *rope;        /* [context_len][2][rope_dim / 2]: cosines, sines */
    int64_t index, rope_start, rope_dim; /* so many dimensions of a head rotate, from rope_start on */
    int64_t window;           /* a token sees itself and the newest before it, so many in all */
    int64_t chunked;          /* 1: it sees what is not behind it of its chunk of so many tokens instead */
    float scale, softcap;     /* of scores; softcap 0: none */
    const float *sinks;       /* [num_heads]: a score of each head that has no value; NULL: there are none */
    int64_t keeps;            /* 0: it stores nothing, and attends to what an earlier layer has stored */
};

struct attention {
    const struct attention_step *step;
    const struct attention_layer *layer;
    float *qkv; /* [num_tokens][num_heads + num_planes * num_kv_heads][head_dim], num_states apart; see there */
    float *out; /* [num_tokens][num_heads][value_dim] */
};

struct head { /* one KV head of one request */
    const struct attention_step *step;
    const struct attention_layer *layer;
    const int32_t *pages;
    int64_t kv_head;
    const int32_t *chosen; /* positions of the keys that a token attends to; NULL: all from the first on */
};

static inline int64_t group_size(const struct attention_step *step) { return step->num_heads / step->num_kv_heads; }

static inline int64_t element_bytes(const struct attention_step *step) {
    return step->kv_type == KV_FLOAT32 ? 4 : step->kv_type == KV_BFLOAT16 ? 2 : 1;
}
static inline int64_t row_bytes(const struct attention_step *step) { return step->head_dim * element_bytes(step); }

static inline char *key_at(const struct attention_step *step, int64_t page, int64_t layer, int64_t offset,
                           int64_t kv_head) {
    const int64_t token = layer * step->num_planes * step->page_size + offset;
    return step->kv + page * step->page_bytes + (token * step->num_kv_heads + kv_head) * row_bytes(step);
}

static inline int64_t value_bytes(const struct attention_step *step) { /* from a key to its value */
    return step->num_planes == 1 ? 0 : step->page_size * step->num_kv_heads * row_bytes(step);
}

struct keys { /* up to KEY_BLOCK keys of a head, the last one repeated to fill; a value lies value_bytes() further */
    const char *rows[KEY_BLOCK];
    int count;
};

struct wide_keys { /* the same as floats; a value lies `values` floats further */
    const float *rows[KEY_BLOCK];
    int64_t values;
    int count;
};

static void locate_in_order(const struct head *head, int64_t start, struct keys *keys) {
    const struct attention_step *step = head->step;
    const int64_t token_bytes = step->num_kv_heads * row_bytes(step);
    int64_t page = start / step->page_size, offset = start % step->page_size;
    for (int i = 0; i < keys->count; page++, offset = 0) {
        const char *row = key_at(step, head->pages[page], head->layer->index, offset, head->kv_head);
        for (; offset < step->page_size && i < keys->count; i++, offset++, row += token_bytes) keys->rows[i] = row;
    }
}

static void locate_chosen(const struct head *head, int64_t start, struct keys *keys) {
    const int64_t page_size = head->step->page_size;
    for (int i = 0; i < keys->count; i++) {
        const int64_t position = head->chosen[start + i], page = head->pages[position / page_size];
        keys->rows[i] = key_at(head->step, page, head->layer->index, position % page_size, head->kv_head);
    }
}

/* Finds the block of keys from the `start`-th on; it is empty from num_keys on. */
static void locate(const struct head *head, int64_t start, int64_t num_keys, struct keys *keys) {
    keys->count = (int)min_of(KEY_BLOCK, num_keys - start > 0 ? num_keys - start : 0);
    if (head->chosen) locate_chosen(head, start, keys);
    else locate_in_order(head, start, keys);
    for (int i = keys->count; keys->count && i < KEY_BLOCK; i++) keys->rows[i] = keys->rows[keys->count - 1];
}

INLINE vec widen(int64_t kv_type, const char *from) {
    return kv_type == KV_BFLOAT16 ? from_bf16(from) : from_fp8(from);
}

static void widen_row(const struct attention_step *step, const char *from, float *to) {
    const int64_t bytes = element_bytes(step), dim = step->head_dim, whole = dim / LANES * LANES;
    for (int64_t d = 0; d < whole; d += LANES) store(to + d, widen(step->kv_type, from + d * bytes));
    if (whole == dim) return;
    char padded[LANES * 2] = {0};
    memcpy(padded, from + whole * bytes, (dim - whole) * bytes);
    const vec rest = widen(step->kv_type, padded);
    memcpy(to + whole, &rest, (dim - whole) * sizeof *to);
}

static void narrow_row(const struct attention_step *step, const float *from, char *to) {
    const int64_t bytes = element_bytes(step), dim = step->head_dim;
    for (int64_t d = 0; d < dim; d += LANES) {
        const int64_t count = min_of(LANES, dim - d);
        float x[LANES] = {0};
        char narrow[LANES * 2];
        memcpy(x, from + d, count * sizeof *x);
        if (step->kv_type == KV_BFLOAT16) store_bf16(narrow, load(x));
        else store_fp8(narrow, load(x));
        memcpy(to + d * bytes, narrow, count * bytes);
    }
}

/* `buffer` [KEY_BLOCK][2][head_dim] is used where the pool holds no floats. */
INLINE void as_floats(const struct attention_step *step, const struct keys *keys, float *buffer,
                      struct wide_keys *wide) {
    wide->count = keys->count;
    if (step->kv_type == KV_FLOAT32) {
        memcpy(wide->rows, keys->rows, sizeof wide->rows);
        wide->values = value_bytes(step) / (int64_t)sizeof(float);
        return;
    }
    wide->values = step->num_planes == 1 ? 0 : step->head_dim;
    for (int i = 0; i < keys->count; i++) {
        float *row = buffer + i * 2 * step->head_dim;
        widen_row(step, keys->rows[i], row);
        if (step->num_planes > 1) widen_row(step, keys->rows[i] + value_bytes(step), row + step->head_dim);
        wide->rows[i] = row;
    }
    for (int i = keys->count; keys->count && i < KEY_BLOCK; i++) wide->rows[i] = wide->rows[keys->count - 1];
}

/* Lays out KEY_BLOCK keys for `tile`: panels [panel][dim][PANEL]. Keys that are missing are the last one again. */
static void lay_out_panels(const struct wide_keys *keys, int64_t dim, float *panels) {
    for (int first = 0; first < KEY_BLOCK; first += LANES) {
        float *panel = panels + first / PANEL * PANEL * dim + first % PANEL;
        int64_t d = 0;
        for (; d + 4 <= dim; d += 4) {
            vec columns[4];
            load_columns(keys->rows + first, d, columns);
            for (int c = 0; c < 4; c++) store(panel + (d + c) * PANEL, columns[c]);
        }
        for (; d < dim; d++)
            for (int i = 0; i < LANES; i++) panel[d * PANEL + i] = keys->rows[first + i][d];
    }
}

/* The first key that a token sees, the first position that does not see a key any more, and a key's block. */
static inline int64_t first_key(const struct attention_layer *layer, int64_t position) {
    if (layer->chunked) return position / layer->window * layer->window;
    return position < layer->window ? 0 : position + 1 - layer->window;
}
static inline int64_t seen_until(const struct attention_layer *layer, int64_t key) {
    return layer->chunked ? (key / layer->window + 1) * layer->window : key + layer->window;
}
static inline int64_t seen_end(const struct attention_step *step, int64_t token) {
    return step->seen_ends ? step->seen_ends[token] : step->positions[token] + 1;
}
static inline int64_t block_of(int64_t key) { return key / KEY_BLOCK * KEY_BLOCK; }

static inline float *state_at(const struct attention *job, int64_t token, int64_t head) {
    const struct attention_step *step = job->step;
    const int64_t row = job->layer->keeps ? step->num_states : step->num_borrowing_states;
    return job->qkv + token * row + head * step->head_dim;
}

INLINE void rotate(const float *from, float *to, const struct attention *job, int64_t position) {
    const int64_t start = job->layer->rope_start, dim = job->layer->rope_dim, half = dim / 2, end = start + dim;
    const float *cosines = job->layer->rope + position * dim, *sines = cosines + half;
    memcpy(to, from, start * sizeof *to);
    for (int64_t i = 0; i < half; i++) {
        const float first = from[start + i], second = from[start + half + i];
        to[start + i] = first * cosines[i] - second * sines[i];
        to[start + half + i] = second * cosines[i] + first * sines[i];
    }
    memcpy(to + end, from + end, (job->step->head_dim - end) * sizeof *to);
}

static void store_kv(const struct attention *job, int64_t token, int64_t kv_head) {
    const struct attention_step *step = job->step;
    if (!job->layer->keeps) return;
    const int64_t slot = step->out_slots[token], page = slot / step->page_size, offset = slot % step->page_size;
    char *key = key_at(step, page, job->layer->index, offset, kv_head), *value = key + value_bytes(step);
    const float *new_key = state_at(job, token, step->num_heads + kv_head);
    const float *new_value = state_at(job, token, step->num_heads + step->num_kv_heads + kv_head);
    if (step->kv_type == KV_FLOAT32) {
        rotate(new_key, (float *)key, job, step->positions[token]);
        if (step->num_planes > 1) memcpy(value, new_value, row_bytes(step));
        return;
    }
    float rotated[MAX_HEAD_DIM];
    rotate(new_key, rotated, job, step->positions[token]);
    narrow_row(step, rotated, key);
    if (step->num_planes > 1) narrow_row(step, new_value, value);
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

/* The softmax of a query before its first key: of nothing, or of its head's sink. */
INLINE void begin_softmax(const struct attention_layer *layer, int64_t query_head, float *running_max, float *total) {
    *running_max = layer->sinks ? layer->sinks[query_head] : -INFINITY;
    *total = layer->sinks ? 1.0f : 0.0f;
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
