// What the processes of a router have counted of each key, in memory that they share. No locks: a process that is stopped
// or killed in the middle of anything keeps nobody waiting. 0 everywhere is an empty table.
//
// A table has rows, one a key, found by the hash of its name; the rows' words lie in columns:
//   hashes | full again at, of requests | full again at, of tokens | places of process 0 | places of process 1 | ...
// Times are nanoseconds of a clock that all processes share.

#include <stdint.h>

enum { TRIES = 8 }; // to see whether places are really taken, or only being asked for

static const int64_t LONGEST = INT64_C(1) << 55; // a year of overdrawing: no sum of times overflows

static int64_t load(int64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static int64_t add(int64_t *word, int64_t amount) { return __atomic_add_fetch(word, amount, __ATOMIC_SEQ_CST); }

// Return the row of a hash, which is not 0; -1 if it is new and the table is full.
int64_t ledger_row(int64_t *hashes, int64_t num_rows, int64_t hash) {
    uint64_t home = (uint64_t)hash % (uint64_t)num_rows;
    for (int64_t i = 0; i < num_rows; i++) {
        int64_t row = (int64_t)((home + (uint64_t)i) % (uint64_t)num_rows), found = 0;
        if (__atomic_compare_exchange_n(&hashes[row], &found, hash, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) || found == hash)
            return row;
    }
    return -1;
}

// Return how many places all processes hold. `places` is the row's word in the column of process 0.
int64_t ledger_held(int64_t *places, int64_t num_rows, int64_t num_processes) {
    int64_t held = 0;
    for (int64_t process = 0; process < num_processes; process++)
        held += load(&places[process * num_rows]);
    return held;
}

// Take places for a process if all then hold no more than `limit`; return whether it has them. Each writes its own word
// first and then reads all, so two never both take the last place. Who finds too many takes its own back and looks again,
// after a pause of its own: the others may be doing the same.
int64_t ledger_hold(int64_t *places, int64_t num_rows, int64_t num_processes, int64_t process, int64_t count,
                    int64_t limit) {
    int64_t *own = &places[process * num_rows];
    for (int64_t attempt = 1; attempt <= TRIES; attempt++) {
        add(own, count);
        if (ledger_held(places, num_rows, num_processes) <= limit)
            return 1;
        add(own, -count);
        for (int64_t pause = 0; pause < attempt * (process + 1); pause++)
            load(own);
    }
    return 0;
}

void ledger_release(int64_t *places, int64_t num_rows, int64_t process, int64_t count) {
    add(&places[process * num_rows], -count);
}

// A process has ended: what it held is free.
void ledger_forget(int64_t *places, int64_t num_rows, int64_t process) {
    for (int64_t row = 0; row < num_rows; row++)
        __atomic_store_n(&places[process * num_rows + row], 0, __ATOMIC_SEQ_CST);
}

// An allowance that refills steadily within `window` is one word: when it will be full again. Charge what takes `cost` to
// refill if it is there, or with `always` even if not; return 0, or how long it takes until it is there. A negative cost
// refunds.
int64_t ledger_charge(int64_t *full_at, int64_t cost, int64_t window, int64_t now, int64_t always) {
    int64_t seen = load(full_at), wait, next;
    do {
        next = (seen > now ? seen : now) + cost;
        if (next > now + LONGEST)
            next = now + LONGEST;
        wait = next - now - window;
        if (wait > 0 && !always)
            return wait;
    } while (!__atomic_compare_exchange_n(full_at, &seen, next, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return 0;
}

// Return how long it takes until what takes `cost` to refill is there; 0 if it is.
int64_t ledger_wait(int64_t *full_at, int64_t cost, int64_t window, int64_t now) {
    int64_t seen = load(full_at), wait = (seen > now ? seen : now) + cost - now - window;
    return wait > 0 ? wait : 0;
}
