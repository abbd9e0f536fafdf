/* The CPU kernels as one library of plain C functions: float32, no Python ABI, called through ctypes. */

#include <stdlib.h>

#include "delta_rule.h"
#include "elementwise.h"
#include "linear.h"
#include "logprobs.h"
#include "low_rank.h"
#include "page_pack.h"
#include "paged_attention.h"
#include "quantized_linear.h"
#include "recurrences.h"
#include "sampling.h"
#include "sparse_attention.h"
#include "threads.h"
#include "token_mask.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT int diptych_set_num_threads(int num_threads) { return set_num_threads(num_threads); }

/* Rows of a packed weight come in multiples of this. */
EXPORT int64_t diptych_panel(void) { return PANEL; }

EXPORT void diptych_pack(const float *w, int64_t num_rows, int64_t num_columns, float *packed) {
    pack(w, num_rows, num_columns, packed);
}

EXPORT void diptych_linear(const float *x, int64_t num_tokens, int64_t num_columns, const float *packed,
                           int64_t num_rows, float *y) {
    linear(x, num_tokens, num_columns, packed, num_rows, y);
}

EXPORT void diptych_use_huge_pages(float *memory, int64_t num_floats) { use_huge_pages(memory, num_floats); }

EXPORT int64_t diptych_packed_a_floats(int64_t rank, int64_t num_columns) { return packed_a_floats(rank, num_columns); }

EXPORT void diptych_pack_a(const float *a, int64_t rank, int64_t num_columns, float *packed) {
    pack_a(a, rank, num_columns, packed);
}

/* Returns 0, or -1 when memory ran out. */
EXPORT int diptych_add_low_rank(const struct low_rank *table, int64_t max_products, const int64_t *slots,
                                const int64_t *offsets, const int64_t *tokens, int64_t num_groups, const float *x,
                                float *y, int64_t num_columns, int64_t stride) {
    const struct groups groups = {slots, offsets, tokens, num_groups};
    struct low_rank_step step = {x, y, num_columns, stride, 0, NULL};
    return add_low_rank(table, max_products, &groups, &step);
}

EXPORT int64_t diptych_panel_bytes(const struct quantized *w) { return panel_bytes(w); }

/* Returns 0, or -1 when there are no kernels for this kind of codes and scales. */
EXPORT int diptych_pack_quantized(const struct quantized *w, const void *codes, const void *scales, const void *mins) {
    if (!kernel_of(w)) return -1;
    pack_quantized(w, codes, scales, mins);
    return 0;
}

EXPORT void diptych_quantized_linear(const struct quantized *w, const float *x, int64_t num_tokens, float *y,
                                     int64_t y_stride) {
    quantized_linear(w, x, num_tokens, y, y_stride);
}

EXPORT void diptych_quantized_rows(const struct quantized *w, const int64_t *ids, int64_t num_ids, float *out) {
    quantized_rows(w, ids, num_ids, out);
}

/* x += delta, unless delta is NULL; out = norm(x) * weight */
EXPORT void diptych_add_rms_norm(float *x, const float *delta, const float *weight, float eps, int64_t num_rows,
                                 int64_t width, float *out) {
    const struct rows job = {x, delta, weight, out, num_rows, width, eps};
    for_all_rows(rms_norm_part, &job);
}

EXPORT void diptych_silu_and_mul(float *gate_up, int64_t num_rows, int64_t width, float *out) {
    const struct rows job = {gate_up, NULL, NULL, out, num_rows, width, 0.0f};
    for_all_rows(silu_and_mul_part, &job);
}

EXPORT void diptych_gelu_tanh_and_mul(float *gate_up, int64_t num_rows, int64_t width, float *out) {
    const struct rows job = {gate_up, NULL, NULL, out, num_rows, width, 0.0f};
    for_all_rows(gelu_tanh_and_mul_part, &job);
}

EXPORT void diptych_clamped_swiglu(float *gate_up, int64_t num_rows, int64_t width, float alpha, float limit,
                                   float *out) {
    const struct rows job = {gate_up, NULL, NULL, out, num_rows, width, 0.0f, alpha, limit};
    for_all_rows(clamped_swiglu_part, &job);
}

EXPORT void diptych_norm_heads(float *qkv, const float *q_weight, const float *k_weight, float eps, int64_t num_rows,
                               int64_t num_heads, int64_t num_kv_heads, int64_t dim) {
    const struct head_norms job = {qkv, q_weight, k_weight, num_rows, num_heads, num_kv_heads, dim, eps};
    parallel(norm_heads_part, &job, ceil_div(num_rows, ROWS_A_PART));
}

/* x *= sigmoid(gates) */
EXPORT void diptych_mul_sigmoid(float *x, const float *gates, int64_t num_rows, int64_t width) {
    const struct rows job = {x, gates, NULL, NULL, num_rows, width, 0.0f};
    for_all_rows(mul_sigmoid_part, &job);
}

