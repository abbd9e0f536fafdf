/* The digest of page bytes: see digest.py, the reference, for what it is and why. Compilers make SIMD of this loop. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Of `len` bytes as they lie at byte `offset` of the target pool. Both are multiples of 8. */
static uint64_t digest_bytes(const void *bytes, uint64_t offset, size_t len)
{
    const char *at = bytes;
    uint64_t sum = 0, key = offset * 0x9E3779B97F4A7C15u + 0xD6E8FEB86659FD93u;
    for (size_t i = 0; i < len / 8; i++) {
        uint64_t word;
        memcpy(&word, at + 8 * i, 8);
        word ^= key + i * (8 * 0x9E3779B97F4A7C15u);
        word *= 0x9E3779B185EBCA87u;
        word ^= word >> 32;
        word *= 0xC2B2AE3D27D4EB4Fu;
        sum += word ^ word >> 29;
    }
    return sum;
}
