/* A note to an engine that has nothing else to do is sent by the caller's thread: that saves it a wake-up of the other.
 *
 * The progress thread owns UCX and the links, and lends them to whoever holds its lock while it sleeps. Where a device has
 * to be entered, only the progress thread has.
 */
#ifndef KVT_SHORTCUT_H
#define KVT_SHORTCUT_H

#include "progress.h"

/* Run the one command there is, a note's, if the progress thread sleeps. Returns whether it may sleep on. */
static bool take_shortcut(kvt_engine *engine, kvt_link *link)
{
    if (engine->device != NULL || pthread_mutex_trylock(&engine->progress_lock) != 0)
        return false;
    run_commands(engine);
    if (link->state == LINK_UP)
        pump_operations(link);
    bool is_over = link->state == LINK_UP && link->num_requests == 0 && link->streams == NULL;
    pthread_mutex_unlock(&engine->progress_lock);
    return is_over;
}

#endif