/* Returns 0, or -1 when the net is larger than the kernels know. */
EXPORT int diptych_delta_rule(const struct delta_net *net, const float *projected, float *newest, int64_t newest_stride,
                              float *kept, int64_t kept_stride, const int64_t *starts, const int64_t *slots,
                              int64_t batch_size, float *out) {
    const struct delta_step step = {net, projected, newest, newest_stride, kept, kept_stride, starts, slots, out};
    const int64_t head_channels = num_channels(net) / net->num_key_heads;
    if (net->conv_width > MAX_TAPS || head_channels * net->conv_width > MAX_CHANNELS) return -1;
    parallel(delta_part, &step, batch_size * net->num_key_heads);
    return 0;
}

EXPORT void diptych_kimi_delta(const struct recurrence *of, const float *queries, const float *keys,
                               const float *remains, const float *values, const float *betas, int64_t batch_size) {
    const struct kimi_step step = {*of, queries, keys, remains, values, betas};
    parallel(kimi_part, &step, batch_size * of->num_heads);
}

EXPORT void diptych_state_spaces(const struct recurrence *of, const float *amounts, const float *writing,
                                 const float *reading, const float *remains, int64_t batch_size) {
    const struct space_step step = {*of, amounts, writing, reading, remains};
    parallel(space_part, &step, batch_size * of->num_heads);
}

EXPORT void diptych_decode_attention(const struct attention_step *step, const struct attention_layer *layer, float *qkv,
                                     float *out) {
    const struct attention job = {step, layer, qkv, out};
    parallel(decode_part, &job, step->batch_size * step->num_kv_heads);
}

/* Returns 0, or -1 when memory ran out. */
EXPORT int diptych_extend_attention(const struct attention_step *step, const struct attention_layer *layer, float *qkv,
                                    float *out) {
    int64_t *first_blocks = malloc((size_t)(step->batch_size + 1) * sizeof *first_blocks);
    if (!first_blocks) return -1;
    const int64_t block_tokens = can_tile(step) ? tokens_a_block(step) : STORE_TOKENS;
    first_blocks[0] = 0;
    for (int64_t i = 0; i < step->batch_size; i++) {
        const int64_t num_blocks = ceil_div(step->first_tokens[i + 1] - step->first_tokens[i], block_tokens);
        first_blocks[i + 1] = first_blocks[i] + num_blocks * step->num_kv_heads;
    }
    const struct extend job = {{step, layer, qkv, out}, first_blocks, block_tokens};
    parallel(store_part, &job.attention, ceil_div(step->first_tokens[step->batch_size], STORE_TOKENS));
    parallel(extend_part, &job, first_blocks[step->batch_size]);
    free(first_blocks);
    return 0;
}

/* Stores index keys, and chooses for each token that sees more keys than `num_kept`: `chosen` [num_tokens][num_kept].
 * Returns 0, or -1 when memory ran out. */
EXPORT int diptych_choose(const struct attention_step *step, const struct attention_layer *layer, float *index,
                          int64_t num_kept, int32_t *chosen) {
    struct choice job = {.index = {step, layer, index, NULL}, .num_kept = num_kept, .chosen = chosen};
    const int64_t num_tokens = step->first_tokens[step->batch_size];
    parallel(rotate_index_part, &job.index, ceil_div(num_tokens, STORE_TOKENS));
    job.groups = malloc((size_t)(num_tokens + 1) * sizeof *job.groups);
    if (!job.groups) return -1;
    const int64_t num_groups = group_tokens(&job);
    const int result = num_groups ? choose_for_groups(&job, num_groups) : 0;
    free(job.groups);
    return result;
}

EXPORT void diptych_sparse_attention(const struct attention_step *step, const struct attention_layer *layer, float *qkv,
                                     float *out, int64_t num_kept, const int32_t *chosen) {
    struct sparse job = {.attention = {step, layer, qkv, out}, .chosen = chosen, .num_kept = num_kept};
    const int64_t num_tokens = step->first_tokens[step->batch_size];
    cut_heads(&job);
    parallel(store_part, &job.attention, ceil_div(num_tokens, STORE_TOKENS));
    parallel(sparse_part, &job, num_tokens * job.parts_a_token);
}

EXPORT void diptych_sample(const struct sampling *job) { parallel(sample_part, job, job->num_rows); }

EXPORT void diptych_logprobs(const struct logprobs *job) { parallel(logprobs_part, job, job->num_rows); }

EXPORT void diptych_forbid(const struct token_mask *job) { parallel(forbid_part, job, job->num_rows); }

EXPORT void diptych_pack_rows(const struct page_pack *pack, const struct source_pages *source, int64_t first_token,
                              int64_t first_row, int64_t num_rows, char *out) {
    pack_rows(pack, source, first_token, first_row, num_rows, out);
}

EXPORT void diptych_unpack_page(const struct page_parts *parts, char *page, char *scratch) {
    unpack_page(parts, page, scratch);
}
