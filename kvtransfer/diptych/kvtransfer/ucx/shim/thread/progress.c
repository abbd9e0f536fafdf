/* The progress thread: commands, UCX, links, and sleep when there is nothing to do. */
#include <poll.h>

#define MAX_PROGRESS_CALLS 256 /* in a row, before links get their turn */
#define CLOSE_TIMEOUT_S 2.0
#define LONGEST_SLEEP_S 60.0
#define CLOSING_TICK_S 0.002 /* UCX closes endpoints while it is called, without a wake-up for it */

static void use_path(kvt_link *link)
{
    pthread_mutex_lock(&link->engine->lock);
    link->path = (page_path)link->wanted_path;
    link->is_path_due = false;
    pthread_mutex_unlock(&link->engine->lock);
}

static void run_command(kvt_engine *engine, const command *command)
{
    switch (command->kind) {
    case COMMAND_CONNECT:
        open_link(engine, command->link);
        break;
    case COMMAND_DISCONNECT:
        fail_link(command->link, "disconnected");
        break;
    case COMMAND_SUBMIT:
        append_operation(command->link, command->op);
        break;
    case COMMAND_OWN_WORK:
        append_own_work(engine, command->op);
        break;
    case COMMAND_USE_PATH:
        use_path(command->link);
        break;
    }
}

static void run_commands(kvt_engine *engine)
{
    command *command = take_commands(engine), *next;
    for (; command != NULL; command = next) {
        next = command->next; /* the command may be gone once it ran */
        run_command(engine, command);
    }
}

static bool is_paused(kvt_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    if (engine->is_paused ? !notes_exceed(engine, 2) : notes_exceed(engine, 1))
        engine->is_paused = !engine->is_paused;
    bool paused = engine->is_paused;
    pthread_mutex_unlock(&engine->lock);
    return paused;
}

/* Let UCX work. Returns whether it has nothing more to do now. */
static bool progress_ucx(kvt_engine *engine)
{
    for (int i = 0; i < MAX_PROGRESS_CALLS && !is_paused(engine); i++)
        if (ucp_worker_progress(engine->worker) == 0)
            return true;
    return false;
}

static bool step_links(kvt_engine *engine, bool has_listened)
{
    bool busy = false;
    double now = now_s();
    for (kvt_link *link = engine->links, *next; link != NULL; link = next) {
        next = link->next; /* the link may be the caller's once it is down */
        busy |= step_link(link, now, has_listened);
    }
    return busy;
}

static double earlier(double one, double other)
{
    return one < other ? one : other;
}

static double link_due_s(const kvt_link *link, double now)
{
    double due = link->hello_due_s;
    if (link->state > LINK_UP)
        return now + CLOSING_TICK_S;
    if (link->engine->is_paused)
        return due; /* nobody's silence counts */
    if (link->state == LINK_CONNECTING)
        return earlier(due, link->deadline_s);
    return deadline_due_s(link, earlier(due, atomic_load(&link->last_heard_s) + link->engine->silence_s));
}

static double next_due_s(const kvt_engine *engine, double now)
{
    double due = now + LONGEST_SLEEP_S;
    for (const kvt_link *link = engine->links; link != NULL; link = link->next)
        due = earlier(due, link_due_s(link, now));
    return due;
}

/* Wait for a command, for UCX, or for the time of the next heartbeat. */
static void sleep_until_due(kvt_engine *engine, bool paused)
{
    if (!paused && ucp_worker_arm(engine->worker) != UCS_OK)
        return; /* something came in meanwhile */
    double now = now_s(), wait_s = next_due_s(engine, now) - now;
    struct pollfd fds[2] = {{engine->wake_fd, POLLIN, 0}, {engine->worker_fd, POLLIN, 0}};
    pthread_mutex_unlock(&engine->progress_lock);
    poll(fds, paused ? 1 : 2, wait_s > 0 ? (int)(wait_s * 1000) + 1 : 0);
    pthread_mutex_lock(&engine->progress_lock);
    if (fds[0].revents)
        clear_fd(engine->wake_fd);
}

/* Whether a device will have ended a piece soon. */
static bool is_hot(const kvt_engine *engine)
{
    bool has_pieces = false;
    for (const kvt_link *link = engine->links; link != NULL && engine->device != NULL; link = link->next)
        has_pieces |= link->num_pieces > 0;
    return has_pieces && now_s() < engine->hot_until_s;
}

static bool is_stopping(kvt_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    bool stopping = engine->is_stopping;
    pthread_mutex_unlock(&engine->lock);
    return stopping;
}

/* Silence is silence only when we listened: not while receiving is paused, and after a pause (or when this process was
 * stopped) not before we have looked at what had arrived, or have tried to for as long as silence may last. */
static bool has_listened(kvt_engine *engine, bool is_drained, bool paused)
{
    if (is_drained || paused)
        engine->behind_since_s = 0;
    else if (engine->behind_since_s == 0)
        engine->behind_since_s = now_s();
    else if (now_s() > engine->behind_since_s + engine->silence_s)
        return true;
    return is_drained && !paused;
}

static void turn(kvt_engine *engine, bool may_sleep)
{
    run_commands(engine);
    bool is_drained = progress_ucx(engine);
    bool paused = is_paused(engine);
    bool busy = step_links(engine, has_listened(engine, is_drained, paused)) | do_some_own_work(engine);
    if (!busy && (is_drained || paused) && may_sleep && !is_hot(engine))
        sleep_until_due(engine, paused);
}

static void *run_progress(void *arg)
{
    kvt_engine *engine = arg;
    pthread_setname_np(pthread_self(), "kv-transfer");
    pthread_mutex_lock(&engine->progress_lock);
    if (engine->device != NULL)
        engine->device->calls->enter(engine->device);
    while (!is_stopping(engine))
        turn(engine, true);
    run_commands(engine);
    for (kvt_link *link = engine->links; link != NULL; link = link->next)
        fail_link(link, "this engine is closing");
    double give_up_s = now_s() + CLOSE_TIMEOUT_S;
    while (engine->links != NULL && now_s() < give_up_s)
        turn(engine, false);
    pthread_mutex_unlock(&engine->progress_lock);
    return NULL;
}
