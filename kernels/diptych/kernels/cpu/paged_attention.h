/* Rotate, store, attend: attention of one layer over the paged KV pool.
 *
 * The pool is kv[page][layer][2][page_size][kv_head][head_dim]. Decode: one token a request; each (request, KV head) is
 * a part that rotates its heads, writes its key and value and attends, with no step between. Extend: first all new keys
 * and values are stored, then each (request, KV head, block of tokens) attends with matrix tiles.
 * Keys are visited in blocks aligned to position 0 with a running maximum (Milakov and Gimelshein, 2018; Dao et al.,
 * FlashAttention, 2022), so a token's result does not depend on how its prompt was cut into chunks. */
#pragma once

#include <math.h>

#include "linear.h"
#include "simd.h"
#include "threads.h"

enum {
    KEY_BLOCK = 64,           /* keys between two updates of the running maximum */
    QUERY_FLOATS = 16 * 1024, /* of a block of queries, and of their results */
    MAX_TILED_DIM = 256,      /* larger heads, and odd ones, take the plain loop */
    MAX_HEAD_DIM = 1024,
    STORE_TOKENS = 32,        /* stored by one part */
};

/* One step, all layers. Mirrored in paged_attention.py. */
struct attention_step {
    float *kv;
    const float *rope; /* [context_len][2][head_dim / 2]: cosines, sines */
    const int64_t *positions, *out_slots; /* [num_tokens] */
    const int64_t *seq_lens, *first_tokens; /* [batch_size], [batch_size + 1] */
    const int32_t *page_table; /* [batch_size][table_width] */
    int64_t table_width, batch_size;
    int64_t num_layers, page_size, num_heads, num_kv_heads, head_dim;
};

struct attention {
    const struct attention_step *step;
    int64_t layer;
    float *qkv; /* [num_tokens][num_heads + 2 * num_kv_heads][head_dim] */
    float *out; /* [num_tokens][num_heads][head_dim] */
};

struct head { /* one KV head of one request */
    const struct attention_step *step;
    const int32_t *pages;
    int64_t layer, kv_head;
};

static inline int64_t group_size(const struct attention_step *step) { return step->num_heads / step->num_kv_heads; }

static inline float *kv_at(const struct attention_step *step, int64_t page, int64_t layer, int value, int64_t offset) {
    return step->kv
        + (((page * step->num_layers + layer) * 2 + value) * step->page_size + offset) * step->num_kv_heads * step->head_dim;
}

struct keys { /* up to KEY_BLOCK keys of a head; a key's value lies value_offset() further */
    const float *rows[KEY_BLOCK];
    int count;
};

/* Finds the block of keys that begins at position `start`; it is empty from num_keys on. */
static void locate(const struct head *head, int64_t start, int64_t num_keys, struct keys *keys) {
    const struct attention_step *step = head->step;
    int64_t page = start / step->page_size, offset = start % step->page_size;
    keys->count = (int)min_of(KEY_BLOCK, num_keys - start > 0 ? num_keys - start : 0);
    for (int i = 0; i < keys->count; page++, offset = 0) {
        const float *row = kv_at(step, head->pages[page], head->layer, 0, offset) + head->kv_head * step->head_dim;
        for (; offset < step->page_size && i < keys->count; i++, offset++, row += step->num_kv_heads * step->head_dim)
            keys->rows[i] = row;
    }
}

static inline int64_t value_offset(const struct attention_step *step) {
    return step->page_size * step->num_kv_heads * step->head_dim;
}

static inline float *state_at(const struct attention *job, int64_t token, int64_t head) {
    const struct attention_step *step = job->step;
    return job->qkv + (token * (step->num_heads + 2 * step->num_kv_heads) + head) * step->head_dim;
}

INLINE void rotate(const float *from, float *to, const struct attention_step *step, int64_t position) {
    const int64_t half = step->head_dim / 2;
    const float *cosines = step->rope + position * step->head_dim, *sines = cosines + half;
    for (int64_t i = 0; i < half; i++) {
        const float first = from[i], second = from[half + i];
        to[i] = first * cosines[i] - second * sines[i];
        to[half + i] = second * cosines[i] + first * sines[i];
    }
}

