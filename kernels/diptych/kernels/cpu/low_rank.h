/* y[tokens] += (x[tokens] * transpose(a)) * transpose(b): what low-rank adapters add to a matrix's product, for the
 * tokens of each adapter, all adapters of a batch in one call.
 *
 * a is packed by blocks of DOTS rows, LANES columns of each at a time, and b as in linear.h, so that one pass reads an
 * adapter in order. A token's sums have one order, whatever else is in the batch: its result is the same, to the bit. */
#pragma once

#include <stdlib.h>

#include "linear.h"

enum { DOTS = 8, TOKENS_A_PART = 16, PANELS_A_PART = 8 };

/* One product of an adapter: columns [start, start + num_rows) of y. Filled in by Python. */
struct low_rank {
    const float *a, *b;
    int64_t rank, num_rows, start;
};

/* Which tokens have which adapter: those of group g are tokens[offsets[g]] to tokens[offsets[g + 1]]. */
struct groups {
    const int64_t *slots, *offsets, *tokens;
    int64_t num_groups;
};

/* One product for one group, and how many parts of the work come before it. */
struct low_rank_job {
    const struct low_rank *product;
    const int64_t *tokens;
    int64_t num_tokens, shrink_parts, expand_parts;
    float *inner; /* [num_tokens][padded rank] */
};

struct low_rank_step {
    const float *x;
    float *y;
    int64_t num_columns, stride; /* of x's rows, of y's */
    int64_t num_jobs;
    struct low_rank_job *jobs;
};

static inline int64_t padded_rank(int64_t rank) { return ceil_div(rank, DOTS) * DOTS; }

static int64_t packed_a_floats(int64_t rank, int64_t num_columns) {
    return padded_rank(rank) * ceil_div(num_columns, LANES) * LANES;
}

static void pack_a(const float *a, int64_t rank, int64_t num_columns, float *packed) {
    for (int64_t first = 0; first < rank; first += DOTS)
        for (int64_t column = 0; column < num_columns; column += LANES)
            for (int64_t r = first; r < first + DOTS; r++)
                for (int64_t i = column; i < column + LANES; i++)
                    *packed++ = r < rank && i < num_columns ? a[r * num_columns + i] : 0.0f;
}

/* Products of x with DOTS rows of a. */
INLINE void dots(const float *x, const float *a, int64_t width, float *out) {
    vec sums[DOTS];
    for (int r = 0; r < DOTS; r++) sums[r] = splat(0.0f);
    for (int64_t i = 0; i < width; i += LANES) {
        vec value;
        if (i + LANES <= width) {
            value = load(x + i);
        } else {
            float rest[LANES] = {0};
            memcpy(rest, x + i, (width - i) * sizeof *rest);
            value = load(rest);
        }
        for (int r = 0; r < DOTS; r++) {
            sums[r] = multiply_add(value, load(a + r * LANES), sums[r]);
            __builtin_prefetch(a + r * LANES + AHEAD);
        }
        a += DOTS * LANES;
    }
    for (int r = 0; r < DOTS; r++) out[r] = sum(sums[r]);
}

/* inner = x[tokens] * transpose(a), for some tokens of a job. */
static void shrink_part(const void *low_rank_step, int64_t part) {
    const struct low_rank_step *step = low_rank_step;
    const struct low_rank_job *job = step->jobs + step->num_jobs - 1;
    while (job->shrink_parts > part) job--;
    const int64_t rank = padded_rank(job->product->rank), first = (part - job->shrink_parts) * TOKENS_A_PART;
    const int64_t block = packed_a_floats(DOTS, step->num_columns);
    for (int64_t i = first; i < min_of(first + TOKENS_A_PART, job->num_tokens); i++) {
        const float *x = step->x + job->tokens[i] * step->num_columns, *a = job->product->a;
        for (int64_t r = 0; r < rank; r += DOTS, a += block) dots(x, a, step->num_columns, job->inner + i * rank + r);
    }
}

/* y[tokens] += inner * transpose(b), for some panels of a job's b. */
static void expand_part(const void *low_rank_step, int64_t part) {
    const struct low_rank_step *step = low_rank_step;
    const struct low_rank_job *job = step->jobs + step->num_jobs - 1;
    while (job->expand_parts > part) job--;
    const struct low_rank *product = job->product;
    const int64_t begin = (part - job->expand_parts) * PANELS_A_PART * PANEL;
    const int64_t end = min_of(begin + PANELS_A_PART * PANEL, product->num_rows);
    for (int64_t first = begin; first < end; first += PANEL) {
        const float *b = product->b + first * product->rank;
        const int64_t width = min_of(PANEL, end - first);
        for (int64_t i = 0; i < job->num_tokens; i++) {
            float sums[PANEL], *y = step->y + job->tokens[i] * step->stride + product->start + first;
            tile(1, job->inner + i * padded_rank(product->rank), 0, b, PANEL, product->rank, sums, PANEL, 0);
            for (int64_t row = 0; row < width; row++) y[row] += sums[row];
        }
    }
}

/* `table` has max_products for each slot; those that it lacks have no rows. Returns 0, or -1 when memory ran out. */
static int add_low_rank(const struct low_rank *table, int64_t max_products, const struct groups *groups,
                        struct low_rank_step *step) {
    int64_t num_floats = 0, shrink_parts = 0, expand_parts = 0;
    for (int64_t g = 0; g < groups->num_groups; g++)
        for (int64_t p = 0; p < max_products; p++)
            num_floats += padded_rank(table[groups->slots[g] * max_products + p].rank) *
                          (groups->offsets[g + 1] - groups->offsets[g]);
    if (num_floats == 0) return 0; /* no adapter of this batch changes this matrix */
    float *inner = malloc(num_floats * sizeof *inner);
    step->jobs = malloc(groups->num_groups * max_products * sizeof *step->jobs);
    if (!inner || !step->jobs) return free(inner), free(step->jobs), -1;
    float *next = inner;
    for (int64_t g = 0; g < groups->num_groups; g++)
        for (int64_t p = 0; p < max_products; p++) {
            const struct low_rank *product = table + groups->slots[g] * max_products + p;
            const int64_t num_tokens = groups->offsets[g + 1] - groups->offsets[g];
            if (product->num_rows == 0) continue;
            step->jobs[step->num_jobs++] = (struct low_rank_job){
                product, groups->tokens + groups->offsets[g], num_tokens, shrink_parts, expand_parts, next};
            next += num_tokens * padded_rank(product->rank);
            shrink_parts += ceil_div(num_tokens, TOKENS_A_PART);
            expand_parts += ceil_div(product->num_rows, PANELS_A_PART * PANEL);
        }
    parallel(shrink_part, step, shrink_parts);
    parallel(expand_part, step, expand_parts);
    free(step->jobs);
    free(inner);
    return 0;
}
