/* A weight in a few bits: how it is packed, and how its codes become floats.
 *
 * Packed in panels of PANEL rows as in linear.h. A panel is a row of blocks, one for each group of columns:
 * scales[PANEL], mins[PANEL] (where the format has them), then the codes column by column. Four-bit codes: words of
 * eight columns, [columns / 8][PANEL]. A weight is code * scale + min, rounded as its dequantised file would be. */
#pragma once

#include "linear.h"
#include "narrow.h"

enum code { INT4, FP4, INT8, FP8, FP16, BF16 }; /* mirrored in linear.py */
enum { NIBBLES = 8 };                      /* codes of a word */

struct quantized {
    uint8_t *packed;
    int64_t num_rows, num_columns, group; /* columns that share a scale; the last group may be shorter */
    int64_t code, scale_bytes, has_mins;  /* integers are unsigned with mins, signed without */
};

struct kind { /* known when compiled */
    int code, scale_bytes, has_mins;
};

INLINE int is_four_bits(int64_t code) { return code == INT4 || code == FP4; }

INLINE int64_t code_bits(int64_t code) { return is_four_bits(code) ? 4 : code == INT8 || code == FP8 ? 8 : 16; }

static inline int64_t codes_offset(const struct quantized *w) {
    return PANEL * w->scale_bytes * (w->has_mins ? 2 : 1);
}

static inline int64_t column_bytes(const struct quantized *w, int64_t num_columns) {
    return PANEL * num_columns * code_bits(w->code) / 8;
}

static inline int64_t panel_bytes(const struct quantized *w) {
    return ceil_div(w->num_columns, w->group) * codes_offset(w) + column_bytes(w, w->num_columns);
}

static inline uint8_t *block_at(const struct quantized *w, int64_t panel, int64_t index) {
    const int64_t block_bytes = codes_offset(w) + column_bytes(w, w->group);
    return w->packed + panel * panel_bytes(w) + index * block_bytes;
}

/* Lane r: code number `index` of word r. */
INLINE vec nibble(const uint8_t *words, const int index, const int is_signed) {
    const ivec shifted = *(const ivec *)words >> 4 * index;
#if defined(__AVX512F__)
    const float low = is_signed ? -8.0f : 0.0f; /* a permutation looks at the last four bits of each lane only */
    const vec values = {low, low + 1, low + 2, low + 3, low + 4, low + 5, low + 6, low + 7,
                        low + 8, low + 9, low + 10, low + 11, low + 12, low + 13, low + 14, low + 15};
    return (vec)_mm512_permutexvar_ps((__m512i)shifted, (__m512)values);
#else
    return __builtin_convertvector((shifted & 15) - (is_signed ? 8 : 0), vec);
#endif
}

/* The same for FP4: e2m1, whose fourth bit is the sign. */
INLINE vec fp4_nibble(const uint8_t *words, const int index) {
    const ivec shifted = *(const ivec *)words >> 4 * index;
#if defined(__AVX512F__)
    const vec values = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return (vec)_mm512_permutexvar_ps((__m512i)shifted, (__m512)values);
#elif defined(__AVX2__)
    const vec magnitudes = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6}; /* this permutation looks at the last three bits */
    return (vec)((ivec)_mm256_permutevar8x32_ps((__m256)magnitudes, (__m256i)shifted) | (shifted & 8) << 28);
#else
    const vec magnitude = (vec)((shifted & 7) << 22) * 0x1p126f; /* the exponents' biases differ by 126 */
    return (vec)((ivec)magnitude | (shifted & 8) << 28);
#endif
}

INLINE vec code_value(const struct kind kind, const uint8_t *codes, int64_t column, int v) {
    const int64_t at = column * PANEL + v * LANES;
    switch (kind.code) {
        case INT4:
        case FP4: {
            const uint8_t *words = codes + 4 * (column / NIBBLES * PANEL + v * LANES);
            const int index = (int)(column % NIBBLES);
            return kind.code == FP4 ? fp4_nibble(words, index) : nibble(words, index, !kind.has_mins);
        }
        case INT8: return kind.has_mins ? from_uint8(codes + at) : from_int8(codes + at);
        case FP8: return from_fp8(codes + at);
        case FP16: return from_fp16(codes + 2 * at);
        default: return from_bf16(codes + 2 * at);
    }
}

