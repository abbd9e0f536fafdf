/* Numbers of one or two bytes, LANES at a time, to and from float. Widening is exact. */
#pragma once

#include "simd.h"

typedef uint16_t half_lanes __attribute__((vector_size(LANES * 2), aligned(2)));
typedef int8_t byte_lanes __attribute__((vector_size(LANES), aligned(1)));
typedef uint8_t ubyte_lanes __attribute__((vector_size(LANES), aligned(1)));

enum { FP8_LARGEST = 0x7E }; /* 448; 0x7F is NaN, and there is no infinity */

/* gcc takes bytes apart one by one where no instruction is named. */
INLINE vec from_int8(const void *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
#else
    return __builtin_convertvector(*(const byte_lanes *)p, vec);
#endif
}

INLINE vec from_uint8(const void *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)));
#else
    return __builtin_convertvector(*(const ubyte_lanes *)p, vec);
#endif
}

INLINE vec from_bf16(const void *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16);
#else
    return (vec)(__builtin_convertvector(*(const half_lanes *)p, ivec) << 16);
#endif
}

/* IEEE half precision, without infinities and NaNs where the processor has no instruction for it. */
INLINE vec widen_half(half_lanes bits) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps((__m128i)bits);
#else
    const ivec wide = __builtin_convertvector(bits, ivec);
    const vec magnitude = (vec)((wide & 0x7FFF) << 13) * 0x1p112f; /* the exponents' biases differ by 112 */
    return (vec)((ivec)magnitude | (wide & 0x8000) << 16);
#endif
}

INLINE vec from_fp16(const void *p) { return widen_half(*(const half_lanes *)p); }

/* FP8 e4m3 (Micikevicius et al., 2022), without its NaN. With its exponent where half precision has it, it is 1/256. */
INLINE vec from_fp8(const void *p) {
#if defined(__AVX512F__)
    /* sign, sign, exponent, mantissa, zeros */
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7);
    return widen_half((half_lanes)_mm256_and_si256(shifted, _mm256_set1_epi16((int16_t)0xBFFF))) * 256.0f;
#elif defined(__AVX2__)
    const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p)), 7);
    return widen_half((half_lanes)_mm_and_si128(shifted, _mm_set1_epi16((int16_t)0xBFFF))) * 256.0f;
#else
    const half_lanes byte = __builtin_convertvector(*(const ubyte_lanes *)p, half_lanes);
    return widen_half((byte & 0x80) << 8 | (byte & 0x7F) << 7) * 256.0f;
#endif
}

INLINE void store_halves(void *p, ivec wide) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16((__m512i)wide));
#else
    *(half_lanes *)p = __builtin_convertvector(wide, half_lanes);
#endif
}

INLINE void store_bytes(void *p, ivec wide) {
#if defined(__AVX512F__)
    _mm_storeu_si128(p, _mm512_cvtepi32_epi8((__m512i)wide));
#else
    *(ubyte_lanes *)p = __builtin_convertvector(wide, ubyte_lanes);
#endif
}

/* To the nearest, ties to even; to round a NaN up could make it zero. */
INLINE void store_bf16(void *p, vec x) {
    const ivec bits = (ivec)x, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const ivec is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    store_halves(p, (ivec)blend(is_nan, (vec)((ivec){0} + 0x7FC0), (vec)rounded));
}

/* To the nearest, ties to even; what is too large becomes infinite. */
INLINE void store_fp16(void *p, vec x) {
    const ivec bits = (ivec)x, magnitude = bits & 0x7FFFFFFF;
    const ivec normal = (magnitude - (112 << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13; /* of 127, a bias of 15 */
    const ivec subnormal = (ivec)((vec)magnitude + 0.5f) & 0x7FF; /* the last bit of such a sum is worth 2^-24 */
    const ivec infinite = (ivec)blend(magnitude > 0x7F800000, (vec)((ivec){0} + 0x7E00), (vec)((ivec){0} + 0x7C00));
    const vec rounded = blend((vec)magnitude < 0x1p-14f, (vec)subnormal, (vec)normal);
    const vec clamped = blend((vec)magnitude < 65520.0f, rounded, (vec)infinite);
    store_halves(p, (ivec)clamped | (bits >> 16 & 0x8000));
}

/* To the nearest, ties to even; what is larger than the largest becomes that. */
INLINE void store_fp8(void *p, vec x) {
    const ivec bits = (ivec)x, magnitude = bits & 0x7FFFFFFF;
    const ivec normal = (magnitude - (120 << 23) + 0x7FFFF + (magnitude >> 20 & 1)) >> 20; /* of 127, a bias of 7 */
    const ivec subnormal = (ivec)((vec)magnitude + 0x1p14f) & 0x7F; /* the last bit of such a sum is worth 2^-9 */
    const vec rounded = blend((vec)magnitude < 0x1p-6f, (vec)subnormal, (vec)normal);
    const vec clamped = blend((vec)magnitude < 448.0f, rounded, (vec)(FP8_LARGEST - (ivec){0}));
    const ivec sign = bits >> 24 & 0x80 & (magnitude <= 0x7F800000); /* a NaN has none */
    store_bytes(p, (ivec)clamped | sign);
}
