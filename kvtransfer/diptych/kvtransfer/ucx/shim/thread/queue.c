/* The two queues between the caller's thread and the progress thread: commands in, events out. */
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void set_fd(int fd)
{
    ssize_t written = write(fd, &(uint64_t){1}, sizeof(uint64_t));
    (void)written; /* fails only when the counter is full, and then the descriptor is readable */
}

static void clear_fd(int fd)
{
    uint64_t count;
    ssize_t got = read(fd, &count, sizeof count);
    (void)got; /* fails only when there is nothing to clear */
}

/* Needs the lock. */
static void append_event(kvt_engine *engine, event_node *node)
{
    node->next = NULL;
    if (engine->events.head == NULL) {
        engine->events.head = node;
        set_fd(engine->event_fd);
    } else {
        engine->events.tail->next = node;
    }
    engine->events.tail = node;
}

static void push_event(kvt_engine *engine, event_node *node)
{
    pthread_mutex_lock(&engine->lock);
    append_event(engine, node);
    pthread_mutex_unlock(&engine->lock);
}

/* Needs the lock. */
static event_node *pop_event(kvt_engine *engine)
{
    event_node *node = engine->events.head;
    if (node == NULL)
        return NULL;
    engine->events.head = node->next;
    if (node->next == NULL)
        clear_fd(engine->event_fd);
    return node;
}

/* Whether the caller lets notes pile up. It wakes us below half of the limits, so that we do not stutter. Needs the lock. */
static bool notes_exceed(const kvt_engine *engine, size_t part)
{
    return engine->num_notes_waiting * part > engine->max_waiting_notes ||
           engine->note_bytes_waiting * part > MAX_NOTE_BYTES;
}

/* Give back what the event held. Needs the lock. */
static void settle_event(kvt_engine *engine, const event_node *node)
{
    if (node->event.kind == KVT_OP_DONE) {
        const operation *op = node->memory;
        engine->num_ops_open--;
        engine->note_bytes_open -= op->note_len;
        if (op->link != NULL)
            op->link->num_ops_open--;
    } else if (node->event.kind == KVT_NOTE) {
        engine->num_notes_waiting--;
        engine->note_bytes_waiting -= node->event.data_len;
    }
}

/* Returns whether it is the only one. Needs the lock. */
static bool append_command_quietly(kvt_engine *engine, command *command)
{
    bool is_first = engine->commands.head == NULL;
    command->next = NULL;
    if (is_first)
        engine->commands.head = command;
    else
        engine->commands.tail->next = command;
    engine->commands.tail = command;
    return is_first;
}

/* Needs the lock. */
static void append_command(kvt_engine *engine, command *command)
{
    if (append_command_quietly(engine, command))
        set_fd(engine->wake_fd);
}

static command *take_commands(kvt_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    command *commands = engine->commands.head;
    engine->commands.head = NULL;
    pthread_mutex_unlock(&engine->lock);
    return commands;
}

static void free_spent(kvt_engine *engine)
{
    while (engine->spent != NULL) {
        event_node *node = engine->spent;
        engine->spent = node->next;
        free(node->memory);
    }
}
