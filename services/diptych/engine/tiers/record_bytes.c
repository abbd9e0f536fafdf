// Pages between a pool and records of a medium, with their digests: each byte is digested while it is in the processor's
// cache, where it was just copied. See `page_format.py` for what a header is.

#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <sys/uio.h>

#include "xxh3.h"

enum { HEADER_NBYTES = 128, DIGEST_AT = 64, CHECK_AT = 120 };
enum { COPIED_NBYTES = 1 << 14, READ_NBYTES = 1 << 18, READ_RECORDS = 16 }; // at once

typedef struct {
    uint8_t *pool;
    int64_t stride, page_nbytes; // from one page to the next, of a page
    const int32_t *pages;        // of the records, in the pool
    uint8_t *expected;           // headers of the records; their digests are those of the bytes that have come
    uint8_t *is_sound;           // a byte a record
    int64_t num_records;
    int64_t taken;           // bytes of the records
    struct xxh3_sums digest; // of the payload that is being taken
    uint8_t headers[READ_RECORDS][HEADER_NBYTES]; // that have come; each takes the place of an earlier one
} landing;

static void complete_header(uint8_t *header) {
    uint64_t check = xxh3(header, CHECK_AT, 0);
    memcpy(header + CHECK_AT, &check, sizeof check);
}

static int64_t record_nbytes(const landing *run) { return HEADER_NBYTES + run->page_nbytes; }

static uint8_t *header_of(landing *run, int64_t record) { return run->headers[record % READ_RECORDS]; }

static uint8_t *page_of(const landing *run, int64_t record) { return run->pool + run->pages[record] * run->stride; }

// Return where byte `at` of the records goes, and how many go there with it.
static uint8_t *place_of(landing *run, int64_t at, int64_t *nbytes) {
    int64_t record = at / record_nbytes(run), inside = at % record_nbytes(run);
    if (inside < HEADER_NBYTES) {
        *nbytes = HEADER_NBYTES - inside;
        return header_of(run, record) + inside;
    }
    *nbytes = record_nbytes(run) - inside;
    return page_of(run, record) + inside - HEADER_NBYTES;
}

static void verify(landing *run, int64_t record) {
    uint8_t *expected = run->expected + HEADER_NBYTES * record;
    xxh3_128(&run->digest, page_of(run, record), (size_t)run->page_nbytes, expected + DIGEST_AT);
    complete_header(expected);
    run->is_sound[record] = memcmp(expected, header_of(run, record), HEADER_NBYTES) == 0;
}

// So many bytes have come to one place.
static void take(landing *run, int64_t nbytes) {
    int64_t record = run->taken / record_nbytes(run), inside = run->taken % record_nbytes(run) + nbytes;
    run->taken += nbytes;
    if (inside == HEADER_NBYTES)
        xxh3_begin(&run->digest);
    else if (inside == record_nbytes(run))
        verify(run, record);
    else if (inside > HEADER_NBYTES)
        xxh3_take(&run->digest, page_of(run, record), (size_t)run->page_nbytes, (size_t)(inside - HEADER_NBYTES), SECRET);
}

// Take bytes that lie somewhere else.
void record_bytes_land(landing *run, const uint8_t *data, int64_t nbytes) {
    while (nbytes > 0) {
        int64_t step;
        uint8_t *place = place_of(run, run->taken, &step);
        if (step > COPIED_NBYTES)
            step = COPIED_NBYTES;
        if (step > nbytes)
            step = nbytes;
        memcpy(place, data, (size_t)step);
        take(run, step);
        data += step;
        nbytes -= step;
    }
}

// List where the bytes go that come next, of so many records that each header has a place.
static int next_parts(landing *run, struct iovec *parts) {
    int64_t at = run->taken, end = record_nbytes(run) * run->num_records, step;
    int count = 0;
    for (int64_t nbytes = 0; at < end && nbytes < READ_NBYTES && count < 2 * READ_RECORDS; nbytes += step, at += step) {
        parts[count].iov_base = place_of(run, at, &step);
        if (step > READ_NBYTES - nbytes)
            step = READ_NBYTES - nbytes;
        parts[count++].iov_len = (size_t)step;
    }
    return count;
}

// Take what the system has in memory of a file, in which the records begin at `offset`. Returns 0, or what has failed.
int record_bytes_read_cached(landing *run, int descriptor, int64_t offset) {
    struct iovec parts[2 * READ_RECORDS];
    for (int count; (count = next_parts(run, parts)) > 0;) {
        ssize_t come = preadv2(descriptor, parts, count, offset + run->taken, RWF_NOWAIT);
        if (come < 0 && errno != EAGAIN && errno != EINTR && errno != EINVAL && errno != EOPNOTSUPP)
            return errno;
        if (come <= 0)
            return 0;
        for (int part = 0; part < count && come > 0; part++) {
            int64_t step = (int64_t)parts[part].iov_len < come ? (int64_t)parts[part].iov_len : come;
            take(run, step);
            come -= step;
        }
    }
    return 0;
}

// Write records of pages, one behind the other. `headers` lack what follows from the payload.
void record_bytes_gather(uint8_t *out, const uint8_t *pool, int64_t stride, int64_t page_nbytes, const int32_t *pages,
                         const uint8_t *headers, int64_t num_records) {
    for (int64_t record = 0; record < num_records; record++, out += HEADER_NBYTES + page_nbytes) {
        const uint8_t *page = pool + pages[record] * stride;
        struct xxh3_sums digest;
        xxh3_begin(&digest);
        for (int64_t at = 0, step; at < page_nbytes; at += step) {
            step = page_nbytes - at < COPIED_NBYTES ? page_nbytes - at : COPIED_NBYTES;
            memcpy(out + HEADER_NBYTES + at, page + at, (size_t)step);
            if (at + step < page_nbytes)
                xxh3_take(&digest, page, (size_t)page_nbytes, (size_t)(at + step), SECRET);
        }
        memcpy(out, headers + HEADER_NBYTES * record, HEADER_NBYTES);
        xxh3_128(&digest, page, (size_t)page_nbytes, out + DIGEST_AT);
        complete_header(out);
    }
}
