/* What an engine that has nothing else to do can begin at once is begun by the caller's thread: that saves it a wake-up of
 * the other. A note leaves; a device that stores into the peer's memory is given its first pages.
 *
 * The progress thread owns UCX and the links, and lends them to whoever holds its lock while it sleeps.
 */

/* Copies and puts may take their time, and the caller has none. */
static bool is_quick(const kvt_link *link, bool is_note)
{
    return is_note || (link->engine->device != NULL && link->path == PATH_MOVER);
}

/* Run the one command there is, an operation's, if the progress thread sleeps. Returns whether it may sleep on. */
static bool take_shortcut(kvt_engine *engine, kvt_link *link, bool is_note)
{
    bool is_over = false;
    if (pthread_mutex_trylock(&engine->progress_lock) != 0)
        return false;
    if (is_quick(link, is_note) && (engine->device == NULL || engine->device->calls->enter(engine->device) == NULL)) {
        run_commands(engine);
        if (link->state == LINK_UP)
            pump_operations(link);
        is_over = link->state == LINK_UP && link->num_requests == 0 && link->num_pieces == 0 && link->streams == NULL;
    }
    pthread_mutex_unlock(&engine->progress_lock);
    return is_over;
}
