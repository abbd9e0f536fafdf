/* Log-probabilities of a token of each row, and of the likeliest tokens there. */
#pragma once

#include "row_scan.h"
#include "threads.h"

struct logprobs {
    const float *logits; /* [num_rows][vocab_size] */
    int64_t num_rows, vocab_size;
    const int64_t *token_ids; /* [num_rows] */
    int64_t num_top;
    float *logprobs;     /* out, [num_rows] */
    int64_t *top_ids;    /* out, [num_rows][num_top], likeliest first, of equal ones the lower id */
    float *top_logprobs; /* out, likewise */
};

/* Moves the likeliest of the candidates from `at` on to place `at`. */
static void bring_forward(struct scan *scan, int64_t at) {
    int64_t best = at;
    for (int64_t i = at + 1; i < scan->num_candidates; i++)
        if (scan->values[i] > scan->values[best]) best = i;
    const int64_t id = scan->ids[best];
    const float value = scan->values[best];
    memmove(scan->ids + at + 1, scan->ids + at, (size_t)(best - at) * sizeof *scan->ids);
    memmove(scan->values + at + 1, scan->values + at, (size_t)(best - at) * sizeof *scan->values);
    scan->ids[at] = id, scan->values[at] = value;
}

static void logprobs_row(const struct logprobs *job, int64_t row, struct scan *scan) {
    begin_scan(scan, job->logits + row * job->vocab_size, job->vocab_size, 1.0f);
    const double norm = (double)scan->largest + log(weigh_row(scan));
    job->logprobs[row] = (float)((double)scan->logits[job->token_ids[row]] - norm);
    if (job->num_top == 0) return;
    collect_largest(scan, job->num_top);
    for (int64_t i = 0; i < job->num_top; i++) {
        bring_forward(scan, i);
        job->top_ids[row * job->num_top + i] = scan->ids[i];
        job->top_logprobs[row * job->num_top + i] = (float)((double)scan->values[i] - norm);
    }
}

static void logprobs_part(const void *logprobs, int64_t row) {
    const struct logprobs *job = logprobs;
    struct scan scan;
    void *memory = allocate_scan(&scan, job->vocab_size);
    if (memory) logprobs_row(job, row, &scan);
    else job->logprobs[row] = NAN;
    free(memory);
}
