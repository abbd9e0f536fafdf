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
    float alpha, limit; /* of clamped_swiglu */
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

INLINE void rms_norm_row(float *x, const float *delta, const float *weight, float eps, int64_t width, float *out) {
    const float mean = add_and_sum_squares(x, delta, width) / (float)width;
    const float scale = 1.0f / __builtin_sqrtf(mean + eps);
    for (int64_t i = 0; i < width; i++) out[i] = weight[i] * (x[i] * scale);
}

static void rms_norm_part(const void *rows, int64_t part) {
    const struct rows *job = rows;
    for (int64_t row = part * ROWS_A_PART; row < job->num_rows && row < (part + 1) * ROWS_A_PART; row++) {
        float *x = job->x + row * job->width, *out = job->out + row * job->width;
        const float *delta = job->other ? job->other + row * job->width : NULL;
        rms_norm_row(x, delta, job->weight, job->eps, job->width, out);
    }
}

struct head_norms {
    float *qkv; /* [num_rows][num_heads + 2 * num_kv_heads][dim] */
    const float *q_weight, *k_weight;
    int64_t num_rows, num_heads, num_kv_heads, dim;
    float eps;
};

static void norm_heads_part(const void *norms, int64_t part) {
    const struct head_norms *job = norms;
    const int64_t dim = job->dim, width = (job->num_heads + 2 * job->num_kv_heads) * dim;
    for (int64_t row = part * ROWS_A_PART; row < job->num_rows && row < (part + 1) * ROWS_A_PART; row++) {
        for (int64_t head = 0; head < job->num_heads + job->num_kv_heads; head++) {
            float *x = job->qkv + row * width + head * dim;
            rms_norm_row(x, NULL, head < job->num_heads ? job->q_weight : job->k_weight, job->eps, dim, x);
        }
    }
}

INLINE vec silu(vec x) { return x / (1.0f + vec_exp(-x)); }

/* x * (1 + tanh(u)) / 2 is x / (1 + exp(-2 u)) */
INLINE vec gelu_tanh(vec x) {
    const float sqrt_8_over_pi = 1.59576912f;
    return x / (1.0f + vec_exp(-sqrt_8_over_pi * (x + 0.044715f * x * x * x)));
}

INLINE vec silu_gated(const struct rows *job, vec gate, vec up) { return silu(gate) * up; }

INLINE vec gelu_tanh_gated(const struct rows *job, vec gate, vec up) { return gelu_tanh(gate) * up; }

/* gpt-oss's: gates are clamped above, ups on both sides */
INLINE vec clamped_swiglu(const struct rows *job, vec gate, vec up) {
    const vec limit = splat(job->limit), limited = -vec_max(-gate, -limit);
    const vec beside = -vec_max(-vec_max(up, -limit), -limit) + 1.0f;
    return limited / (1.0f + vec_exp(-job->alpha * limited)) * beside;
}

INLINE void activate_part(vec (*const gated)(const struct rows *, vec, vec), const struct rows *job, int64_t part) {
    const int64_t width = job->width;
    for (int64_t row = part * ROWS_A_PART; row < job->num_rows && row < (part + 1) * ROWS_A_PART; row++) {
        const float *gate = job->x + row * 2 * width, *up = gate + width;
        float *out = job->out + row * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(out + i, gated(job, load(gate + i), load(up + i)));
        for (; i < width; i++) out[i] = gated(job, splat(gate[i]), splat(up[i]))[0];
    }
}

static void mul_sigmoid_part(const void *rows, int64_t part) {
    const struct rows *job = rows;
    const int64_t end = (part + 1) * ROWS_A_PART < job->num_rows ? (part + 1) * ROWS_A_PART : job->num_rows;
    float *x = job->x + part * ROWS_A_PART * job->width;
    const float *gates = job->other + part * ROWS_A_PART * job->width;
    const int64_t size = (end - part * ROWS_A_PART) * job->width;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(x + i, load(x + i) / (1.0f + vec_exp(-load(gates + i))));
    for (; i < size; i++) x[i] /= 1.0f + vec_exp(splat(-gates[i]))[0];
}

static void silu_and_mul_part(const void *rows, int64_t part) { activate_part(silu_gated, rows, part); }

static void gelu_tanh_and_mul_part(const void *rows, int64_t part) { activate_part(gelu_tanh_gated, rows, part); }

static void clamped_swiglu_part(const void *rows, int64_t part) { activate_part(clamped_swiglu, rows, part); }
