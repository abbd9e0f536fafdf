// Finds where a text went on before as it ends now, and guesses that it goes on the same way again.
//
// Tokens lie in a ring. Places behind which the same 1 or 3 tokens stand are chained through buckets of a hash, the
// newest first, as in compressors of Lempel and Ziv's kind. Chains are followed for so many steps and no more: nothing
// here takes longer than microseconds, whatever the tokens are and whoever chose them.
// What a chain names is compared with the text before it counts. So a place that a newer one has overwritten, a hash
// that two contexts share, and a number that has gone around do no harm.
//
// No memory of its own: the tables are the caller's.

#include <stdint.h>

enum { NUM_ORDERS = 2, MAX_STEPS = 32, MAX_PLACES = 16, MAX_MATCH = 64 };

static const uint32_t ORDERS[NUM_ORDERS] = {1, 3};    // tokens of a context
static const double MIN_CHANCE = 0.02;                // of the last token that is guessed

struct index {
    int32_t *tokens;   // [capacity]; below zero: none, and no text is compared with it
    uint32_t *newest;  // [NUM_ORDERS][capacity / 2], by bucket: its last place
    uint32_t *older;   // [NUM_ORDERS][capacity], by place: the one before in its bucket
    uint32_t capacity; // a power of two, at least 2
    uint32_t size;     // tokens taken so far, modulo 2^32: a place has the number of the token that follows there
    uint32_t held;     // of them, those that the ring still has
};

struct reader {
    const int64_t *text;
    uint32_t at;      // where the index went on as the text did, when the text had `seen` tokens
    uint32_t seen;    //
    uint32_t is_own;  // whether the index has taken this text and nothing else: then its places are the text's
    int32_t *guess;   // [at_most], written
    double *chances;  // [at_most], written
};

struct place {
    uint32_t at;
    int32_t match; // so many tokens before it are those that the text ends with
};

static int32_t token_at(const struct index *index, uint32_t place) {
    return index->tokens[place & (index->capacity - 1)];
}

static uint64_t mixed(uint64_t hash, int64_t token) {
    return (hash ^ (uint64_t)token) * UINT64_C(0xD6E8FEB86659FD93) ^ hash >> 29;
}

static uint32_t *bucket(const struct index *index, int order, uint64_t hash) {
    const uint32_t num_buckets = index->capacity / 2;
    hash = (hash ^ hash >> 32) * UINT64_C(0x9E3779B97F4A7C15) >> 32;
    return index->newest + (uint64_t)order * num_buckets + (hash & (num_buckets - 1));
}

static uint32_t *older(const struct index *index, int order, uint32_t place) {
    return index->older + (uint64_t)order * index->capacity + (place & (index->capacity - 1));
}

// Chain the end of what is there, because a token is about to follow.
static void chain_end(struct index *index) {
    uint64_t hash = 0;
    uint32_t num_hashed = 0;
    for (int order = 0; order < NUM_ORDERS && ORDERS[order] <= index->held; order++) {
        for (; num_hashed < ORDERS[order]; num_hashed++) hash = mixed(hash, token_at(index, index->size - 1 - num_hashed));
        uint32_t *newest = bucket(index, order, hash);
        *older(index, order, index->size) = *newest;
        *newest = index->size;
    }
}

void suffix_index_take(struct index *index, const int64_t *tokens, int64_t num_tokens) {
    for (int64_t i = 0; i < num_tokens; i++) {
        if (tokens[i] >= 0) chain_end(index);
        index->tokens[index->size & (index->capacity - 1)] = tokens[i] < 0 ? -1 : (int32_t)tokens[i];
        index->size++;
        index->held += index->held < index->capacity;
    }
}

// Return how many tokens before a place are those that the text ends with; 0 where no token follows.
static int32_t match_at(const struct index *index, uint32_t at, const int64_t *text, int64_t len) {
    const uint32_t age = index->size - at;
    if (age == 0 || age > index->held || token_at(index, at) < 0) return 0;
    int64_t most = len < MAX_MATCH ? len : MAX_MATCH;
    if (most > index->held - age) most = index->held - age;
    int32_t match = 0;
    for (; match < most; match++) {
        const int64_t token = text[len - 1 - match];
        if (token < 0 || token != token_at(index, at - 1 - (uint32_t)match)) break;
    }
    return match;
}

