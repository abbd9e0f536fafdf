/* Vectors of floats as wide as this processor's registers, through the vector extension of gcc and clang.
 *
 * Compiled without -ffast-math and with -ffp-contract=off: sums keep the order they are written in, and a product and a
 * sum are rounded together only where `multiply_add` says so. Left to the compiler, that choice differs from loop to
 * loop, and with it the bits of a result. */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define LANES 16
enum { PANEL_VECS = 2, TILE_ROWS = 12 }; /* 24 of 32 registers accumulate */
#elif defined(__AVX2__)
#define LANES 8
enum { PANEL_VECS = 2, TILE_ROWS = 6 }; /* 12 of 16 */
#elif defined(__aarch64__)
#define LANES 4
enum { PANEL_VECS = 4, TILE_ROWS = 6 }; /* 24 of 32 */
#else
#define LANES 4
enum { PANEL_VECS = 2, TILE_ROWS = 6 }; /* 12 of 16 */
#endif
enum { PANEL = LANES * PANEL_VECS, QUADS = LANES / 4 };

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef float quad __attribute__((vector_size(16), aligned(4)));

INLINE vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec blend(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
INLINE vec only(ivec mask, vec v) { return (vec)(mask & (ivec)v); } /* elsewhere 0 */
INLINE vec vec_max(vec a, vec b) { return blend(a > b, a, b); }
INLINE float max_of(float a, float b) { return a > b ? a : b; }

/* Whether a comparison holds in some lane. */
INLINE int any(ivec mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    uint64_t parts[LANES / 2], all = 0;
    memcpy(parts, &mask, sizeof mask);
    for (int i = 0; i < LANES / 2; i++) all |= parts[i];
    return all != 0;
#endif
}

INLINE float sum(vec v) {
    quad q[QUADS];
    memcpy(q, &v, sizeof v);
#if LANES == 16
    q[0] = (q[0] + q[2]) + (q[1] + q[3]);
#elif LANES == 8
    q[0] = q[0] + q[1];
#endif
    return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
}

INLINE quad quad_max(quad a, quad b) {
    const int32_t __attribute__((vector_size(16))) larger = a > b;
    return (quad)((larger & (__typeof__(larger))a) | (~larger & (__typeof__(larger))b));
}

INLINE float maximum(vec v) {
    quad q[QUADS];
    memcpy(q, &v, sizeof v);
#if LANES == 16
    q[0] = quad_max(quad_max(q[0], q[2]), quad_max(q[1], q[3]));
#elif LANES == 8
    q[0] = quad_max(q[0], q[1]);
#endif
    return max_of(max_of(q[0][0], q[0][2]), max_of(q[0][1], q[0][3]));
}

/* Of each four lanes of two vectors, the first two or the last two in turns. */
#if LANES == 16
#define LOW_PAIRS 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH_PAIRS 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#elif LANES == 8
#define LOW_PAIRS 0, 8, 1, 9, 4, 12, 5, 13
#define HIGH_PAIRS 2, 10, 3, 11, 6, 14, 7, 15
#else
#define LOW_PAIRS 0, 4, 1, 5
#define HIGH_PAIRS 2, 6, 3, 7
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* Four floats from each of rows[0], rows[4], rows[8], ... */
INLINE vec load_quads(const float *const *rows, int64_t at) {
#if LANES == 16 && (defined(__clang__) || __GNUC__ >= 12)
    const quad a = *(const quad *)(rows[0] + at), b = *(const quad *)(rows[4] + at);
    const quad c = *(const quad *)(rows[8] + at), d = *(const quad *)(rows[12] + at);
    return SHUFFLE(SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7), SHUFFLE(c, d, 0, 1, 2, 3, 4, 5, 6, 7), 0, 1, 2, 3, 4, 5, 6, 7,
                   8, 9, 10, 11, 12, 13, 14, 15);
#elif LANES == 8 && (defined(__clang__) || __GNUC__ >= 12)
    const quad a = *(const quad *)(rows[0] + at), b = *(const quad *)(rows[4] + at);
    return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
#else
    float lanes[LANES];
    for (int i = 0; i < QUADS; i++) memcpy(lanes + 4 * i, rows[4 * i] + at, sizeof(quad));
    return load(lanes);
#endif
}

/* Transposes four columns of LANES rows: out[c] holds column at + c of all of them. */
INLINE void load_columns(const float *const *rows, int64_t at, vec out[4]) {
    const vec row0 = load_quads(rows, at), row1 = load_quads(rows + 1, at);
    const vec row2 = load_quads(rows + 2, at), row3 = load_quads(rows + 3, at);
    const vec low02 = SHUFFLE(row0, row2, LOW_PAIRS), high02 = SHUFFLE(row0, row2, HIGH_PAIRS);
    const vec low13 = SHUFFLE(row1, row3, LOW_PAIRS), high13 = SHUFFLE(row1, row3, HIGH_PAIRS);
    out[0] = SHUFFLE(low02, low13, LOW_PAIRS), out[1] = SHUFFLE(low02, low13, HIGH_PAIRS);
    out[2] = SHUFFLE(high02, high13, LOW_PAIRS), out[3] = SHUFFLE(high02, high13, HIGH_PAIRS);
}

/* exp with a relative error below 2e-7. Below -87 it is 0, so that a masked score of -inf weighs nothing. */
INLINE vec vec_exp(vec x) {
    const float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const float round_to_int = 12582912.0f; /* 1.5 * 2^23: adding it leaves the integer in the low mantissa bits */
    const vec clamped = vec_max(splat(-87.0f), blend(x < 88.0f, x, splat(88.0f)));
    const vec shifted = multiply_add(clamped, splat(log2e), splat(round_to_int));
    const vec n = shifted - round_to_int;
    const vec r = multiply_add(n, splat(-ln2_low), multiply_add(n, splat(-ln2_high), clamped));
    vec p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    const ivec exponent = ((ivec)shifted - 0x4B400000) << 23; /* 0x4B400000 is round_to_int */
    return blend(x < -87.0f, splat(0.0f), (vec)((ivec)p + exponent));
}