INLINE vec scale_at(const struct kind kind, const uint8_t *scales, int lane) {
    return kind.scale_bytes == 2 ? from_fp16(scales + 2 * lane) : load((const float *)scales + lane);
}

struct factors { /* of one panel's block */
    vec scale[PANEL_VECS], min[PANEL_VECS];
};

INLINE void load_factors(const struct kind kind, const uint8_t *block, struct factors *factors) {
    for (int v = 0; v < PANEL_VECS; v++) {
        if (kind.scale_bytes) factors->scale[v] = scale_at(kind, block, v * LANES);
        if (kind.has_mins) factors->min[v] = scale_at(kind, block, PANEL + v * LANES);
    }
}

INLINE vec weight(const struct kind kind, const uint8_t *codes, int64_t column, int v, const struct factors *factors) {
    const vec value = code_value(kind, codes, column, v);
    if (kind.has_mins) return multiply_add(value, factors->scale[v], factors->min[v]);
    return kind.scale_bytes ? value * factors->scale[v] : value;
}

/* Widens the columns [first, first + count) of a panel to [count][PANEL] floats */
INLINE void widen_piece(const struct kind kind, const struct quantized *w, int64_t panel, int64_t first, int64_t count,
                        float *out) {
    const int64_t step = is_four_bits(kind.code) ? NIBBLES : 1;
    for (int64_t done = 0; done < count;) {
        const int64_t index = (first + done) / w->group, in_block = (first + done) % w->group;
        const int64_t columns = min_of(w->group - in_block, count - done);
        const uint8_t *block = block_at(w, panel, index), *codes = block + codes_offset(w) + column_bytes(w, in_block);
        struct factors factors;
        load_factors(kind, block, &factors);
        for (int64_t i = 0; i < columns; i += step)
#pragma GCC unroll 8
            for (int64_t j = 0; j < step; j++)
                for (int v = 0; v < PANEL_VECS; v++)
                    store(out + (done + i + j) * PANEL + v * LANES, weight(kind, codes, i + j, v, &factors));
        done += columns;
    }
}

/* One panel from rows in order: codes of one or two bytes, scales and mins of scale_bytes. Rows past the end are 0. */
static void pack_panel(const struct quantized *w, int64_t panel, const uint8_t *codes, const uint8_t *scales,
                       const uint8_t *mins) {
    const int64_t num_groups = ceil_div(w->num_columns, w->group), bytes = w->scale_bytes;
    const int64_t code_bytes = code_bits(w->code) == 16 ? 2 : 1;
    for (int64_t r = 0; r < PANEL && panel * PANEL + r < w->num_rows; r++) {
        const int64_t row = panel * PANEL + r;
        for (int64_t group = 0; group < num_groups; group++) {
            uint8_t *block = block_at(w, panel, group);
            if (bytes) memcpy(block + r * bytes, scales + (row * num_groups + group) * bytes, bytes);
            if (w->has_mins) memcpy(block + (PANEL + r) * bytes, mins + (row * num_groups + group) * bytes, bytes);
        }
        for (int64_t column = 0; column < w->num_columns; column++) {
            const int64_t in_block = column % w->group;
            uint8_t *to = block_at(w, panel, column / w->group) + codes_offset(w);
            const uint8_t *from = codes + (row * w->num_columns + column) * code_bytes;
            if (is_four_bits(w->code)) {
                uint8_t *byte = to + (in_block / NIBBLES * PANEL + r) * 4 + in_block % NIBBLES / 2;
                const int nibble = (*from + (w->code == INT4 && !w->has_mins ? 8 : 0)) & 15;
                *byte |= (uint8_t)(nibble << 4 * (in_block % 2));
            } else {
                memcpy(to + (in_block * PANEL + r) * code_bytes, from, code_bytes);
            }
        }
    }
}

static void pack_quantized(const struct quantized *w, const uint8_t *codes, const uint8_t *scales,
                           const uint8_t *mins) {
    const int64_t num_panels = ceil_div(w->num_rows, PANEL);
    use_huge_pages((float *)w->packed, num_panels * panel_bytes(w) / 4);
    memset(w->packed, 0, num_panels * panel_bytes(w));
    for (int64_t panel = 0; panel < num_panels; panel++) pack_panel(w, panel, codes, scales, mins);
}
