/* Takes the page faults out of the first writes.
 *
 * Where the peer's pool is mapped into this process (shared memory), the page table of the mapping is still empty when a
 * link comes up. It is filled a part at a time, between other work.
 */
#ifndef KVT_POPULATE_H
#define KVT_POPULATE_H

#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#define POPULATE_BYTES ((size_t)32 << 20) /* at a time */

static void plan_populate(kvt_link *link)
{
    void *local;
    if (ucp_rkey_ptr(link->rkey, link->pool_base, &local) != UCS_OK)
        return;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    link->populate = (char *)((uintptr_t)local & ~(page - 1));
    link->populate_end = (char *)local + link->num_pages * link->engine->page_bytes;
}

static bool populate_some(kvt_link *link)
{
    if (link->populate >= link->populate_end)
        return false;
    size_t left = (size_t)(link->populate_end - link->populate);
    size_t len = left < POPULATE_BYTES ? left : POPULATE_BYTES;
    if (madvise(link->populate, len, MADV_POPULATE_WRITE) != 0)
        link->populate = link->populate_end; /* an older kernel: the first writes do it */
    else
        link->populate += len;
    return true;
}

#endif
