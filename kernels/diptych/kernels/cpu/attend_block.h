/* Attention of many tokens: compute-bound, so scores and sums are matrix tiles over blocks of queries and keys.
 *
 * A running maximum makes one pass over the keys enough (Milakov and Gimelshein, 2018; Dao et al., FlashAttention,
 * 2022). Blocks of keys are the same for every query, so a token's result does not depend on the chunk it came in. */
#pragma once

#include "paged_kv.h"

enum {
    QUERY_FLOATS = 16 * 1024, /* of a block of queries, and of their results */
    MAX_TILED_DIM = 576,
};

/* Row = token * group size + head of the group. */
struct block {
    float queries[QUERY_FLOATS], out[QUERY_FLOATS]; /* [num_rows][dim], [num_rows][value_dim] */
    float running_max[QUERY_FLOATS / LANES], total[QUERY_FLOATS / LANES];
    float keys[KEY_BLOCK * MAX_TILED_DIM];   /* [panel][dim][PANEL] */
    float values[KEY_BLOCK * MAX_TILED_DIM]; /* [KEY_BLOCK][value_dim] */
    float widened[KEY_BLOCK * 2 * MAX_TILED_DIM];
};

/* Lays out a block of keys as panels for `tile`, and its values in order. No row sees a key before `first`. */
static void gather(const struct head *head, int64_t start, int64_t first, int64_t num_keys, struct block *block) {
    const int64_t dim = head->step->head_dim, value_dim = head->step->value_dim;
    struct keys located;
    struct wide_keys keys;
    locate(head, start, num_keys, &located);
    as_floats(head->step, &located, block->widened, &keys);
    lay_out_panels(&keys, dim, block->keys);
    for (int64_t i = 0; i < KEY_BLOCK; i++) {
        float *value = block->values + i * value_dim;
        if (start + i >= first && i < keys.count) memcpy(value, keys.rows[i] + keys.values, value_dim * sizeof *value);
        else memset(value, 0, value_dim * sizeof *value); /* masked, but 0 * garbage might be NaN */
    }
}

/* Up to TILE_ROWS rows against the block of keys from position `start` on. Each row sees one of them at least. `ends`:
 * see `seen_ends`, of the tokens from that of row 0 on. */
INLINE void attend_rows(const struct head *head, struct block *block, int64_t row, int rows, int64_t first_position,
                        const int64_t *ends, int64_t start) {
    const int64_t group = group_size(head->step), dim = head->step->head_dim, value_dim = head->step->value_dim;
    float scores[TILE_ROWS * KEY_BLOCK];
    const float *queries = block->queries + row * dim;
    float *out = block->out + row * value_dim;
    for (int64_t key = 0; key < KEY_BLOCK; key += PANEL)
        tile_rows(rows, queries, dim, block->keys + key * dim, PANEL, dim, scores + key, KEY_BLOCK, 0);
    for (int r = 0; r < rows; r++) {
        float *row_scores = scores + r * KEY_BLOCK, *row_out = out + r * value_dim;
        const int64_t token = (row + r) / group, position = first_position + token;
        const int64_t end = ends ? ends[token] : position + 1;
        cap_scores(row_scores, head->layer->softcap);
        for (int64_t i = 0; i < first_key(head->layer, position) - start; i++) row_scores[i] = -INFINITY;
        for (int64_t i = end - start; i < KEY_BLOCK; i++) row_scores[i] = -INFINITY;
        const vec shrink = weigh(row_scores, block->running_max + row + r, block->total + row + r);
        for (int64_t d = 0; d < value_dim; d += LANES) store(row_out + d, load(row_out + d) * shrink);
    }
    for (int64_t d = 0; d < value_dim; d += PANEL)
        tile_rows(rows, scores, KEY_BLOCK, block->values + d, value_dim, KEY_BLOCK, out + d, value_dim, 1);
}

/* The first of a block's tokens that sees the key `start` or one behind it; there is one. */
static int64_t first_seeing(int64_t first_position, const int64_t *ends, int64_t start) {
    if (!ends) return start > first_position ? start - first_position : 0;
    int64_t token = 0;
    while (ends[token] <= start) token++;
    return token;
}

/* The tokens [first_token, last_token) of a request, all query heads of one KV head. */
static void attend_block(const struct attention *job, const struct head *head, int64_t first_token,
                         int64_t last_token) {
    const struct attention_step *step = job->step;
    const int64_t group = group_size(step), dim = step->head_dim, value_dim = step->value_dim;
    const int64_t num_rows = (last_token - first_token) * group;
    const int64_t first_position = step->positions[first_token], num_keys = seen_end(step, last_token - 1);
    const int64_t *ends = step->seen_ends ? step->seen_ends + first_token : NULL;
    struct block block;
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t query_head = head->kv_head * group + row % group;
        prepare_query(job, first_token + row / group, query_head, block.queries + row * dim);
        memset(block.out + row * value_dim, 0, value_dim * sizeof(float));
        begin_softmax(job->layer, query_head, block.running_max + row, block.total + row);
    }
    const int64_t first = first_key(job->layer, first_position);
    for (int64_t start = block_of(first); start < num_keys; start += KEY_BLOCK) {
        gather(head, start, first, num_keys, &block);
        /* rows before the block's first key, or with a window or chunk that begins after its last, see none of it */
        int64_t row = first_seeing(first_position, ends, start) * group;
        const int64_t unseen = seen_until(job->layer, start + KEY_BLOCK - 1);
        const int64_t end = min_of(num_rows, (unseen - first_position) * group);
        for (; row < end; row += TILE_ROWS) {
            const int rows = (int)min_of(TILE_ROWS, end - row);
            if (ends) attend_rows(head, &block, row, rows, first_position, ends, start);
            else attend_rows(head, &block, row, rows, first_position, NULL, start); /* which is compiled by itself */
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t token = first_token + row / group, query_head = head->kv_head * group + row % group;
        float *out = job->out + (token * step->num_heads + query_head) * value_dim;
        for (int64_t d = 0; d < value_dim; d++) out[d] = block.out[row * value_dim + d] / block.total[row];
    }
}

static int64_t tokens_a_block(const struct attention_step *step) {
    return QUERY_FLOATS / (step->head_dim * group_size(step));
}

static int has_panels(const struct attention_step *step) {
    return step->head_dim % PANEL == 0 && step->value_dim % PANEL == 0 && step->head_dim <= MAX_TILED_DIM;
}

static int can_tile(const struct attention_step *step) { return has_panels(step) && tokens_a_block(step) > 0; }
