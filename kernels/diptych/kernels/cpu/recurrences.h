/* Heads that keep a matrix, token by token: Kimi's delta rule (arXiv 2510.26692) and state spaces (arXiv 2405.21060).
 *
 * A part is a head of a request: nobody else has its matrix. A token's result depends on its request's text alone,
 * however that is cut into chunks. */
#pragma once

#include "delta_rule.h"

struct recurrence {
    int64_t num_heads, num_rows, num_columns; /* of the matrix that a head keeps */
    int64_t heads_a_group;                    /* that share vectors, in state spaces */
    float *kept;                              /* [num_slots][num_heads][num_rows][num_columns] */
    int64_t slot_stride;                      /* floats */
    const int64_t *starts;                    /* [batch_size + 1]: first tokens of the requests */
    const int64_t *slots;                     /* [batch_size] */
    float *out; /* [num_tokens][num_heads][num_columns], of state spaces [num_rows] in place of the last */
};

/* [num_tokens][num_heads], and of the first three [num_rows], of values [num_columns] */
struct kimi_step {
    struct recurrence of;
    const float *queries, *keys, *remains, *values, *betas;
};

/* amounts [num_tokens][num_heads][num_rows], the vectors [num_tokens][num_groups][num_columns],
 * remains [num_tokens][num_heads] */
struct space_step {
    struct recurrence of;
    const float *amounts, *writing, *reading, *remains;
};

/* Some columns of a matrix fade, row by row, and are corrected. */
INLINE void fade_and_correct(float *kept, int64_t stride, int64_t num_rows, const float *key, const float *query,
                             const float *remains, const float *value, float beta, int num_vecs, float *found) {
    vec change[BLOCK_VECS], sums[BLOCK_VECS];
    for (int v = 0; v < num_vecs; v++) change[v] = sums[v] = splat(0.0f);
    for (int64_t row = 0; row < num_rows; row++) {
        for (int v = 0; v < num_vecs; v++) {
            float *place = kept + row * stride + v * LANES;
            const vec faded = splat(remains[row]) * load(place);
            store(place, faded);
            change[v] = multiply_add(splat(key[row]), faded, change[v]);
        }
    }
    for (int v = 0; v < num_vecs; v++) change[v] = beta * (load(value + v * LANES) - change[v]);
    for (int64_t row = 0; row < num_rows; row++) {
        for (int v = 0; v < num_vecs; v++) {
            float *place = kept + row * stride + v * LANES;
            const vec now = multiply_add(splat(key[row]), change[v], load(place));
            store(place, now);
            sums[v] = multiply_add(splat(query[row]), now, sums[v]);
        }
    }
    for (int v = 0; v < num_vecs; v++) store(found + v * LANES, sums[v]);
}

static void fade_and_correct_column(float *kept, int64_t stride, int64_t num_rows, const float *key, const float *query,
                                    const float *remains, float value, float beta, float *found) {
    float change = 0.0f, read = 0.0f;
    for (int64_t row = 0; row < num_rows; row++) {
        kept[row * stride] *= remains[row];
        change += key[row] * kept[row * stride];
    }
    change = beta * (value - change);
    for (int64_t row = 0; row < num_rows; row++) {
        kept[row * stride] += key[row] * change;
        read += query[row] * kept[row * stride];
    }
    *found = read;
}

static void kimi_token(const struct kimi_step *step, float *kept, int64_t head, int64_t token) {
    const struct recurrence *of = &step->of;
    const int64_t at = token * of->num_heads + head, rows = of->num_rows, columns = of->num_columns;
    const float *key = step->keys + at * rows, *query = step->queries + at * rows, *remains = step->remains + at * rows;
    const float *value = step->values + at * columns, beta = step->betas[at];
    float *found = of->out + at * columns;
    int64_t i = 0;
    for (; i + BLOCK_VECS * LANES <= columns; i += BLOCK_VECS * LANES)
        fade_and_correct(kept + i, columns, rows, key, query, remains, value + i, beta, BLOCK_VECS, found + i);
    for (; i + LANES <= columns; i += LANES)
        fade_and_correct(kept + i, columns, rows, key, query, remains, value + i, beta, 1, found + i);
    for (; i < columns; i++)
        fade_and_correct_column(kept + i, columns, rows, key, query, remains, value[i], beta, found + i);
}

/* A row of a matrix fades, gets its amount of what is written, and is read. */
static float write_and_read(float *row, const float *writing, const float *reading, float amount, float remains,
                            int64_t num_columns) {
    vec sums = splat(0.0f);
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= num_columns; i += LANES) {
        const vec now = multiply_add(splat(amount), load(writing + i), splat(remains) * load(row + i));
        store(row + i, now);
        sums = multiply_add(now, load(reading + i), sums);
    }
    for (; i < num_columns; i++) {
        row[i] = remains * row[i] + amount * writing[i];
        rest += row[i] * reading[i];
    }
    return sum(sums) + rest;
}

static void space_token(const struct space_step *step, float *kept, int64_t head, int64_t token) {
    const struct recurrence *of = &step->of;
    const int64_t at = token * of->num_heads + head, columns = of->num_columns;
    const int64_t group = token * (of->num_heads / of->heads_a_group) + head / of->heads_a_group;
    const float *writing = step->writing + group * columns, *reading = step->reading + group * columns;
    for (int64_t row = 0; row < of->num_rows; row++) {
        const float amount = step->amounts[at * of->num_rows + row];
        of->out[at * of->num_rows + row] =
            write_and_read(kept + row * columns, writing, reading, amount, step->remains[at], columns);
    }
}

/* Where the matrix of a part is. */
INLINE float *matrix_of(const struct recurrence *of, int64_t request, int64_t head) {
    return of->kept + of->slots[request] * of->slot_stride + head * of->num_rows * of->num_columns;
}

static void kimi_part(const void *kimi_step, int64_t part) {
    const struct kimi_step *step = kimi_step;
    const int64_t request = part / step->of.num_heads, head = part % step->of.num_heads;
    float *kept = matrix_of(&step->of, request, head);
    for (int64_t token = step->of.starts[request]; token < step->of.starts[request + 1]; token++)
        kimi_token(step, kept, head, token);
}

static void space_part(const void *space_step, int64_t part) {
    const struct space_step *step = space_step;
    const int64_t request = part / step->of.num_heads, head = part % step->of.num_heads;
    float *kept = matrix_of(&step->of, request, head);
    for (int64_t token = step->of.starts[request]; token < step->of.starts[request + 1]; token++)
        space_token(step, kept, head, token);
}