static void store_kv(const struct attention *job, int64_t token, int64_t kv_head) {
    const struct attention_step *step = job->step;
    const int64_t page = job->step->out_slots[token] / step->page_size, offset = step->out_slots[token] % step->page_size;
    float *key = kv_at(step, page, job->layer, 0, offset) + kv_head * step->head_dim;
    float *value = kv_at(step, page, job->layer, 1, offset) + kv_head * step->head_dim;
    rotate(state_at(job, token, step->num_heads + kv_head), key, step, step->positions[token]);
    const float *from = state_at(job, token, step->num_heads + step->num_kv_heads + kv_head);
    memcpy(value, from, step->head_dim * sizeof *value);
}

/* ---- one query a head -------------------------------------------------------------------------------------------- */

enum { MAX_GROUP = 4, MAX_VECS = 128 / LANES };

struct few { /* up to MAX_GROUP queries of one head, and what is known of their softmax; lives in registers */
    vec queries[MAX_GROUP][MAX_VECS], out[MAX_GROUP][MAX_VECS];
    float running_max[MAX_GROUP], total[MAX_GROUP];
    float scores[MAX_GROUP][KEY_BLOCK];
};

INLINE void prefetch(const float *row, const int dim) {
    for (int i = 0; i < dim; i += 16) __builtin_prefetch(row + i);
}

