/* Takes the tokens away that a row's mask does not allow. */
#pragma once

#include <math.h>

#include "linear.h"
#include "threads.h"

enum { WORD = 32 };

struct token_mask {
    float *logits; /* [num_rows][vocab_size] */
    int64_t num_rows, vocab_size;
    const uint32_t *words; /* [num_rows][ceil(vocab_size / 32)] */
};

static void forbid_part(const void *mask, int64_t row) {
    const struct token_mask *job = mask;
    const int64_t num_words = ceil_div(job->vocab_size, WORD);
    for (int64_t at = 0; at < num_words; at++) {
        const uint32_t word = job->words[row * num_words + at];
        if (word == UINT32_MAX) continue;
        float *x = job->logits + row * job->vocab_size + at * WORD;
        const int64_t count = at + 1 < num_words ? WORD : job->vocab_size - at * WORD;
        for (int64_t i = 0; i < count; i++) x[i] = word >> i & 1 ? x[i] : -INFINITY;
    }
}
