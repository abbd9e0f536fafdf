// XXH3-64 with a seed, of a multiple of 8 bytes, at least 8; XXH3-128 of more than 240 bytes that come bit by bit. From the
// specification of xxHash (BSD-2-Clause, Yann Collet); tests hold it against the library. On little-endian machines.

#pragma once

#include <stdint.h>
#include <string.h>

#define SECRET_BYTES 192
#define STRIPE_BYTES 64
#define STRIPES_A_BLOCK ((SECRET_BYTES - STRIPE_BYTES) / 8)

static const uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu, PRIME64_3 = 0x165667B19E3779F9u;
static const uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63u, PRIME64_5 = 0x27D4EB2F165667C5u;
static const uint64_t PRIME_MX1 = 0x165667919E3779F9u, PRIME_MX2 = 0x9FB21C651E98DF25u;

static const uint64_t SECRET_WORDS[SECRET_BYTES / 8] = {
    0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
    0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0,
    0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
    0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8,
    0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,
    0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF};
static const uint8_t *const SECRET = (const uint8_t *)SECRET_WORDS;

static uint64_t word_at(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
}

static uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * PRIME_MX1;
    return hash ^ hash >> 32;
}

static uint64_t mix(const uint8_t *data, const uint8_t *secret, uint64_t seed) {
    return fold(word_at(data) ^ (word_at(secret) + seed), word_at(data + 8) ^ (word_at(secret + 8) - seed));
}

static uint64_t xxh3_8(const uint8_t *data, uint64_t seed) {
    seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
    uint64_t word = word_at(data), key = (word_at(SECRET + 8) ^ word_at(SECRET + 16)) - seed;
    uint64_t hash = (word >> 32 | word << 32) ^ key;
    hash ^= (hash << 49 | hash >> 15) ^ (hash << 24 | hash >> 40);
    hash *= PRIME_MX2;
    hash = (hash ^ ((hash >> 35) + 8)) * PRIME_MX2;
    return hash ^ hash >> 28;
}

static uint64_t xxh3_16(const uint8_t *data, uint64_t seed) {
    uint64_t low = word_at(data) ^ ((word_at(SECRET + 24) ^ word_at(SECRET + 32)) + seed);
    uint64_t high = word_at(data + 8) ^ ((word_at(SECRET + 40) ^ word_at(SECRET + 48)) - seed);
    return avalanche(16 + __builtin_bswap64(low) + high + fold(low, high));
}

static uint64_t xxh3_to_128(const uint8_t *data, size_t length, uint64_t seed) {
    uint64_t hash = length * PRIME64_1;
    for (size_t i = 0; 32 * i < length; i++) {
        hash += mix(data + 16 * i, SECRET + 32 * i, seed);
        hash += mix(data + length - 16 * (i + 1), SECRET + 32 * i + 16, seed);
    }
    return avalanche(hash);
}

static uint64_t xxh3_to_240(const uint8_t *data, size_t length, uint64_t seed) {
    uint64_t hash = length * PRIME64_1;
    for (size_t i = 0; i < 8; i++)
        hash += mix(data + 16 * i, SECRET + 16 * i, seed);
    hash = avalanche(hash);
    for (size_t i = 8; i < length / 16; i++)
        hash += mix(data + 16 * i, SECRET + 16 * (i - 8) + 3, seed);
    return avalanche(hash + mix(data + length - 16, SECRET + 136 - 17, seed));
}

typedef uint64_t xxh3_words __attribute__((vector_size(STRIPE_BYTES)));

#define XXH3_INLINE static inline __attribute__((always_inline)) // a vector is no argument of a call

XXH3_INLINE xxh3_words words_at(const void *bytes) {
    xxh3_words words;
    memcpy(&words, bytes, STRIPE_BYTES);
    return words;
}

