/* One row of logits, read once for the largest of each block: block maxima tell where the largest entries can be, so that
 * no row is ever sorted. Equal entries are never separated: of those at a threshold all stay. */
#pragma once

#include <math.h>
#include <stdlib.h>

#include "linear.h"
#include "simd.h"

enum { BLOCK = 256 };

struct scan {
    const float *logits; /* [size] */
    int64_t size, num_blocks;
    float largest, inverse_temperature;
    float *maxima;  /* [num_blocks] */
    double *sums;   /* [num_blocks], of weights */
    float *weights; /* [size]: exp((logit - largest) / temperature) */
    float *scratch; /* [size] */
    float *values;  /* [size] and */
    int64_t *ids;   /* [size]: the candidates, in order of their tokens */
    int64_t num_candidates;
};

/* Returns the memory of the arrays, to be freed, or NULL. */
static void *allocate_scan(struct scan *scan, int64_t size) {
    const size_t room = (size_t)size + 1, num_blocks = (size_t)ceil_div(size, BLOCK); /* one is written in vain */
    void *memory = malloc(room * (sizeof(int64_t) + 3 * sizeof(float)) + num_blocks * (sizeof(double) + sizeof(float)));
    scan->ids = memory;
    scan->sums = (double *)(scan->ids + room);
    scan->values = (float *)(scan->sums + num_blocks);
    scan->weights = scan->values + room;
    scan->scratch = scan->weights + room;
    scan->maxima = scan->scratch + room;
    return memory;
}

INLINE int64_t block_size(const struct scan *scan, int64_t block) {
    return block + 1 < scan->num_blocks ? BLOCK : scan->size - block * BLOCK;
}

/* Reads the row. `largest` is NaN if any logit is. */
static void begin_scan(struct scan *scan, const float *logits, int64_t size, float temperature) {
    const float inverse = temperature > 0 ? 1.0f / temperature : 1.0f;
    scan->logits = logits, scan->size = size, scan->num_blocks = ceil_div(size, BLOCK);
    scan->inverse_temperature = inverse < 0x1p126f ? inverse : 0x1p126f;
    scan->largest = -INFINITY;
    ivec nan_lanes = {0};
    int has_nan = 0;
    for (int64_t block = 0; block < scan->num_blocks; block++) {
        const float *x = logits + block * BLOCK;
        const int64_t count = block_size(scan, block);
        vec all = splat(-INFINITY);
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            const vec value = load(x + i);
            all = vec_max(value, all);
            nan_lanes |= value != value;
        }
        float largest = maximum(all);
        for (; i < count; i++) {
            largest = max_of(x[i], largest);
            has_nan |= x[i] != x[i];
        }
        scan->maxima[block] = largest;
        scan->largest = max_of(largest, scan->largest);
    }
    if (has_nan || any(nan_lanes)) scan->largest = NAN;
}

/* Computes all weights and the sum of each block of them; returns the sum of all. */
static double weigh_row(struct scan *scan) {
    double total = 0;
    const float *x = scan->logits;
    for (int64_t block = 0; block < scan->num_blocks; block++) {
        const int64_t end = block * BLOCK + block_size(scan, block);
        vec all = splat(0.0f);
        float rest = 0.0f;
        int64_t i = block * BLOCK;
        for (; i + LANES <= end; i += LANES) {
            const vec weight = vec_exp((load(x + i) - scan->largest) * scan->inverse_temperature);
            store(scan->weights + i, weight);
            all += weight;
        }
        for (; i < end; i++) rest += scan->weights[i] = vec_exp(splat((x[i] - scan->largest) * scan->inverse_temperature))[0];
        total += scan->sums[block] = (double)(sum(all) + rest);
    }
    return total;
}

/* Sums up what reaches the threshold only. */
static double sum_at_least(struct scan *scan, float threshold) {
    double total = 0;
    for (int64_t block = 0; block < scan->num_blocks; block++) {
        const int64_t end = block * BLOCK + block_size(scan, block);
        vec all = splat(0.0f);
        float rest = 0.0f;
        int64_t i = block * BLOCK;
        for (; i + LANES <= end; i += LANES) {
            const vec weight = load(scan->weights + i);
            all += only(weight >= threshold, weight);
        }
        for (; i < end; i++) rest += scan->weights[i] >= threshold ? scan->weights[i] : 0.0f;
        total += scan->sums[block] = (double)(sum(all) + rest);
    }
    return total;
}

/* Reorders x so that the largest come first, as far as the search needs; returns the rank-th largest. */
static float select_largest(float *x, int64_t count, int64_t rank) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const float pivot = x[low + (high - low) / 2];
        int64_t above = low, below = high;
        for (int64_t i = low; i < below;) {
            const float value = x[i];
            if (value > pivot) x[i++] = x[above], x[above++] = value;
            else if (value < pivot) x[i] = x[--below], x[below] = value;
            else i++;
        }
        if (rank <= above) high = above;
        else if (rank <= below) return pivot;
        else low = below;
    }
    return x[low];
}

/* Makes candidates of the `count` largest logits. As many blocks have a logit as large as the count-th block maximum. */
static void collect_largest(struct scan *scan, int64_t count) {
    float threshold = -INFINITY;
    if (count <= scan->num_blocks) {
        memcpy(scan->scratch, scan->maxima, (size_t)scan->num_blocks * sizeof(float));
        threshold = select_largest(scan->scratch, scan->num_blocks, count);
    }
    int64_t found = 0;
    for (int64_t block = 0; block < scan->num_blocks; block++) {
        if (scan->maxima[block] < threshold) continue;
        const int64_t end = block * BLOCK + block_size(scan, block);
        for (int64_t i = block * BLOCK; i < end; i++) {
            scan->ids[found] = i;
            scan->values[found] = scan->logits[i];
            found += scan->logits[i] >= threshold;
        }
    }
    memcpy(scan->scratch, scan->values, (size_t)found * sizeof(float));
    if (found > count) threshold = select_largest(scan->scratch, found, count);
    scan->num_candidates = 0;
    for (int64_t i = 0; i < found; i++) {
        scan->ids[scan->num_candidates] = scan->ids[i];
        scan->values[scan->num_candidates] = scan->values[i];
        scan->num_candidates += scan->values[i] >= threshold;
    }
}