// Write the newest places of a context, up to MAX_PLACES; return how many there are.
static int find(const struct index *index, int order, uint64_t hash, const int64_t *text, int64_t len,
                struct place *places) {
    uint32_t at = *bucket(index, order, hash), age = 0;
    int num_places = 0;
    for (int step = 0; step < MAX_STEPS && num_places < MAX_PLACES; step++) {
        if (index->size - at <= age || index->size - at > index->held) break;
        age = index->size - at;
        const int32_t match = match_at(index, at, text, len);
        if (match >= (int32_t)ORDERS[order]) places[num_places++] = (struct place){at, match};
        at = *older(index, order, at);
    }
    return num_places;
}

// The same for the longest context that has any.
static int find_longest(const struct index *index, const int64_t *text, int64_t len, struct place *places) {
    uint64_t hashes[NUM_ORDERS], hash = 0;
    uint32_t num_hashed = 0;
    int order = 0;
    for (; order < NUM_ORDERS && ORDERS[order] <= len; order++) {
        for (; num_hashed < ORDERS[order]; num_hashed++) hash = mixed(hash, text[len - 1 - num_hashed]);
        hashes[order] = hash;
    }
    while (order--) {
        const int num_places = find(index, order, hashes[order], text, len, places);
        if (num_places) return num_places;
    }
    return 0;
}

// Add the place that was followed last time, unless it is there: it may be older than those that are looked at.
static int add_followed(const struct index *index, const struct reader *reader, int64_t len, struct place *places,
                        int num_places) {
    for (int i = 0; i < num_places; i++)
        if (places[i].at == reader->at) return num_places;
    const int32_t match = match_at(index, reader->at, reader->text, len);
    if (match) places[num_places++] = (struct place){reader->at, match};
    return num_places;
}

// Return what follows `done` tokens behind a place, below zero if nothing does. What a text repeats may reach its end,
// and then goes on with what is guessed.
static int32_t following(const struct index *index, const struct reader *reader, int64_t len, uint32_t at,
                         int64_t done) {
    if (index->size - at > done) return token_at(index, at + (uint32_t)done);
    if (!reader->is_own) return -1;
    const int64_t place = at + done;
    return place < len ? (int32_t)reader->text[place] : reader->guess[place - len];
}

// A place counts twice as much with each token more that is the same.
static double weight(const struct place *place) { return (double)(UINT64_C(1) << (place->match - 1)); }

// Choose the token that most weight is for, and keep the places that go on with it. Return its chance, 0 for none.
//
// Where contexts went on in two ways, a third is likelier than the counts say: the share of the weight is squared. And of
// texts that agree in `match` tokens about match / (match + 1) agree in the next one too: how long texts agree follows a
// power law. Both were found on code, JSON, quotes and prose, not derived.
static double choose(const int32_t *next, struct place *places, int *num_places, int64_t done, int32_t *token) {
    double all = 0, most = 0;
    uint32_t counted = 0; // places, by bit
    for (int i = 0; i < *num_places; i++) {
        if (counted >> i & 1) continue;
        double sum = 0;
        for (int j = i; j < *num_places; j++) {
            if (next[j] != next[i]) continue;
            sum += weight(&places[j]);
            counted |= UINT32_C(1) << j;
        }
        if (next[i] >= 0 && sum > most) most = sum, *token = next[i];
        all += sum;
    }
    if (most == 0) return 0;
    int num_kept = 0;
    double match = 0;
    for (int i = 0; i < *num_places; i++) {
        if (next[i] != *token) continue;
        if (places[i].match > match) match = places[i].match;
        places[num_kept++] = places[i];
    }
    *num_places = num_kept;
    match += (double)done;
    return most / all * (most / all) * match / (match + 1);
}

static uint32_t longest(const struct place *places, int num_places) {
    int best = 0;
    for (int i = 1; i < num_places; i++)
        if (places[i].match > places[best].match) best = i;
    return places[best].at;
}

// Guess how the text goes on behind its first `len` tokens; return how many tokens are guessed.
int64_t suffix_index_guess(const struct index *index, struct reader *reader, int64_t len, int64_t at_most) {
    struct place places[MAX_PLACES + 1];
    reader->at += (uint32_t)len - reader->seen;
    reader->seen = (uint32_t)len;
    int num_places = find_longest(index, reader->text, len, places);
    num_places = add_followed(index, reader, len, places, num_places);
    double chance = 1;
    int64_t done = 0;
    for (; done < at_most && num_places; done++) {
        int32_t next[MAX_PLACES + 1];
        for (int i = 0; i < num_places; i++) next[i] = following(index, reader, len, places[i].at, done);
        chance *= choose(next, places, &num_places, done, &reader->guess[done]);
        if (chance < MIN_CHANCE) break;
        reader->chances[done] = chance;
    }
    if (done) reader->at = longest(places, num_places);
    return done;
}
