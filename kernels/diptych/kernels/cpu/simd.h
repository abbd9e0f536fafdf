/* Vectors of floats as wide as this processor's registers, through the vector extension of gcc and clang.
 *
 * No -ffast-math: sums keep the order they are written in, so that a row's result never depends on the batch. */
#pragma once

#include <stdint.h>
#include <string.h>

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
typedef float quad __attribute__((vector_size(16)));

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec blend(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
INLINE vec vec_max(vec a, vec b) { return blend(a > b, a, b); }
INLINE float max_of(float a, float b) { return a > b ? a : b; }

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

/* exp with a relative error below 2e-7. Below -87 it is 0, so that a masked score of -inf weighs nothing. */
INLINE vec vec_exp(vec x) {
    const float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const float round_to_int = 12582912.0f; /* 1.5 * 2^23: adding it leaves the integer in the low mantissa bits */
    const vec clamped = vec_max(splat(-87.0f), blend(x < 88.0f, x, splat(88.0f)));
    const vec shifted = clamped * log2e + round_to_int;
    const vec n = shifted - round_to_int;
    const vec r = clamped - n * ln2_high - n * ln2_low;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const ivec exponent = ((ivec)shifted - 0x4B400000) << 23; /* 0x4B400000 is round_to_int */
    return blend(x < -87.0f, splat(0.0f), (vec)((ivec)p + exponent));
}
