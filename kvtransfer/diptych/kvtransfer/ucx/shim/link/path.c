/* Finds how pages can travel on a link that came up, takes the best, and prepares it. See copy/host_pages.c and copy/device_pages.c. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#define POPULATE_BYTES ((size_t)32 << 20) /* at a time */

static bool has_remote_memory_access(const char *transport)
{
    static const char *const without[] = {"tcp", "sysv", "posix", "cma", "self", "ud", "cuda_copy", "gdr_copy"};
    for (size_t i = 0; i < sizeof without / sizeof without[0]; i++)
        if (strncmp(transport, without[i], strlen(without[i])) == 0)
            return false;
    return true;
}

/* Name the lanes of the endpoint. Returns whether one of them can put. */
static bool name_lanes(kvt_link *link)
{
    bool can_put = false;
    ucp_transport_entry_t entries[16] = {{NULL, NULL}};
    ucp_ep_attr_t attributes = {
        .field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS,
        .transports = {.entries = entries, .num_entries = 16, .entry_size = sizeof entries[0]},
    };
    if (ucp_ep_query(link->ep, &attributes) != UCS_OK)
        return false;
    size_t used = 0;
    for (unsigned i = 0; i < attributes.transports.num_entries && used < sizeof link->lanes; i++)
        if (entries[i].transport_name != NULL) {
            can_put |= has_remote_memory_access(entries[i].transport_name);
            used += (size_t)snprintf(link->lanes + used, sizeof link->lanes - used, "%s%s/%s", used ? ", " : "",
                                     entries[i].transport_name, entries[i].device_name);
        }
    return can_put;
}

/* The page table of a mapped pool is still empty. It is filled a part at a time, between other work, so that the first
 * writes do not pay for it. */
static void plan_populate(kvt_link *link)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    link->populate = (char *)((uintptr_t)link->mapped_pool & ~(page - 1));
    link->populate_end = link->mapped_pool + link->num_pages * link->page_nbytes;
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

/* The paths are numbered from the best to the worst. */
static void take_best_path(kvt_link *link)
{
    int32_t path = 0;
    while (!(link->paths >> path & 1))
        path++;
    link->path = (page_path)path;
}

static void find_paths(kvt_link *link)
{
    void *mapped;
    bool has_key = link->rkey != NULL, can_put = name_lanes(link) && has_key, has_device = link->engine->device != NULL;
    link->paths = 1u << (has_device ? PATH_STAGED : PATH_MESSAGE);
    if (has_key && !has_device && ucp_rkey_ptr(link->rkey, link->pool_base, &mapped) == UCS_OK) {
        link->paths |= 1u << PATH_COPY;
        link->mapped_pool = mapped;
        plan_populate(link);
    }
    if ((can_put || link->mapped_pool != NULL) && link->engine->with_remote_access) /* what is mapped as well */
        link->paths |= 1u << PATH_PUT;
    if (link->device_pool != NULL)
        link->paths |= 1u << PATH_MOVER;
    take_best_path(link);
}
