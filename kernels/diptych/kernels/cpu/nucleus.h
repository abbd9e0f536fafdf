/* Top-p: the threshold above which weights together reach a part of their total.
 *
 * Branches on data are what a selection spends its time on, so the search splits the range of weights into equal ratios,
 * adds up what lies above each split in one vector pass, and repeats this until few enough are left to select from. */
#pragma once

#include "row_scan.h"

enum { SPLITS = 7, FEW = 512, MAX_PASSES = 6 };

struct bracket {
    float low, high;             /* the threshold is in [low, high) */
    double sum_low, sum_high;    /* of the weights that reach them */
};

/* Adds up, for each threshold (ascending), the weights that reach it. */
static void sum_above(const struct scan *scan, const float thresholds[SPLITS], double sums[SPLITS]) {
    for (int split = 0; split < SPLITS; split++) sums[split] = 0;
    for (int64_t block = 0; block < scan->num_blocks; block++) {
        const float top = (scan->maxima[block] - scan->largest) * scan->inverse_temperature;
        if (vec_exp(splat(top))[0] * (1 + 1e-6f) < thresholds[0]) continue; /* exp is monotonic but for rounding */
        const int64_t end = block * BLOCK + block_size(scan, block);
        int64_t i = block * BLOCK;
        vec above[SPLITS] = {0};
        for (; i + LANES <= end; i += LANES) {
            const vec weight = load(scan->weights + i);
            for (int split = 0; split < SPLITS; split++) above[split] += only(weight >= thresholds[split], weight);
        }
        for (int split = 0; split < SPLITS; split++) sums[split] += (double)sum(above[split]);
        for (; i < end; i++)
            for (int split = 0; split < SPLITS; split++)
                if (scan->weights[i] >= thresholds[split]) sums[split] += (double)scan->weights[i];
    }
}

static void narrow_bracket(const struct scan *scan, struct bracket *bracket, double target) {
    float thresholds[SPLITS];
    double sums[SPLITS];
    const float ratio = powf(bracket->high / bracket->low, 1.0f / (SPLITS + 1));
    for (int split = 0; split < SPLITS; split++)
        thresholds[split] = (split ? thresholds[split - 1] : bracket->low) * ratio;
    sum_above(scan, thresholds, sums);
    int split = 0;
    while (split < SPLITS && sums[split] >= target) split++;
    if (split < SPLITS) bracket->high = thresholds[split], bracket->sum_high = sums[split];
    if (split > 0) bracket->low = thresholds[split - 1], bracket->sum_low = sums[split - 1];
}

/* The smallest of the largest of x that together reach `target`; 0 if all together do not. */
static float select_sum(float *x, int64_t count, double target) {
    int64_t low = 0, high = count;
    double sum_above_low = 0;
    while (low < high) {
        const float pivot = x[low + (high - low) / 2];
        int64_t above = low, below = high;
        double sum_to_above = sum_above_low;
        for (int64_t i = low; i < below;) {
            const float value = x[i];
            if (value > pivot) sum_to_above += (double)value, x[i++] = x[above], x[above++] = value;
            else if (value < pivot) x[i] = x[--below], x[below] = value;
            else i++;
        }
        const double sum_to_pivot = sum_to_above + (double)(below - above) * (double)pivot;
        if (sum_to_above >= target) high = above;
        else if (sum_to_pivot >= target) return pivot;
        else low = below, sum_above_low = sum_to_pivot;
    }
    return 0.0f;
}

/* Copies the weights in the bracket to `scratch`; returns how many. Most vectors have none of the few. */
static int64_t copy_within(const struct scan *scan, const struct bracket *bracket) {
    int64_t found = 0;
    for (int64_t at = 0; at < scan->size; at += LANES) {
        const int64_t end = at + LANES < scan->size ? at + LANES : scan->size;
        if (at + LANES <= scan->size) {
            const vec weight = load(scan->weights + at);
            if (!any((weight >= bracket->low) & (weight < bracket->high))) continue;
        }
        for (int64_t i = at; i < end; i++) {
            scan->scratch[found] = scan->weights[i];
            found += scan->weights[i] >= bracket->low && scan->weights[i] < bracket->high;
        }
    }
    return found;
}

/* The smallest of the largest weights that together reach `top_p` of `total`. */
static float nucleus_threshold(const struct scan *scan, double top_p, double total) {
    /* Less likely tokens than this are outside, all together; the factors are for rounding. */
    const float least = (float)((1 - top_p) * total / (double)scan->size * 0.999);
    struct bracket bracket = {fmaxf(least, 0x1p-120f), 1.001f, total, 0};
    for (int pass = 0; pass < MAX_PASSES && bracket.sum_low - bracket.sum_high > FEW * (double)bracket.low; pass++)
        narrow_bracket(scan, &bracket, top_p * total);
    const int64_t found = copy_within(scan, &bracket);
    return fmaxf(select_sum(scan->scratch, found, top_p * total - bracket.sum_high), bracket.low);
}
