/* An indexer's choice of the keys that a token attends to (DeepSeek V3.2, arXiv 2512.02556).
 *
 * A key's score is the sum over index heads of a weight times the product of query and key, where negative products count
 * as 0. To `paged_kv.h` index keys are the keys of an attention of their own, whose heads are the indexer's; a token's
 * weights lie behind its key. A score is computed in one order, over dimensions and then over heads, and of equal scores
 * the first positions win: so a choice does not depend on the batch, nor on how a prompt was cut. */
#pragma once

#include "paged_kv.h"
#include "threads.h"

enum {
    INDEX_TOKENS = 8,               /* of a request, for which a block of keys is laid out once */
    INDEX_KEYS = 64 * KEY_BLOCK,    /* scored by one part */
    INDEX_FLOATS = 4 * 1024 * 1024, /* of scores at a time, about */
};

struct index_tokens { /* of one request, each of which sees more keys than are kept */
    int64_t request, first, last;
};

struct choice {
    struct attention index; /* without `out` */
    int64_t num_kept;
    int32_t *chosen; /* [num_tokens][num_kept]: positions, ascending */
    struct index_tokens *groups;
    float *scores; /* [groups at a time][INDEX_TOKENS][stride] */
    int64_t stride, num_ranges; /* ranges of INDEX_KEYS */
    int64_t first_group;        /* of those whose scores are there */
};

/* Stores the index keys of some tokens, and rotates their queries where they are. */
static void rotate_index(const struct attention *index, int64_t first, int64_t last) {
    const struct attention_step *step = index->step;
    float rotated[MAX_HEAD_DIM];
    for (int64_t token = first; token < last; token++) {
        store_kv(index, token, 0);
        for (int64_t head = 0; head < step->num_heads; head++) {
            rotate(state_at(index, token, head), rotated, index, step->positions[token]);
            memcpy(state_at(index, token, head), rotated, step->head_dim * sizeof *rotated);
        }
    }
}

/* Scores KEY_BLOCK keys, laid out as panels, for one token. */
static void score_panels(const struct attention *index, int64_t token, const float *panels, float *scores) {
    const int64_t num_heads = index->step->num_heads, dim = index->step->head_dim;
    const float *queries = state_at(index, token, 0), *weights = state_at(index, token, num_heads + 1);
    float dots[TILE_ROWS * PANEL];
    for (int64_t key = 0; key < KEY_BLOCK; key += PANEL) {
        vec sums[PANEL_VECS];
        for (int v = 0; v < PANEL_VECS; v++) sums[v] = splat(0.0f);
        for (int64_t head = 0; head < num_heads; head += TILE_ROWS) {
            const int rows = (int)min_of(TILE_ROWS, num_heads - head);
            tile_rows(rows, queries + head * dim, dim, panels + key * dim, PANEL, dim, dots, PANEL, 0);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < PANEL_VECS; v++) {
                    const vec dot = vec_max(load(dots + r * PANEL + v * LANES), splat(0.0f));
                    sums[v] = multiply_add(splat(weights[head + r]), dot, sums[v]);
                }
        }
        for (int v = 0; v < PANEL_VECS; v++) store(scores + key + v * LANES, sums[v]);
    }
}

static void score_part(const void *choice, int64_t part) {
    const struct choice *job = choice;
    const struct attention_step *step = job->index.step;
    const int64_t group = part / job->num_ranges, first_key = part % job->num_ranges * INDEX_KEYS;
    const struct index_tokens *tokens = job->groups + job->first_group + group;
    const int64_t num_keys = min_of(first_key + INDEX_KEYS, step->positions[tokens->last - 1] + 1);
    const struct head head = {step, job->index.layer, step->page_table + tokens->request * step->table_width, 0, NULL};
    float panels[KEY_BLOCK * step->head_dim], widened[KEY_BLOCK * 2 * step->head_dim];
    for (int64_t start = first_key; start < num_keys; start += KEY_BLOCK) {
        struct keys located;
        struct wide_keys keys;
        locate(&head, start, num_keys, &located);
        as_floats(step, &located, widened, &keys);
        lay_out_panels(&keys, step->head_dim, panels);
        float *scores = job->scores + group * INDEX_TOKENS * job->stride + start;
        for (int64_t token = tokens->first; token < tokens->last; token++, scores += job->stride)
            if (start <= step->positions[token]) score_panels(&job->index, token, panels, scores);
    }
}

