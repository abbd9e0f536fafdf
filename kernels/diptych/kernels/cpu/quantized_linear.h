/* y = x * transpose(w), with w kept in a few bits and widened on the fly. Arithmetic and results are float32.
 *
 * Sums run in the order of linear.h: results are, to the bit, those of the dequantised weights, in any batch.
 * A few tokens are memory-bound: codes go from memory to registers, several panels at once, so that enough sums are in
 * flight to follow the memory. For more, a piece of a panel is widened into the cache and multiplied by all of them. */
#pragma once

#include "quantized.h"

#define HINT 2
enum {
#if defined(__AVX512F__)
    TILE_TOKENS = 8, /* of 32 registers, 16 accumulate */
#else
    TILE_TOKENS = 4,
#endif
    FEW_TOKENS = 2 * TILE_TOKENS,
    PANELS_AT_ONCE = 4,
    PIECE = 1024, /* columns of a panel that are widened at a time */
    LINE = 64,    /* bytes of the cache's */
};

/* What one thread multiplies. */
struct product {
    const struct quantized *w;
    const float *x;
    float *y;
    int64_t num_tokens, y_stride;
};

/* num_tokens <= rows tokens from `token` (the last one repeated to fill), `panels` panels from `panel`. */
INLINE void quantized_tile(const struct kind kind, const int rows, const int panels, const struct product *job,
                           int64_t token, int64_t num_tokens, int64_t panel) {
    const struct quantized *w = job->w;
    const int64_t num_columns = w->num_columns, step = is_four_bits(kind.code) ? NIBBLES : 1;
    const int64_t step_bytes = PANEL * step * code_bits(kind.code) / 8;
    const int64_t ahead = panels * panel_bytes(w); /* the next panels: these are too short for the processor to guess */
    const float *x[TILE_TOKENS];
    for (int r = 0; r < rows; r++) x[r] = job->x + (token + min_of(r, num_tokens - 1)) * num_columns;
    vec acc[TILE_TOKENS][PANELS_AT_ONCE][PANEL_VECS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < PANEL_VECS; v++) acc[r][p][v] = splat(0.0f);
    for (int64_t first = 0, index = 0; first < num_columns; first += w->group, index++) {
        struct factors factors[PANELS_AT_ONCE];
        const uint8_t *codes[PANELS_AT_ONCE];
        for (int p = 0; p < panels; p++) {
            const uint8_t *block = block_at(w, panel + p, index);
            load_factors(kind, block, &factors[p]);
            codes[p] = block + codes_offset(w);
        }
        const int64_t count = min_of(w->group, num_columns - first);
        for (int64_t i = 0; i < count; i += step) {
            for (int p = 0; p < panels; p++)
                for (int64_t line = 0; line < step_bytes; line += LINE)
                    __builtin_prefetch(codes[p] + i / step * step_bytes + line + ahead);
#pragma GCC unroll 8
            for (int64_t j = 0; j < step; j++)
                for (int p = 0; p < panels; p++)
                    for (int v = 0; v < PANEL_VECS; v++) {
                        const vec value = weight(kind, codes[p], i + j, v, &factors[p]);
                        for (int r = 0; r < rows; r++)
                            acc[r][p][v] = multiply_add(splat(x[r][first + i + j]), value, acc[r][p][v]);
                    }
        }
    }
    for (int64_t r = 0; r < num_tokens; r++)
        for (int p = 0; p < panels; p++) {
            float *y = job->y + (token + r) * job->y_stride + (panel + p) * PANEL;
            memcpy(y, acc[r][p], min_of(PANEL, w->num_rows - (panel + p) * PANEL) * sizeof *y);
        }
}

typedef void (*few_function)(const struct product *job, int64_t token, int64_t num_tokens, int64_t first_panel,
                             int64_t last_panel);
typedef void (*widen_function)(const struct quantized *w, int64_t panel, int64_t first, int64_t count, float *out);

#define TILE(rows, panels) \
    for (; panel + panels <= last_panel; panel += panels) \
        quantized_tile(kind, rows, panels, job, token, num_tokens, panel);

/* Several panels at once keep 8 to 16 sums in flight. */
#if defined(__AVX512F__)
#define LARGER_TILES \
    case 5: \
    case 6: TILE(6, 1) break; \
    default: TILE(8, 1) break;
#else
#define LARGER_TILES
#endif

#define DEFINE_KIND(code, scale_bytes, has_mins) \
    static void few_##code##_##scale_bytes##_##has_mins(const struct product *job, int64_t token, int64_t num_tokens, \
                                                        int64_t panel, int64_t last_panel) { \
        const struct kind kind = {code, scale_bytes, has_mins}; \
        switch (num_tokens) { \
            case 1: TILE(1, 4) TILE(1, 2) TILE(1, 1) break; \
            case 2: TILE(2, 2) TILE(2, 1) break; \
            case 3: \
            case 4: TILE(4, 2) TILE(4, 1) break; \
            LARGER_TILES \
        } \
    } \
    static void widen_##code##_##scale_bytes##_##has_mins(const struct quantized *w, int64_t panel, int64_t first, \
                                                          int64_t count, float *out) { \
        const struct kind kind = {code, scale_bytes, has_mins}; \
        widen_piece(kind, w, panel, first, count, out); \
    }
