/* Which peer may write into which page of ours by messages. One-sided writes do not pass here.
 *
 * The caller grants and revokes; the progress thread looks, and holds the lock until the bytes are in the pool, or in
 * device memory until their copy is queued: no copy into a page begins after the page was revoked.
 */
#include <stdlib.h>

static bool open_grants(grant_table *grants, uint64_t num_pages)
{
    grants->peers = calloc(num_pages, sizeof *grants->peers);
    return grants->peers != NULL;
}

/* `peer` 0: revoke. */
static void set_grants(grant_table *grants, uint64_t peer, uint64_t num_pages, const int64_t *pages)
{
    if (grants->peers == NULL)
        return;
    pthread_mutex_lock(&grants->lock);
    for (uint64_t i = 0; i < num_pages; i++)
        grants->peers[pages[i]] = peer;
    pthread_mutex_unlock(&grants->lock);
}

/* Whether the peer may write into pages `first` to `last`. Needs the lock. */
static bool is_granted(const grant_table *grants, uint64_t peer, uint64_t first, uint64_t last)
{
    bool granted = true;
    for (uint64_t page = first; grants->peers != NULL && page <= last; page++)
        granted &= grants->peers[page] == peer || grants->peers[page] == KVT_ANY_PEER;
    return granted;
}
