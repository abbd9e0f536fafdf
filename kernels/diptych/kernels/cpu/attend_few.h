/* Attention of one token: memory-bound, so a key is read once for up to four query heads that share it.
 *
 * Sums run in the same order as in attend_block.h (a score over the dimensions, a result over the keys), so a token has
 * the same bits computed alone and computed in a chunk. head_dim is a compile-time constant for the usual sizes: the
 * sums stay in registers. Prefetches run ahead, because a KV head's rows are strided and pages scattered. */
#pragma once

#include "paged_kv.h"

enum { MAX_GROUP = 4 };

struct few { /* up to MAX_GROUP queries of one head: what is known of their softmax and results */
    vec out[MAX_GROUP][MAX_HEAD_DIM / LANES];
    float running_max[MAX_GROUP], total[MAX_GROUP];
    float scores[MAX_GROUP][KEY_BLOCK];
};

INLINE void prefetch(const void *row, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch((const char *)row + i);
}

/* LANES keys at a time, transposed in registers. */
INLINE void score_keys(struct few *few, const int group, const int64_t dim, const float *queries,
                       const struct wide_keys *keys) {
    for (int first = 0; first < keys->count; first += LANES) {
        vec dots[MAX_GROUP];
        for (int g = 0; g < group; g++) dots[g] = splat(0.0f);
        for (int64_t d = 0; d < dim; d += 4) {
            vec columns[4];
            if (d / 4 < LANES) prefetch(keys->rows[first + d / 4] + keys->values, dim * 4);
            load_columns(keys->rows + first, d, columns);
            for (int c = 0; c < 4; c++)
                for (int g = 0; g < group; g++)
                    dots[g] = multiply_add(splat(queries[g * dim + d + c]), columns[c], dots[g]);
        }
        for (int g = 0; g < group; g++) store(few->scores[g] + first, dots[g]);
    }
}

/* Of a block of scores, only [first, last) are the token's. */
INLINE void mask_scores(float *scores, int64_t first, int64_t last) {
    for (int64_t i = 0; i < first; i++) scores[i] = -INFINITY;
    for (int64_t i = last; i < KEY_BLOCK; i++) scores[i] = -INFINITY;
}

/* Narrow keys and values are both read before the next scores, floats when they are needed. */
INLINE void prefetch_next(const struct attention_step *step, const int64_t dim, const char *row) {
    if (step->kv_type == KV_FLOAT32) {
        prefetch(row, dim * 4);
    } else {
        prefetch(row, row_bytes(step));
        prefetch(row + value_bytes(step), row_bytes(step));
    }
}

/* Those of the keys before `first` are not the token's: their weights are 0, but 0 * garbage might be NaN. */
INLINE void add_values(struct few *few, const int group, const int64_t dim, const int64_t value_dim, int64_t first,
                       const struct wide_keys *keys, const struct attention_step *step, const struct keys *next) {
    for (int i = 0; i < keys->count; i++) {
        if (i < next->count) prefetch_next(step, dim, next->rows[i]);
        if (i < first) continue;
        for (int64_t v = 0; v < value_dim / LANES; v++) {
            const vec value = load(keys->rows[i] + keys->values + v * LANES);
            for (int g = 0; g < group; g++)
                few->out[g][v] = multiply_add(splat(few->scores[g][i]), value, few->out[g][v]);
        }
    }
}

/* Attends with `group` queries [group][dim], rotated and scaled, to the keys [first, num_keys) of their KV head. They
 * are of the heads from `query_head` on. */
INLINE void attend_few(const int group, const int64_t dim, const int64_t value_dim, const struct head *head,
                       int64_t query_head, int64_t first, int64_t num_keys, const float *queries, float *out) {
    struct keys blocks[2];
    struct wide_keys keys;
    float buffer[head->step->kv_type == KV_FLOAT32 ? 1 : KEY_BLOCK * 2 * dim];
    struct few few;
    for (int g = 0; g < group; g++) {
        begin_softmax(head->layer, query_head + g, &few.running_max[g], &few.total[g]);
        for (int64_t v = 0; v < value_dim / LANES; v++) few.out[g][v] = splat(0.0f);
    }
    locate(head, block_of(first), num_keys, &blocks[0]);
    for (int64_t start = block_of(first), now = 0; start < num_keys; start += KEY_BLOCK, now = !now) {
        locate(head, start + KEY_BLOCK, num_keys, &blocks[!now]);
        as_floats(head->step, &blocks[now], buffer, &keys);
        score_keys(&few, group, dim, queries, &keys);
        for (int g = 0; g < group; g++) {
            cap_scores(few.scores[g], head->layer->softcap);
            mask_scores(few.scores[g], first - start, keys.count);
            const vec shrink = weigh(few.scores[g], &few.running_max[g], &few.total[g]);
            for (int64_t v = 0; v < value_dim / LANES; v++) few.out[g][v] *= shrink;
        }
        add_values(&few, group, dim, value_dim, first - start, &keys, head->step, &blocks[!now]);
    }
    for (int g = 0; g < group; g++)
        for (int64_t v = 0; v < value_dim / LANES; v++)
            store(out + g * value_dim + v * LANES, few.out[g][v] / few.total[g]);
}