#define LIST_KIND(code, scale_bytes, has_mins) \
    {{code, scale_bytes, has_mins}, \
     few_##code##_##scale_bytes##_##has_mins, \
     widen_##code##_##scale_bytes##_##has_mins},
#define KINDS(each) \
    each(INT4, 2, 0) each(INT4, 2, 1) each(INT4, 4, 0) each(INT4, 4, 1) each(FP4, 4, 0) \
    each(INT8, 2, 0) each(INT8, 2, 1) each(INT8, 4, 0) each(INT8, 4, 1) \
    each(FP8, 4, 0) each(FP16, 0, 0) each(BF16, 0, 0)

KINDS(DEFINE_KIND)

static const struct kernel {
    struct kind kind;
    few_function few;
    widen_function widen;
} kernels[] = {KINDS(LIST_KIND)};

/* NULL when there is none. */
static const struct kernel *kernel_of(const struct quantized *w) {
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        const struct kind kind = kernels[i].kind;
        if (kind.code == w->code && kind.scale_bytes == w->scale_bytes && kind.has_mins == w->has_mins)
            return &kernels[i];
    }
    return NULL;
}

struct quantized_linear {
    struct product product;
    const struct kernel *kernel;
    int64_t panels_a_part;
};

/* One panel for the tokens [first_token, last_token). */
static void multiply_widened(const struct quantized_linear *job, int64_t panel, int64_t first_token,
                             int64_t last_token) {
    const struct product *product = &job->product;
    const struct quantized *w = product->w;
    const int64_t width = min_of(PANEL, w->num_rows - panel * PANEL), num_tokens = last_token - first_token;
    const int64_t rows_at_once = ceil_div(num_tokens, ceil_div(num_tokens, TILE_ROWS));
    _Alignas(64) float piece[PIECE * PANEL], ragged[ROW_BLOCK * PANEL];
    float *y = product->y + first_token * product->y_stride + panel * PANEL;
    float *sums = width == PANEL ? y : ragged;
    const int64_t stride = width == PANEL ? product->y_stride : PANEL;
    for (int64_t first = 0; first < w->num_columns; first += PIECE) {
        const int64_t depth = min_of(PIECE, w->num_columns - first);
        job->kernel->widen(w, panel, first, depth, piece);
        for (int64_t token = 0; token < num_tokens; token += rows_at_once) {
            const float *x = product->x + (first_token + token) * w->num_columns + first;
            tile_rows((int)min_of(rows_at_once, num_tokens - token), x, w->num_columns, piece, PANEL, depth,
                      sums + token * stride, stride, first > 0);
        }
    }
    for (int64_t token = 0; width < PANEL && token < num_tokens; token++)
        memcpy(y + token * product->y_stride, ragged + token * PANEL, width * sizeof *y);
}

/* Some panels for the tokens [first_token, last_token). */
static void multiply_few(const struct quantized_linear *job, int64_t first_panel, int64_t last_panel,
                         int64_t first_token, int64_t last_token) {
    const int64_t num_tokens = last_token - first_token;
    const int64_t step = ceil_div(num_tokens, ceil_div(num_tokens, TILE_TOKENS));
    for (int64_t panel = first_panel; panel < last_panel; panel += PANELS_AT_ONCE) {
        const int64_t end = min_of(panel + PANELS_AT_ONCE, last_panel);
        for (int64_t token = first_token; token < last_token; token += step)
            job->kernel->few(&job->product, token, min_of(step, last_token - token), panel, end);
    }
}

static void quantized_part(const void *linear, int64_t part) {
    const struct quantized_linear *job = linear;
    const int64_t num_panels = ceil_div(job->product.w->num_rows, PANEL);
    const int64_t parts_a_block = ceil_div(num_panels, job->panels_a_part);
    const int64_t first_token = part / parts_a_block * ROW_BLOCK;
    const int64_t last_token = min_of(first_token + ROW_BLOCK, job->product.num_tokens);
    const int64_t first_panel = part % parts_a_block * job->panels_a_part;
    const int64_t last_panel = min_of(first_panel + job->panels_a_part, num_panels);
    if (last_token - first_token <= FEW_TOKENS) {
        multiply_few(job, first_panel, last_panel, first_token, last_token);
        return;
    }
    for (int64_t panel = first_panel; panel < last_panel; panel++)
        multiply_widened(job, panel, first_token, last_token);
}

static void quantized_linear(const struct quantized *w, const float *x, int64_t num_tokens, float *y,
                             int64_t y_stride) {
    if (num_tokens == 0) return;
    const int64_t num_panels = ceil_div(w->num_rows, PANEL), num_blocks = ceil_div(num_tokens, ROW_BLOCK);
    const int64_t wanted_parts = PARTS_A_THREAD * atomic_load(&pool.num_threads);
    const int64_t panels = ceil_div(num_panels * num_blocks, wanted_parts);
    const int64_t panels_a_part = ceil_div(panels, PANELS_AT_ONCE) * PANELS_AT_ONCE;
    const struct quantized_linear job = {{w, x, y, num_tokens, y_stride}, kernel_of(w), panels_a_part};
    parallel(quantized_part, &job, num_blocks * ceil_div(num_panels, panels_a_part));
}

/* Dequantises rows: out[i] = w[ids[i]]. */
static void quantized_rows(const struct quantized *w, const int64_t *ids, int64_t num_ids, float *out) {
    const struct kernel *kernel = kernel_of(w);
    _Alignas(64) float piece[PIECE * PANEL];
    for (int64_t row = 0; row < num_ids; row++)
        for (int64_t first = 0; first < w->num_columns; first += PIECE) {
            const int64_t count = min_of(PIECE, w->num_columns - first);
            kernel->widen(w, ids[row] / PANEL, first, count, piece);
            for (int64_t i = 0; i < count; i++)
                out[row * w->num_columns + first + i] = piece[i * PANEL + ids[row] % PANEL];
        }
}

