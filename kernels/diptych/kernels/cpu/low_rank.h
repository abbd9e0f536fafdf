/* y[tokens] += (x[tokens] * transpose(a)) * transpose(b), for some rows of x and y: what a low-rank adapter adds.
 *
 * a stays row by row: it has few rows, and panels of them would be mostly padding. b is packed as in linear.h. A
 * token's sums have one order, whatever the number of tokens: its result is the same, to the bit, in any batch. */
#pragma once

#include "linear.h"

struct low_rank {
    const float *x, *a, *b;
    const int64_t *tokens; /* rows of x and y */
    float *y, *inner;      /* inner: [num_tokens][rank] */
    int64_t num_tokens, num_columns, rank, num_rows, stride; /* stride: of y's rows */
};

enum { DOTS = 8, TOKENS_A_PART = 16, PANELS_A_PART = 8 };

/* Products of x with `count` rows of a, one pass over x. */
INLINE void dots(const int count, const float *x, const float *a, int64_t width, float *out) {
    vec sums[DOTS];
    for (int r = 0; r < count; r++) sums[r] = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const vec value = load(x + i);
        for (int r = 0; r < count; r++) sums[r] = multiply_add(value, load(a + r * width + i), sums[r]);
    }
    for (int r = 0; r < count; r++) {
        float rest = 0.0f;
        for (int64_t j = i; j < width; j++) rest += x[j] * a[r * width + j];
        out[r] = sum(sums[r]) + rest;
    }
}

/* inner = x[tokens] * transpose(a), for some tokens. */
static void shrink_part(const void *low_rank, int64_t part) {
    const struct low_rank *job = low_rank;
    const int64_t width = job->num_columns, last = min_of((part + 1) * TOKENS_A_PART, job->num_tokens);
    for (int64_t i = part * TOKENS_A_PART; i < last; i++) {
        const float *x = job->x + job->tokens[i] * width;
        float *inner = job->inner + i * job->rank;
        int64_t r = 0;
        for (; r + DOTS <= job->rank; r += DOTS) dots(DOTS, x, job->a + r * width, width, inner + r);
        for (; r < job->rank; r++) dots(1, x, job->a + r * width, width, inner + r);
    }
}

/* y[tokens] += inner * transpose(b), for some panels of b. */
static void expand_part(const void *low_rank, int64_t part) {
    const struct low_rank *job = low_rank;
    const int64_t last = min_of((part + 1) * PANELS_A_PART * PANEL, job->num_rows);
    for (int64_t first = part * PANELS_A_PART * PANEL; first < last; first += PANEL) {
        const int64_t width = min_of(PANEL, last - first);
        for (int64_t i = 0; i < job->num_tokens; i++) {
            float sums[PANEL], *y = job->y + job->tokens[i] * job->stride + first;
            tile(1, job->inner + i * job->rank, 0, job->b + first * job->rank, PANEL, job->rank, sums, PANEL, 0);
            for (int64_t row = 0; row < width; row++) y[row] += sums[row];
        }
    }
}

static void add_low_rank(const struct low_rank *job) {
    parallel(shrink_part, job, ceil_div(job->num_tokens, TOKENS_A_PART));
    parallel(expand_part, job, ceil_div(job->num_rows, PANELS_A_PART * PANEL));
}
