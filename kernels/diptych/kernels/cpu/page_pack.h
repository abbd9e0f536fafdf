/* Regions of pages on their way to a pool with another layout. page_pack.py says what must come out, to the bit.
 *
 * A row is what one token has in one plane of one layer, of the heads that are taken; an image is its rows
 * [layer][plane][token] one after the other. Included by the CPU kernels and by the transfer engine. */
#pragma once

#include "narrow.h"

enum cell_type { CELL_FLOAT32, CELL_BFLOAT16, CELL_FLOAT16, CELL_FP8 }; /* mirrored in page_pack.py */

struct page_pack { /* mirrored in page_pack.py */
    int64_t num_layers, head_dim;
    int64_t src_page_size, src_num_heads, src_type;
    int64_t first_head, num_heads; /* of a source page, that are taken */
    int64_t dst_page_size, dst_type;
    int64_t num_planes;                /* of a layer */
    int64_t src_offset, src_page_bytes; /* where the region begins in a source page, and how large such a page is */
};

struct source_pages { /* the tokens of a write, in order */
    const char *pool;
    const int64_t *pages;
    int64_t num_pages;
};

INLINE int64_t cell_bytes(int64_t type) { return type == CELL_FLOAT32 ? 4 : type == CELL_FP8 ? 1 : 2; }

static inline int64_t packed_row_bytes(const struct page_pack *pack) {
    return pack->num_heads * pack->head_dim * cell_bytes(pack->dst_type);
}

static inline uint64_t source_region_bytes(const struct page_pack *pack) {
    const int64_t rows = pack->num_layers * pack->num_planes * pack->src_page_size;
    return (uint64_t)(rows * pack->src_num_heads * pack->head_dim * cell_bytes(pack->src_type));
}

INLINE vec load_cells(const int type, const char *p) {
    return type == CELL_FLOAT32 ? load((const float *)p)
           : type == CELL_BFLOAT16 ? from_bf16(p)
           : type == CELL_FLOAT16 ? from_fp16(p)
                                  : from_fp8(p);
}

INLINE void store_cells(const int type, char *p, vec x) {
    switch (type) {
        case CELL_FLOAT32: store((float *)p, x); break;
        case CELL_BFLOAT16: store_bf16(p, x); break;
        case CELL_FLOAT16: store_fp16(p, x); break;
        default: store_fp8(p, x);
    }
}

INLINE void cast_as(const int src, const int dst, const char *from, char *to, int64_t count) {
    const int64_t src_bytes = cell_bytes(src), dst_bytes = cell_bytes(dst), whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) store_cells(dst, to + i * dst_bytes, load_cells(src, from + i * src_bytes));
    if (whole == count) return;
    char padded[LANES * 4] = {0}, result[LANES * 4];
    memcpy(padded, from + whole * src_bytes, (count - whole) * src_bytes);
    store_cells(dst, result, load_cells(src, padded));
    memcpy(to + whole * dst_bytes, result, (count - whole) * dst_bytes);
}

#define CAST(src, dst) \
    case (src) * 4 + (dst): cast_as(src, dst, from, to, count); break;
#define CASTS_FROM(src) CAST(src, CELL_FLOAT32) CAST(src, CELL_BFLOAT16) CAST(src, CELL_FLOAT16) CAST(src, CELL_FP8)

static void cast_cells(int64_t src, int64_t dst, const char *from, char *to, int64_t count) {
    if (src == dst) {
        memcpy(to, from, count * cell_bytes(src));
        return;
    }
    switch (src * 4 + dst) {
        CASTS_FROM(CELL_FLOAT32)
        CASTS_FROM(CELL_BFLOAT16)
        CASTS_FROM(CELL_FLOAT16)
        CASTS_FROM(CELL_FP8)
    }
}

/* Packs `count` tokens that are neighbours in a source page. */
static char *pack_tokens(const struct page_pack *pack, const char *from, int64_t count, char *to) {
    const int64_t row = packed_row_bytes(pack), cells = pack->num_heads * pack->head_dim;
    const int64_t token_bytes = pack->src_num_heads * pack->head_dim * cell_bytes(pack->src_type);
    if (pack->num_heads == pack->src_num_heads) {
        cast_cells(pack->src_type, pack->dst_type, from, to, count * cells);
        return to + count * row;
    }
    for (int64_t i = 0; i < count; i++, from += token_bytes, to += row)
        cast_cells(pack->src_type, pack->dst_type, from, to, cells);
    return to;
}

static inline int64_t fewer(int64_t a, int64_t b) { return a < b ? a : b; }

/* Writes the rows [first_row, first_row + num_rows) of the image whose first token is number `first_token` of the
 * source. Tokens that the source does not have are zero. */
static void pack_rows(const struct page_pack *pack, const struct source_pages *source, int64_t first_token,
                      int64_t first_row, int64_t num_rows, char *out) {
    const int64_t cell = cell_bytes(pack->src_type), size = pack->src_page_size;
    const int64_t token_bytes = pack->src_num_heads * pack->head_dim * cell;
    for (int64_t row = first_row, end = first_row + num_rows, count; row < end; row += count) {
        const int64_t plane = row / pack->dst_page_size, place = row % pack->dst_page_size;
        const int64_t token = first_token + place, page = token / size, offset = token % size;
        count = fewer(end - row, pack->dst_page_size - place);
        if (page >= source->num_pages) {
            memset(out, 0, count * packed_row_bytes(pack));
            out += count * packed_row_bytes(pack);
            continue;
        }
        count = fewer(count, size - offset);
        const char *from = source->pool + source->pages[page] * pack->src_page_bytes + pack->src_offset +
                           (plane * size + offset) * token_bytes;
        out = pack_tokens(pack, from + pack->first_head * pack->head_dim * cell, count, out);
    }
}

struct page_parts { /* that land one after the other in a region of a page; mirrored in page_pack.py */
    int64_t num_rows, head_bytes; /* a row is a token in one plane of one layer */
    int64_t offset;               /* of the region in the page */
    int64_t num_parts;
    const int64_t *part_heads;
};

static inline int64_t parts_row_bytes(const struct page_parts *parts) {
    int64_t num_heads = 0;
    for (int64_t part = 0; part < parts->num_parts; part++) num_heads += parts->part_heads[part];
    return num_heads * parts->head_bytes;
}

static inline uint64_t parts_bytes(const struct page_parts *parts) {
    return (uint64_t)(parts->num_rows * parts_row_bytes(parts));
}

/* Puts the heads of each token side by side, in place; `scratch` is as large as the region. */
static void unpack_page(const struct page_parts *parts, char *page, char *scratch) {
    const int64_t num_rows = parts->num_rows, token_bytes = parts_row_bytes(parts);
    char *region = page + parts->offset;
    const char *from = memcpy(scratch, region, num_rows * token_bytes);
    int64_t first_head = 0;
    for (int64_t part = 0; part < parts->num_parts; first_head += parts->part_heads[part++]) {
        const int64_t row_bytes = parts->part_heads[part] * parts->head_bytes;
        char *to = region + first_head * parts->head_bytes;
        for (int64_t row = 0; row < num_rows; row++, from += row_bytes, to += token_bytes) memcpy(to, from, row_bytes);
    }
}
