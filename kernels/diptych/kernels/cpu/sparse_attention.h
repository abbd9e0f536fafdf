/* Attention of each token to the keys that were chosen for it, or to all that it sees while these are not more.
 *
 * Chosen keys are walked in their order, as if nothing lay between them. A token is computed by itself, in parts of its
 * heads: tokens choose otherwise, and share no block of keys. */
#pragma once

#include "index_choice.h"
#include "paged_attention.h"

struct sparse {
    struct attention attention; /* of latents, which have one KV head */
    const int32_t *chosen;      /* as in `struct choice` */
    int64_t num_kept, heads_a_part, parts_a_token;
};

static void rotate_index_part(const void *index, int64_t part) {
    const struct attention *job = index;
    const int64_t num_tokens = job->step->first_tokens[job->step->batch_size];
    rotate_index(job, part * STORE_TOKENS, min_of((part + 1) * STORE_TOKENS, num_tokens));
}

/* Some heads of one token as rows of a tile, against `num_keys` keys. */
static void attend_heads_in_tiles(const struct attention *job, const struct head *head, int64_t token,
                                  int64_t first_head, int64_t last_head, int64_t num_keys) {
    const int64_t dim = job->step->head_dim, value_dim = job->step->value_dim, num_rows = last_head - first_head;
    struct block block;
    for (int64_t row = 0; row < num_rows; row++) {
        prepare_query(job, token, first_head + row, block.queries + row * dim);
        memset(block.out + row * value_dim, 0, value_dim * sizeof(float));
        begin_softmax(job->layer, first_head + row, block.running_max + row, block.total + row);
    }
    for (int64_t start = 0; start < num_keys; start += KEY_BLOCK) {
        gather(head, start, 0, num_keys, &block);
        for (int64_t row = 0; row < num_rows; row += TILE_ROWS)
            attend_rows(head, &block, row, (int)min_of(TILE_ROWS, num_rows - row), num_keys - 1, NULL, start);
    }
    float *out = job->out + (token * job->step->num_heads + first_head) * value_dim;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t d = row * value_dim; d < (row + 1) * value_dim; d++) out[d] = block.out[d] / block.total[row];
}

static void sparse_part(const void *sparse, int64_t part) {
    const struct sparse *job = sparse;
    const struct attention_step *step = job->attention.step;
    const int64_t token = part / job->parts_a_token, first_head = part % job->parts_a_token * job->heads_a_part;
    const int64_t last_head = min_of(first_head + job->heads_a_part, step->num_heads);
    int64_t request = 0;
    while (step->first_tokens[request + 1] <= token) request++;
    const int64_t num_seen = step->positions[token] + 1;
    const int32_t *chosen = num_seen > job->num_kept ? job->chosen + token * job->num_kept : NULL;
    const struct head head = {step, job->attention.layer, step->page_table + request * step->table_width, 0, chosen};
    const int64_t num_keys = min_of(num_seen, job->num_kept);
    if (has_panels(step)) attend_heads_in_tiles(&job->attention, &head, token, first_head, last_head, num_keys);
    else attend_heads(&job->attention, &head, token, first_head, last_head, 0, num_keys);
}

/* Cuts the heads of a token into equal parts that each fit into a tile. */
static void cut_heads(struct sparse *job) {
    const struct attention_step *step = job->attention.step;
    const int64_t most = has_panels(step) ? QUERY_FLOATS / step->head_dim : MAX_GROUP;
    job->heads_a_part = ceil_div(step->num_heads, ceil_div(step->num_heads, most));
    job->parts_a_token = ceil_div(step->num_heads, job->heads_a_part);
}
