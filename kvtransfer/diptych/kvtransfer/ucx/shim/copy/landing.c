/* Page messages on their way into a pool in device memory: through pinned slots, acknowledged when they are there. */

#define SLOTS_BYTES (MAX_PIECES * MESSAGE_BYTES)

_Static_assert(MOVE_SLOTS >= 3 * MAX_PIECES, "a piece may be packed, summed and moved by its queue");

static const device_calls *calls_of(const kvt_link *link)
{
    return link->engine->device->calls;
}

/* Returns whether the device did what it was asked to. */
static bool device_did(kvt_link *link, const char *trouble)
{
    if (trouble == NULL)
        return true;
    link->has_device_failed = true;
    fail_link(link, "the device failed: %s", trouble);
    return false;
}

/* A page message is on its way into the pool. A writer has at most MAX_PIECES of them unacknowledged. */
static char *begin_landing(kvt_link *link, uint64_t number)
{
    uint64_t slot = link->num_landings % MAX_PIECES;
    if (link->num_landings - link->num_landed == MAX_PIECES) {
        fail_link(link, "more page messages at once than a peer may send");
        return NULL;
    }
    link->landings[slot].number = number;
    return link->pinned + SLOTS_BYTES + slot * MESSAGE_BYTES;
}

static void land_bytes(kvt_link *link, char *pinned, uint64_t dst, const char *bytes, size_t len)
{
    memcpy(pinned, bytes, len);
    device_did(link, calls_of(link)->copy_in(&link->landing_queue, link->engine->pool + dst, pinned, len));
}

static void end_landing(kvt_link *link)
{
    if (device_did(link, calls_of(link)->mark(&link->landing_queue)))
        link->landings[link->num_landings++ % MAX_PIECES].mark = link->landing_queue.num_marks;
}

/* Returns whether page messages have arrived in the pool since the last call: they are acknowledged then. */
static bool settle_landings(kvt_link *link)
{
    uint64_t before = link->num_landed;
    while (link->num_landed < link->num_landings &&
           is_reached(&link->landing_queue, link->landings[link->num_landed % MAX_PIECES].mark))
        link->num_landed++;
    link->answer_due |= link->num_landed != before;
    return link->num_landed != before;
}
