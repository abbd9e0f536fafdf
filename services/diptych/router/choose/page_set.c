// Sets of page hashes in 8 bytes a slot: open addressing with linear probing, no memory of its own.
// A table has 2^k slots, 2 at least; 0 is an empty one. The caller counts, and keeps at least one slot empty.
// Whoever knows what scatters the keys can choose hashes that meet, and whoever then looks walks past all of them: so
// each process scatters them its own way.

#include <stdint.h>

#define SPREAD UINT64_C(0x9E3779B97F4A7C15) // odd; also what stands for the hash 0

static uint64_t key_of(uint64_t hash) { return hash ? hash : SPREAD; }

static uint64_t salt, factor = SPREAD;

void page_set_scatter(uint64_t new_salt, uint64_t new_factor) { // before the first table
    salt = new_salt;
    factor = new_factor | 1;
}

// The highest bits depend on all of the key's.
static uint64_t home_of(uint64_t key, uint64_t mask) {
    key = (key ^ salt) * SPREAD;
    return (key ^ key >> 32) * factor >> __builtin_clzll(mask);
}

// Return the slot of a key, or the empty one where it belongs.
static uint64_t find(const uint64_t *table, uint64_t mask, uint64_t key) {
    uint64_t slot = home_of(key, mask);
    while (table[slot] && table[slot] != key)
        slot = (slot + 1) & mask;
    return slot;
}

// Move back what probing would no longer reach: there are no tombstones.
static void empty(uint64_t *table, uint64_t mask, uint64_t gap) {
    for (uint64_t slot = (gap + 1) & mask; table[slot]; slot = (slot + 1) & mask) {
        uint64_t distance = (slot - home_of(table[slot], mask)) & mask;
        if (distance >= ((slot - gap) & mask)) {
            table[gap] = table[slot];
            gap = slot;
        }
    }
    table[gap] = 0;
}

// Return how many of the hashes were new.
int64_t page_set_add(uint64_t *table, uint64_t mask, const uint64_t *hashes, int64_t num_hashes) {
    int64_t added = 0;
    for (int64_t i = 0; i < num_hashes; i++) {
        uint64_t key = key_of(hashes[i]), slot = find(table, mask, key);
        added += !table[slot];
        table[slot] = key;
    }
    return added;
}

// The same for a chain of which a prefix is known: from its end up to that.
int64_t page_set_add_chain(uint64_t *table, uint64_t mask, const uint64_t *hashes, int64_t num_hashes) {
    int64_t added = 0;
    while (added < num_hashes && page_set_add(table, mask, hashes + num_hashes - added - 1, 1))
        added++;
    return added;
}

// Return how many of the hashes were there.
int64_t page_set_remove(uint64_t *table, uint64_t mask, const uint64_t *hashes, int64_t num_hashes) {
    int64_t removed = 0;
    for (int64_t i = 0; i < num_hashes; i++) {
        uint64_t slot = find(table, mask, key_of(hashes[i]));
        if (table[slot]) {
            empty(table, mask, slot);
            removed++;
        }
    }
    return removed;
}

typedef struct {
    const uint64_t *table;
    uint64_t mask;
} PageSet;

// Write for each set how many leading hashes it has. A set with a hash of the chain has all before it: bisection.
// Sets of one group have them one behind the other: each begins where the one before it ends, and so does its length;
// without groups each stands alone.
void page_set_prefix_lens(const PageSet *sets, const int64_t *groups, int64_t num_sets, const uint64_t *hashes,
                          int64_t num_hashes, int64_t *lens) {
    for (int64_t i = 0; i < num_sets; i++) {
        int64_t known = groups && i && groups[i] == groups[i - 1] ? lens[i - 1] : 0;
        int64_t unknown = num_hashes; // the answer is between them
        while (known < unknown) {
            int64_t middle = known + (unknown - known) / 2;
            if (sets[i].table[find(sets[i].table, sets[i].mask, key_of(hashes[middle]))])
                known = middle + 1;
            else
                unknown = middle;
        }
        lens[i] = known;
    }
}