INLINE void score_keys(struct few *few, const int group, const int dim, const struct keys *keys, int64_t values) {
    for (int i = 0; i < keys->count; i++) {
        const float *key = keys->rows[i];
        prefetch(key + values, dim);
        vec dots[MAX_GROUP];
        for (int g = 0; g < group; g++) dots[g] = few->queries[g][0] * load(key);
        for (int v = 1; v < dim / LANES; v++)
            for (int g = 0; g < group; g++) dots[g] += few->queries[g][v] * load(key + v * LANES);
        for (int g = 0; g < group; g++) few->scores[g][i] = sum(dots[g]);
    }
    for (int g = 0; g < group; g++)
        for (int i = keys->count; i < KEY_BLOCK; i++) few->scores[g][i] = -INFINITY;
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

INLINE void add_values(struct few *few, const int group, const int dim, const struct keys *keys, int64_t values,
                       const struct keys *next) {
    for (int i = 0; i < keys->count; i++) {
        if (i < next->count) prefetch(next->rows[i], dim);
        for (int v = 0; v < dim / LANES; v++) {
            const vec value = load(keys->rows[i] + values + v * LANES);
            for (int g = 0; g < group; g++) few->out[g][v] += splat(few->scores[g][i]) * value;
        }
    }
}

/* Attends with `group` queries [group][dim], already rotated and scaled, to the first num_keys keys of their KV head. */
INLINE void attend_few(const int group, const int dim, const struct head *head, int64_t num_keys, const float *queries,
                       float *out) {
    const int64_t values = value_offset(head->step);
    struct keys blocks[2];
    struct few few;
    for (int g = 0; g < group; g++) {
        few.running_max[g] = -INFINITY;
        few.total[g] = 0.0f;
        for (int v = 0; v < dim / LANES; v++) {
            few.queries[g][v] = load(queries + g * dim + v * LANES);
            few.out[g][v] = splat(0.0f);
        }
    }
    locate(head, 0, num_keys, &blocks[0]);
    for (int64_t start = 0, now = 0; start < num_keys; start += KEY_BLOCK, now = !now) {
        locate(head, start + KEY_BLOCK, num_keys, &blocks[!now]);
        score_keys(&few, group, dim, &blocks[now], values);
        for (int g = 0; g < group; g++) {
            const vec shrink = weigh(few.scores[g], &few.running_max[g], &few.total[g]);
            for (int v = 0; v < dim / LANES; v++) few.out[g][v] *= shrink;
        }
        add_values(&few, group, dim, &blocks[now], values, &blocks[!now]);
    }
    for (int g = 0; g < group; g++)
        for (int v = 0; v < dim / LANES; v++) store(out + g * dim + v * LANES, few.out[g][v] / few.total[g]);
}

/* Any head_dim, one query. */
static void attend_plain(const struct head *head, int64_t num_keys, const float *query, float *out) {
    const int64_t dim = head->step->head_dim, values = value_offset(head->step);
    float running_max = -INFINITY, total = 0.0f;
    memset(out, 0, dim * sizeof *out);
    for (int64_t i = 0; i < num_keys; i++) {
        struct keys keys;
        locate(head, i, i + 1, &keys);
        const float *key = keys.rows[0];
        float score = 0.0f;
        for (int64_t d = 0; d < dim; d++) score += query[d] * key[d];
        const float new_max = max_of(running_max, score);
        const float shrink = expf(running_max - new_max), weight = expf(score - new_max);
        for (int64_t d = 0; d < dim; d++) out[d] = out[d] * shrink + weight * key[values + d];
        total = total * shrink + weight;
        running_max = new_max;
    }
    for (int64_t d = 0; d < dim; d++) out[d] /= total;
}

#define FEW(dim) \
    switch (group) { \
        case 1: attend_few(1, dim, head, num_keys, queries, out); return; \
        case 2: attend_few(2, dim, head, num_keys, queries, out); return; \
        case 3: attend_few(3, dim, head, num_keys, queries, out); return; \
        default: attend_few(4, dim, head, num_keys, queries, out); return; \
    }

/* Up to four queries of one group, so that a key is read once for them. */
static void attend_group(int64_t group, const struct head *head, int64_t num_keys, const float *queries, float *out) {
    const int64_t dim = head->step->head_dim;
    if (dim == 64) FEW(64)
    if (dim == 128) FEW(128)
    for (int64_t g = 0; g < group; g++) attend_plain(head, num_keys, queries + g * dim, out + g * dim);
}

/* Rotates and scales one query head. */
INLINE void prepare_query(const struct attention *job, int64_t token, int64_t query_head, float *to) {
    const struct attention_step *step = job->step;
    rotate(state_at(job, token, query_head), to, step, step->positions[token]);
    const float scale = 1.0f / sqrtf((float)step->head_dim);
    for (int64_t i = 0; i < step->head_dim; i++) to[i] *= scale;
}

static void attend_token(const struct attention *job, const struct head *head, int64_t token) {
    const struct attention_step *step = job->step;
    const int64_t group = group_size(step), dim = step->head_dim;
    float queries[4 * MAX_HEAD_DIM];
    for (int64_t g = 0; g < group; g += 4) {
        const int64_t count = min_of(4, group - g), first = head->kv_head * group + g;
        for (int64_t i = 0; i < count; i++) prepare_query(job, token, first + i, queries + i * dim);
        float *out = job->out + (token * step->num_heads + first) * dim;
        attend_group(count, head, step->positions[token] + 1, queries, out);
    }
}

static void decode_part(const void *attention, int64_t part) {
    const struct attention *job = attention;
    const struct attention_step *step = job->step;
    const int64_t request = part / step->num_kv_heads, kv_head = part % step->num_kv_heads;
    const struct head head = {step, step->page_table + request * step->table_width, job->layer, kv_head};
    store_kv(job, request, kv_head);
    attend_token(job, &head, request);
}

/* ---- many queries a head ----------------------------------------------------------------------------------------- */

struct block { /* queries [num_rows][dim], row = token * group + head of the group, and what is known of their softmax */
    float queries[QUERY_FLOATS], out[QUERY_FLOATS];
    float running_max[QUERY_FLOATS / LANES], total[QUERY_FLOATS / LANES];
    float keys[KEY_BLOCK * MAX_TILED_DIM];   /* [panel][dim][PANEL] */
    float values[KEY_BLOCK * MAX_TILED_DIM]; /* [KEY_BLOCK][dim] */
};

static void gather(const struct head *head, int64_t start, int64_t num_keys, struct block *block) {
    const int64_t dim = head->step->head_dim, values = value_offset(head->step);
    struct keys keys;
    locate(head, start, num_keys, &keys);
    for (int64_t i = 0; i < KEY_BLOCK; i++) {
        float *key = block->keys + i / PANEL * PANEL * dim + i % PANEL, *value = block->values + i * dim;
        if (i < keys.count) {
            for (int64_t d = 0; d < dim; d++) key[d * PANEL] = keys.rows[i][d];
            memcpy(value, keys.rows[i] + values, dim * sizeof *value);
        } else { /* masked, but 0 * garbage might be NaN */
            for (int64_t d = 0; d < dim; d++) key[d * PANEL] = 0.0f;
            memset(value, 0, dim * sizeof *value);
        }
    }
}

static void attend_rows(struct block *block, int64_t row, int rows, int64_t group, int64_t dim, int64_t visible_of_row_0) {
    float scores[TILE_ROWS * KEY_BLOCK];
    const float *queries = block->queries + row * dim;
    float *out = block->out + row * dim;
    for (int64_t panel = 0; panel < KEY_BLOCK / PANEL; panel++)
        tile_rows(rows, queries, dim, block->keys + panel * PANEL * dim, PANEL, dim, scores + panel * PANEL, KEY_BLOCK, 0);
    for (int r = 0; r < rows; r++) {
        float *row_scores = scores + r * KEY_BLOCK, *row_out = out + r * dim;
        for (int64_t i = visible_of_row_0 + (row + r) / group; i < KEY_BLOCK; i++) row_scores[i] = -INFINITY;
        const vec shrink = weigh(row_scores, block->running_max + row + r, block->total + row + r);
        for (int64_t d = 0; d < dim; d += LANES) store(row_out + d, load(row_out + d) * shrink);
    }
    for (int64_t d = 0; d < dim; d += PANEL)
        tile_rows(rows, scores, KEY_BLOCK, block->values + d, dim, KEY_BLOCK, out + d, dim, 1);
}

static void attend_block(const struct attention *job, const struct head *head, int64_t first_token, int64_t last_token) {
    const struct attention_step *step = job->step;
    const int64_t group = group_size(step), dim = step->head_dim, num_rows = (last_token - first_token) * group;
    const int64_t first_position = step->positions[first_token], num_keys = step->positions[last_token - 1] + 1;
    struct block block;
    for (int64_t row = 0; row < num_rows; row++) {
        prepare_query(job, first_token + row / group, head->kv_head * group + row % group, block.queries + row * dim);
        block.running_max[row] = -INFINITY;
        block.total[row] = 0.0f;
    }
    memset(block.out, 0, num_rows * dim * sizeof(float));
    for (int64_t start = 0; start < num_keys; start += KEY_BLOCK) {
        gather(head, start, num_keys, &block);
        /* rows before the block's first key see none of it */
        int64_t row = start > first_position ? (start - first_position) * group : 0;
        for (; row < num_rows; row += TILE_ROWS)
            attend_rows(&block, row, (int)min_of(TILE_ROWS, num_rows - row), group, dim, first_position + 1 - start);
    }
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t token = first_token + row / group, query_head = head->kv_head * group + row % group;
        float *out = job->out + (token * step->num_heads + query_head) * dim;
        for (int64_t d = 0; d < dim; d++) out[d] = block.out[row * dim + d] / block.total[row];
    }
}

static int64_t tokens_a_block(const struct attention_step *step) {
    return QUERY_FLOATS / (step->head_dim * group_size(step));
}

static int can_tile(const struct attention_step *step) {
    return step->head_dim % PANEL == 0 && step->head_dim <= MAX_TILED_DIM && tokens_a_block(step) > 0;
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
    const struct head head = {step, pages, job->attention.layer, index % step->num_kv_heads};
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
