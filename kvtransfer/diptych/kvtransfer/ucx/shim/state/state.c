/* What every part asks of the state, and how any of them ends a link. */
#include <stdarg.h>
#include <stdio.h>

static uint64_t smaller(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

static bool is_reached(device_queue *queue, uint64_t mark)
{
    return queue->num_seen >= mark || atomic_load_explicit(&queue->num_reached, memory_order_acquire) >= mark;
}

static bool is_idle(device_queue *queue)
{
    return is_reached(queue, queue->num_marks);
}

/* Whether the program's own streams have done what the operation waits for. */
static bool is_open(kvt_engine *engine, const operation *op)
{
    return op->gate == 0 || is_reached(&engine->gate_queue, op->gate);
}

/* Safe inside UCX callbacks: only notes the reason; step_link acts on it. */
static void fail_link(kvt_link *link, const char *format, ...)
{
    if (link->state >= LINK_FAILED)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(link->reason, sizeof link->reason, format, arguments);
    va_end(arguments);
    link->state = LINK_FAILED;
}
