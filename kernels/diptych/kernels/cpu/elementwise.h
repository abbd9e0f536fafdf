/* What happens between the multiplications of a layer, each in one pass over its rows. */
#pragma once

#include "simd.h"
#include "threads.h"

enum { ROWS_A_PART = 16 };

struct rows {
    float *x;           /* [num_rows][width] */
    const float *other; /* delta of add_rms_norm, may be NULL */
    const float *weight;
    float *out;
    int64_t num_rows, width;
    float eps;
};

static void for_all_rows(part_function run, const struct rows *job) {
    parallel(run, job, (job->num_rows + ROWS_A_PART - 1) / ROWS_A_PART);
}

INLINE float add_and_sum_squares(float *x, const float *delta, int64_t width) {
    vec squares = splat(0.0f);
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vec value = load(x + i);
        if (delta) store(x + i, value += load(delta + i));
        squares = multiply_add(value, value, squares);
    }
    for (; i < width; i++) {
        if (delta) x[i] += delta[i];
        rest += x[i] * x[i];
    }
    return sum(squares) + rest;
}

static void rms_norm_part(const void *rows, int64_t part) {
    const struct rows *job = rows;
    for (int64_t row = part * ROWS_A_PART; row < job->num_rows && row < (part + 1) * ROWS_A_PART; row++) {
        float *x = job->x + row * job->width, *out = job->out + row * job->width;
        const float *delta = job->other ? job->other + row * job->width : NULL;
        const float mean = add_and_sum_squares(x, delta, job->width) / (float)job->width;
        const float scale = 1.0f / __builtin_sqrtf(mean + job->eps);
        for (int64_t i = 0; i < job->width; i++) out[i] = job->weight[i] * (x[i] * scale);
    }
}

static void silu_and_mul_part(const void *rows, int64_t part) {
    const struct rows *job = rows;
    const int64_t width = job->width;
    for (int64_t row = part * ROWS_A_PART; row < job->num_rows && row < (part + 1) * ROWS_A_PART; row++) {
        const float *gate = job->x + row * 2 * width, *up = gate + width;
        float *out = job->out + row * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const vec g = load(gate + i);
            store(out + i, g / (1.0f + vec_exp(-g)) * load(up + i));
        }
        for (; i < width; i++) out[i] = gate[i] / (1.0f + __builtin_expf(-gate[i])) * up[i];
    }
}
