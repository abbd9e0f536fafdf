/* Chooses a token from each row of logits: the largest, or one drawn after temperature, top-k, top-p and min-p. */
#pragma once

#include "nucleus.h"
#include "row_scan.h"
#include "threads.h"

enum { NO_TOKEN = -1, OUT_OF_MEMORY = -2 };

struct sampling {
    const float *logits; /* [num_rows][vocab_size] */
    int64_t num_rows, vocab_size;
    const float *temperature, *top_p, *min_p; /* [num_rows]; min_p may be NULL */
    const int64_t *top_k;                     /* 0: all tokens */
    const uint64_t *seeds;
    const int64_t *positions;
    int64_t *token_ids; /* out; NO_TOKEN where the largest logit is no number */
};

INLINE uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* A number in [0, 1) for each (seed, position): the same in every implementation, for all time. */
INLINE double uniform(uint64_t seed, int64_t position) {
    return (double)(splitmix64(splitmix64(seed) ^ (uint64_t)position) >> 11) * 0x1p-53;
}

static int64_t first_largest(const struct scan *scan) {
    int64_t block = 0;
    while (scan->maxima[block] != scan->largest) block++;
    int64_t token = block * BLOCK;
    while (scan->logits[token] != scan->largest) token++;
    return token;
}

/* Where the running sum of what reaches the threshold first exceeds `target`: the block, then the entry. Rounding may put
 * the target at the very end; the last entry that adds something is meant then. */
static int64_t find_sum(const struct scan *scan, float threshold, double target) {
    int64_t block = 0, last = 0;
    double running = 0;
    for (; block < scan->num_blocks; block++) {
        if (scan->sums[block] <= 0) continue;
        last = block;
        if (running + scan->sums[block] > target) break;
        running += scan->sums[block];
    }
    const int64_t end = last * BLOCK + block_size(scan, last);
    int64_t found = last * BLOCK;
    if (block == scan->num_blocks) target = INFINITY;
    for (int64_t i = found; i < end && running <= target; i++) {
        if (scan->weights[i] < threshold || scan->weights[i] <= 0) continue;
        running += (double)scan->weights[i];
        found = i;
    }
    return found;
}

static int64_t draw(struct scan *scan, double top_p, float min_p, double u) {
    double total = weigh_row(scan);
    const float threshold = max_of(min_p, top_p < 1 ? nucleus_threshold(scan, top_p, total) : 0.0f);
    if (threshold > 0) total = sum_at_least(scan, threshold);
    return find_sum(scan, threshold, u * total);
}

static int64_t sample_row(const struct sampling *job, int64_t row, struct scan *scan) {
    const float temperature = job->temperature[row], min_p = job->min_p ? job->min_p[row] : 0.0f;
    begin_scan(scan, job->logits + row * job->vocab_size, job->vocab_size, temperature);
    if (!isfinite(scan->largest)) return NO_TOKEN;
    if (temperature <= 0) return first_largest(scan);
    const int is_cut = job->top_k[row] > 0 && job->top_k[row] < job->vocab_size;
    if (is_cut) {
        collect_largest(scan, job->top_k[row]);
        begin_scan(scan, scan->values, scan->num_candidates, temperature);
    }
    const int64_t at = draw(scan, (double)job->top_p[row], min_p, uniform(job->seeds[row], job->positions[row]));
    return is_cut ? scan->ids[at] : at;
}

static void sample_part(const void *sampling, int64_t row) {
    const struct sampling *job = sampling;
    struct scan scan;
    void *memory = allocate_scan(&scan, job->vocab_size);
    job->token_ids[row] = memory ? sample_row(job, row, &scan) : OUT_OF_MEMORY;
    free(memory);
}