/* Any head_dim, one query, one key at a time. */
static void attend_plain(const struct head *head, int64_t query_head, int64_t first, int64_t num_keys,
                         const float *query, float *out) {
    const int64_t dim = head->step->head_dim, value_dim = head->step->value_dim;
    float buffer[2 * MAX_HEAD_DIM];
    float running_max, total;
    begin_softmax(head->layer, query_head, &running_max, &total);
    memset(out, 0, value_dim * sizeof *out);
    const float softcap = head->layer->softcap;
    for (int64_t i = first; i < num_keys; i++) {
        struct keys located;
        struct wide_keys keys;
        locate(head, i, i + 1, &located);
        as_floats(head->step, &located, buffer, &keys);
        const float *key = keys.rows[0];
        float score = 0.0f;
        for (int64_t d = 0; d < dim; d++) score += query[d] * key[d];
        if (softcap != 0.0f) score = softcap * tanhf(score / softcap);
        const float new_max = max_of(running_max, score);
        const float shrink = expf(running_max - new_max), weight = expf(score - new_max);
        for (int64_t d = 0; d < value_dim; d++) out[d] = out[d] * shrink + weight * key[keys.values + d];
        total = total * shrink + weight;
        running_max = new_max;
    }
    for (int64_t d = 0; d < value_dim; d++) out[d] /= total;
}

#define FEW(dim, value_dim) \
    switch (group) { \
        case 1: attend_few(1, dim, value_dim, head, query_head, first, num_keys, queries, out); return; \
        case 2: attend_few(2, dim, value_dim, head, query_head, first, num_keys, queries, out); return; \
        case 3: attend_few(3, dim, value_dim, head, query_head, first, num_keys, queries, out); return; \
        default: attend_few(4, dim, value_dim, head, query_head, first, num_keys, queries, out); return; \
    }

/* Up to four queries of one group, so that a key is read once for them. */
static void attend_group(int64_t group, const struct head *head, int64_t query_head, int64_t first, int64_t num_keys,
                         const float *queries, float *out) {
    const int64_t dim = head->step->head_dim, value_dim = head->step->value_dim;
    if (dim == value_dim) {
        if (dim == 64) FEW(64, 64)
        if (dim == 96) FEW(96, 96)
        if (dim == 128) FEW(128, 128)
        if (dim == 256) FEW(256, 256)
    }
    if (dim == 576 && value_dim == 512) FEW(576, 512)
    if (dim % LANES == 0 && value_dim % LANES == 0) FEW(dim, value_dim)
    for (int64_t g = 0; g < group; g++)
        attend_plain(head, query_head + g, first, num_keys, queries + g * dim, out + g * value_dim);
}

/* The query heads [first_head, last_head) of one KV head and one token against the keys [first, num_keys). */
static void attend_heads(const struct attention *job, const struct head *head, int64_t token, int64_t first_head,
                         int64_t last_head, int64_t first, int64_t num_keys) {
    const struct attention_step *step = job->step;
    float queries[MAX_GROUP * MAX_HEAD_DIM];
    for (int64_t query_head = first_head; query_head < last_head; query_head += MAX_GROUP) {
        const int64_t count = min_of(MAX_GROUP, last_head - query_head);
        for (int64_t i = 0; i < count; i++) prepare_query(job, token, query_head + i, queries + i * step->head_dim);
        float *out = job->out + (token * step->num_heads + query_head) * step->value_dim;
        attend_group(count, head, query_head, first, num_keys, queries, out);
    }
}

/* All query heads of one KV head and one token, which attends to what it sees: see `seen_ends`. */
static void attend_token(const struct attention *job, const struct head *head, int64_t token) {
    const int64_t group = group_size(job->step), first_head = head->kv_head * group;
    const int64_t position = job->step->positions[token];
    const int64_t first = first_key(job->layer, position), end = seen_end(job->step, token);
    attend_heads(job, head, token, first_head, first_head + group, first, end);
}
