/* y = x * transpose(w), with w packed once.
 *
 * Packed: panels of PANEL rows of w, column by column (`packed[panel][column][row]`), so that one pass reads memory in
 * order and needs no sum across lanes. The same tile serves one token (memory-bound: it streams the weights) and many
 * (compute-bound: it keeps TILE_ROWS * PANEL sums in registers). Each sum runs over the columns in order, whatever the
 * number of tokens: a token's result is the same, to the bit, in any batch. */
#pragma once

#include <sys/mman.h>

#include "simd.h"
#include "threads.h"

enum {
    DEPTH = 2048,       /* columns at a time: a panel's part stays in the second-level cache */
    ROW_BLOCK = 384,    /* tokens at a time: theirs stay in the third */
    PARTS_A_THREAD = 4, /* enough that the last part to end is short */
    AHEAD = 2048,       /* floats of the weights to prefetch: 8 KiB keep memory busy while several tokens compute */
};

/* y[rows][PANEL] (+)= x[rows][depth] * w[depth][PANEL] */
INLINE void tile(const int rows, const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth, float *y,
                 int64_t ldy, int accumulate) {
    vec acc[TILE_ROWS][PANEL_VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECS; v++) acc[r][v] = accumulate ? load(y + r * ldy + v * LANES) : splat(0.0f);
    for (int64_t i = 0; i < depth; i++) {
        vec column[PANEL_VECS];
        for (int v = 0; v < PANEL_VECS; v++) {
            column[v] = load(w + i * ldw + v * LANES);
            __builtin_prefetch(w + i * ldw + v * LANES + AHEAD);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < PANEL_VECS; v++) acc[r][v] = multiply_add(splat(x[r * ldx + i]), column[v], acc[r][v]);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECS; v++) store(y + r * ldy + v * LANES, acc[r][v]);
}

#define TILE_CASE(n) \
    case n: tile(n, x, ldx, w, ldw, depth, y, ldy, accumulate); break;

/* `tile` for 1 to TILE_ROWS rows. */
static void tile_rows(int rows, const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth, float *y,
                      int64_t ldy, int accumulate) {
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6)
#if defined(__AVX512F__)
        TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
#endif
    }
}

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct linear {
    const float *x, *packed;
    float *y;
    int64_t num_tokens, num_columns, num_rows;
    int64_t panels_a_part;
};

/* One panel for the tokens [first, last). */
static void multiply_panel(const struct linear *job, int64_t panel, int64_t first, int64_t last) {
    const float *w = job->packed + panel * job->num_columns * PANEL;
    const int64_t width = min_of(PANEL, job->num_rows - panel * PANEL);
    const int64_t step = ceil_div(last - first, ceil_div(last - first, TILE_ROWS));
    float ragged[TILE_ROWS * PANEL];
    for (int64_t at = 0; at < job->num_columns; at += DEPTH) {
        const int64_t depth = min_of(DEPTH, job->num_columns - at);
        for (int64_t token = first; token < last; token += step) {
            const int rows = (int)min_of(step, last - token);
            const float *x = job->x + token * job->num_columns + at;
            float *y = job->y + token * job->num_rows + panel * PANEL;
            if (width == PANEL) {
                tile_rows(rows, x, job->num_columns, w + at * PANEL, PANEL, depth, y, job->num_rows, at > 0);
                continue;
            }
            for (int r = 0; r < rows; r++) memcpy(ragged + r * PANEL, y + r * job->num_rows, width * sizeof *y);
            tile_rows(rows, x, job->num_columns, w + at * PANEL, PANEL, depth, ragged, PANEL, at > 0);
            for (int r = 0; r < rows; r++) memcpy(y + r * job->num_rows, ragged + r * PANEL, width * sizeof *y);
        }
    }
}

static void linear_part(const void *linear, int64_t part) {
    const struct linear *job = linear;
    const int64_t num_panels = ceil_div(job->num_rows, PANEL);
    const int64_t parts_a_block = ceil_div(num_panels, job->panels_a_part);
    const int64_t first_token = part / parts_a_block * ROW_BLOCK;
    const int64_t last_token = min_of(first_token + ROW_BLOCK, job->num_tokens);
    const int64_t first_panel = part % parts_a_block * job->panels_a_part;
    const int64_t last_panel = min_of(first_panel + job->panels_a_part, num_panels);
    for (int64_t panel = first_panel; panel < last_panel; panel++)
        multiply_panel(job, panel, first_token, last_token);
}

static void linear(const float *x, int64_t num_tokens, int64_t num_columns, const float *packed, int64_t num_rows,
                   float *y) {
    if (num_tokens == 0) return; /* a chunk that no request samples from has no logits */
    const int64_t num_panels = ceil_div(num_rows, PANEL), num_blocks = ceil_div(num_tokens, ROW_BLOCK);
    const int64_t wanted_parts = PARTS_A_THREAD * atomic_load(&pool.num_threads);
    const int64_t panels_a_part = ceil_div(num_panels * num_blocks, wanted_parts);
    const struct linear job = {x, packed, y, num_tokens, num_columns, num_rows, panels_a_part};
    parallel(linear_part, &job, num_blocks * ceil_div(num_panels, panels_a_part));
}

/* Streaming hundreds of megabytes in 4 KiB pages spends some percent of the time on address translation. */
static void use_huge_pages(float *memory, int64_t num_floats) {
#ifdef MADV_HUGEPAGE
    const uintptr_t size = 2 << 20, first = ((uintptr_t)memory + size - 1) & -size;
    const uintptr_t last = (uintptr_t)(memory + num_floats) & -size;
    if (last > first) madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)num_floats;
#endif
}

static void pack(const float *w, int64_t num_rows, int64_t num_columns, float *packed) {
    use_huge_pages(packed, ceil_div(num_rows, PANEL) * PANEL * num_columns);
    for (int64_t row = 0; row < ceil_div(num_rows, PANEL) * PANEL; row++) {
        float *to = packed + row / PANEL * num_columns * PANEL + row % PANEL;
        for (int64_t i = 0; i < num_columns; i++) to[i * PANEL] = row < num_rows ? w[row * num_columns + i] : 0.0f;
    }
}
