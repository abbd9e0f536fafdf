// The hashes of a prompt's pages, as `diptych.generation.page_hash` defines them.

#include "xxh3.h"

// Write one hash a page; each is the seed of the next. `page` has room for the tokens of one, 64 bits each.
void page_chain(uint64_t previous, const uint32_t *token_ids, int64_t num_pages, int64_t page_size, uint64_t *page,
                uint64_t *hashes) {
    for (int64_t i = 0; i < num_pages; i++, token_ids += page_size) {
        for (int64_t token = 0; token < page_size; token++)
            page[token] = token_ids[token];
        hashes[i] = previous = xxh3((const uint8_t *)page, (size_t)page_size * 8, previous);
    }
}