XXH3_INLINE xxh3_words accumulate(xxh3_words sums, const uint8_t *stripe, const uint8_t *secret) {
    xxh3_words words = words_at(stripe), keyed = words ^ words_at(secret);
#ifdef __clang__
    sums += __builtin_shufflevector(words, words, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    sums += __builtin_shuffle(words, (xxh3_words){1, 0, 3, 2, 5, 4, 7, 6});
#endif
    return sums + (keyed & 0xFFFFFFFF) * (keyed >> 32);
}

struct xxh3_sums { // of bytes that lie one behind the other, as far as they have come
    uint64_t sums[8];
    uint64_t stripes; // that are in them
};

static void xxh3_begin(struct xxh3_sums *state) {
    static const uint64_t first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                      PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(state->sums, first, sizeof first);
    state->stripes = 0;
}

// Take what has come of `length` bytes, more than 240. The last of them are taken at the end.
static void xxh3_take(struct xxh3_sums *state, const uint8_t *data, size_t length, size_t come, const uint8_t *secret) {
    size_t stripe = state->stripes, end = come < length ? come / STRIPE_BYTES : (length - 1) / STRIPE_BYTES;
    xxh3_words sums = words_at(state->sums), last = words_at(secret + SECRET_BYTES - STRIPE_BYTES);
    while (stripe < end) {
        size_t in_block = stripe % STRIPES_A_BLOCK, stop = stripe + STRIPES_A_BLOCK - in_block;
        for (; stripe < stop && stripe < end; stripe++)
            sums = accumulate(sums, data + STRIPE_BYTES * stripe, secret + 8 * (stripe % STRIPES_A_BLOCK));
        if (stripe == stop)
            sums = (sums ^ sums >> 47 ^ last) * PRIME32_1;
    }
    memcpy(state->sums, &sums, sizeof sums);
    state->stripes = stripe;
}

static void xxh3_end(struct xxh3_sums *state, const uint8_t *data, size_t length, const uint8_t *secret) {
    xxh3_words sums = words_at(state->sums);
    sums = accumulate(sums, data + length - STRIPE_BYTES, secret + SECRET_BYTES - STRIPE_BYTES - 7);
    memcpy(state->sums, &sums, sizeof sums);
}

static uint64_t xxh3_merge(const uint64_t sums[8], const uint8_t *secret, uint64_t hash) {
    for (int i = 0; i < 4; i++)
        hash += fold(sums[2 * i] ^ word_at(secret + 16 * i), sums[2 * i + 1] ^ word_at(secret + 16 * i + 8));
    return avalanche(hash);
}

// Write the XXH3-128 of `length` bytes, all of which have come, as the library's digest has it.
static inline void xxh3_128(struct xxh3_sums *state, const uint8_t *data, size_t length, uint8_t digest[16]) {
    xxh3_take(state, data, length, length, SECRET);
    xxh3_end(state, data, length, SECRET);
    uint64_t low = xxh3_merge(state->sums, SECRET + 11, length * PRIME64_1);
    uint64_t high = xxh3_merge(state->sums, SECRET + SECRET_BYTES - STRIPE_BYTES - 11, ~(length * PRIME64_2));
    uint64_t words[2] = {__builtin_bswap64(high), __builtin_bswap64(low)};
    memcpy(digest, words, sizeof words);
}

static uint64_t xxh3_long(const uint8_t *data, size_t length, uint64_t seed) {
    uint64_t keys[SECRET_BYTES / 8];
    for (int i = 0; i < SECRET_BYTES / 8; i += 2) {
        keys[i] = word_at(SECRET + 8 * i) + seed;
        keys[i + 1] = word_at(SECRET + 8 * i + 8) - seed;
    }
    const uint8_t *secret = (const uint8_t *)keys;
    struct xxh3_sums state;
    xxh3_begin(&state);
    xxh3_take(&state, data, length, length, secret);
    xxh3_end(&state, data, length, secret);
    return xxh3_merge(state.sums, secret + 11, length * PRIME64_1);
}

static uint64_t xxh3(const uint8_t *data, size_t length, uint64_t seed) {
    if (length == 8)
        return xxh3_8(data, seed);
    if (length == 16)
        return xxh3_16(data, seed);
    if (length <= 128)
        return xxh3_to_128(data, length, seed);
    return length <= 240 ? xxh3_to_240(data, length, seed) : xxh3_long(data, length, seed);
}