/* Floats in their order as unsigned numbers; both zeros are one. */
static inline uint32_t ordered(float x) {
    const float value = x == 0.0f ? 0.0f : x;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Writes the positions of the best `num_kept` of more scores. The smallest of them is found byte by byte. */
static void keep_best(const float *scores, int64_t count, int64_t num_kept, int32_t *chosen) {
    uint64_t smallest = 0; /* as far as it is known */
    int64_t num_equal = num_kept; /* that are kept of those which are equal to it, so far */
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {0};
        for (int64_t i = 0; i < count; i++) {
            const uint64_t number = ordered(scores[i]);
            if (number >> (shift + 8) == smallest) counts[number >> shift & 255]++;
        }
        int digit = 255;
        for (; counts[digit] < num_equal; digit--) num_equal -= counts[digit];
        smallest = smallest << 8 | (uint64_t)digit;
    }
    for (int64_t i = 0; i < count; i++) {
        const uint64_t number = ordered(scores[i]);
        if (number > smallest || (number == smallest && num_equal-- > 0)) *chosen++ = (int32_t)i;
    }
}

static void keep_part(const void *choice, int64_t part) {
    const struct choice *job = choice;
    const int64_t group = part / INDEX_TOKENS, index = part % INDEX_TOKENS;
    const struct index_tokens *tokens = job->groups + job->first_group + group;
    const int64_t token = tokens->first + index;
    if (token >= tokens->last) return;
    const int64_t count = job->index.step->positions[token] + 1;
    keep_best(job->scores + part * job->stride, count, job->num_kept, job->chosen + token * job->num_kept);
}

/* Fills job->groups; returns how many there are. */
static int64_t group_tokens(const struct choice *job) {
    const struct attention_step *step = job->index.step;
    int64_t num_groups = 0;
    for (int64_t request = 0; request < step->batch_size; request++) {
        int64_t token = step->first_tokens[request];
        const int64_t end = step->first_tokens[request + 1];
        while (token < end && step->positions[token] < job->num_kept) token++;
        for (; token < end; token += INDEX_TOKENS)
            job->groups[num_groups++] = (struct index_tokens){request, token, min_of(token + INDEX_TOKENS, end)};
    }
    return num_groups;
}

/* Scores and chooses for all groups, some at a time. Returns 0, or -1 when memory ran out. */
static int choose_for_groups(struct choice *job, int64_t num_groups) {
    int64_t num_keys = 0;
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t seen = job->index.step->positions[job->groups[group].last - 1] + 1;
        num_keys = seen > num_keys ? seen : num_keys;
    }
    job->stride = ceil_div(num_keys, KEY_BLOCK) * KEY_BLOCK;
    job->num_ranges = ceil_div(num_keys, INDEX_KEYS);
    const int64_t fitting = INDEX_FLOATS / (INDEX_TOKENS * job->stride), at_once = fitting > 0 ? fitting : 1;
    job->scores = malloc((size_t)(min_of(at_once, num_groups) * INDEX_TOKENS * job->stride) * sizeof *job->scores);
    if (!job->scores) return -1;
    for (job->first_group = 0; job->first_group < num_groups; job->first_group += at_once) {
        const int64_t count = min_of(at_once, num_groups - job->first_group);
        parallel(score_part, job, count * job->num_ranges);
        parallel(keep_part, job, count * INDEX_TOKENS);
    }
    free(job->scores);
    return 0;
}
