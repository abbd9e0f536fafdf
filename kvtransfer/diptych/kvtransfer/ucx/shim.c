/* See shim.h. Three parts: the queues between the caller and the engine's thread; links and operations; the thread. */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum { AM_ID = 7, CONNECT_HELLOS_PER_S = 20, MAX_CLOSE_S = 1 };

typedef enum { HEARTBEAT = 1, NOTE = 2 } message_kind_t;

/* In front of every message. A link number names one life of a link; it rises with each connect of a process. */
typedef struct {
    uint64_t sender, target;
    uint64_t link; /* the sender's */
    uint64_t echo; /* the last one that the sender heard from the target; 0: none */
    uint64_t kind;
} header_t;

typedef enum { CONNECTING, UP, CLOSING } link_state_t;

typedef struct operation {
    uint64_t id, peer;
    size_t piece_bytes, count, next; /* next: first piece not posted */
    uint64_t *source, *target;
    void *note;
    size_t note_length;
    header_t header;
    bool flushed, note_sent;
    struct operation *after;
} operation_t;

typedef struct link {
    uint64_t peer, number, heard_number;
    link_state_t state;
    ucp_ep_h endpoint;
    ucp_rkey_h key;
    uint64_t remote_base, remote_bytes, bytes_sent;
    double since, last_heard, next_heartbeat;
    operation_t *first, *last; /* in order; only the first is in progress */
    size_t in_flight;          /* UCX requests not yet complete: of the first operation, and heartbeats */
    bool heartbeat_in_flight;
    header_t heartbeat;
    ucs_status_t failure; /* of the link, noted in callbacks */
    ucs_status_t op_failure;
    const char *reason;
    void *close_request;
    char *lanes; /* in words, once the link is up */
    struct link *after;
} link_t;

typedef enum { CONNECT, DISCONNECT, SUBMIT, CLOSE } command_kind_t;

typedef struct command {
    command_kind_t kind;
    uint64_t peer;
    void *address, *key;
    uint64_t remote_base, remote_bytes;
    operation_t *operation;
    struct command *after;
} command_t;

typedef struct known_peer {
    uint64_t peer, remote_bytes;
    struct known_peer *after;
} known_peer_t;

typedef struct event_node {
    kvt_event_t event;
    struct event_node *after;
} event_node_t;

struct kvt_engine {
    kvt_options_t options;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h memory;
    char *base;
    size_t num_bytes;
    int ucx_fd, wake_fd, event_fd;
    pthread_t thread;
    bool started, closing;
    double closing_since;
    link_t *links; /* the thread's own; `mutex` guards the list for kvt_describe */
    uint64_t next_link;
    uint64_t stale_messages;

    pthread_mutex_t mutex; /* guards everything below */
    command_t *first_command, *last_command;
    event_node_t *first_event, *last_event;
    uint64_t next_op, num_operations, num_waiting_notes;
    bool throttled;
    known_peer_t *known; /* links the caller may write to */
};

static double now_s(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void *copy_of(const void *data, size_t length) {
    void *copy = malloc(length ? length : 1);
    if (copy && length) memcpy(copy, data, length);
    return copy;
}

static void signal_fd(int fd) {
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

static void drain_fd(int fd) {
    uint64_t count;
    while (read(fd, &count, sizeof count) < 0 && errno == EINTR) {}
}

/* ---- queues ---- */

static void push_event(kvt_engine_t *engine, kvt_event_t event) {
    event_node_t *node = calloc(1, sizeof *node);
    node->event = event;
    pthread_mutex_lock(&engine->mutex);
    if (engine->last_event) engine->last_event->after = node;
    else engine->first_event = node;
    engine->last_event = node;
    if (event.kind == KVT_NOTE) engine->num_waiting_notes++;
    signal_fd(engine->event_fd);
    pthread_mutex_unlock(&engine->mutex);
}

static void push_command(kvt_engine_t *engine, command_t *command) {
    if (engine->last_command) engine->last_command->after = command;
    else engine->first_command = command;
    engine->last_command = command;
}

static void submit_command(kvt_engine_t *engine, command_t *command) {
    pthread_mutex_lock(&engine->mutex);
    push_command(engine, command);
    pthread_mutex_unlock(&engine->mutex);
    signal_fd(engine->wake_fd);
}

static command_t *take_commands(kvt_engine_t *engine) {
    pthread_mutex_lock(&engine->mutex);
    command_t *commands = engine->first_command;
    engine->first_command = engine->last_command = NULL;
    pthread_mutex_unlock(&engine->mutex);
    return commands;
}

static known_peer_t **find_known(kvt_engine_t *engine, uint64_t peer) {
    known_peer_t **at = &engine->known;
    while (*at && (*at)->peer != peer) at = &(*at)->after;
    return at;
}

static void forget_known(kvt_engine_t *engine, uint64_t peer) {
    pthread_mutex_lock(&engine->mutex);
    known_peer_t **at = find_known(engine, peer);
    if (*at) {
        known_peer_t *gone = *at;
        *at = gone->after;
        free(gone);
    }
    pthread_mutex_unlock(&engine->mutex);
}

/* ---- operations ---- */

static void free_operation(operation_t *operation) {
    free(operation->source);
    free(operation->target);
    free(operation->note);
    free(operation);
}

static void end_operation(kvt_engine_t *engine, operation_t *operation, ucs_status_t status) {
    pthread_mutex_lock(&engine->mutex);
    engine->num_operations--;
    pthread_mutex_unlock(&engine->mutex);
    kvt_event_t event = {.kind = KVT_OP_DONE, .status = status, .peer = operation->peer, .op = operation->id};
    free_operation(operation);
    push_event(engine, event);
}

static void end_first_operation(kvt_engine_t *engine, link_t *link, ucs_status_t status) {
    operation_t *operation = link->first;
    link->first = operation->after;
    if (!link->first) link->last = NULL;
    link->op_failure = UCS_OK;
    end_operation(engine, operation, status);
}

static void request_done(void *request, ucs_status_t status, void *argument) {
    link_t *link = argument;
    link->in_flight--;
    if (status != UCS_OK && link->op_failure == UCS_OK) link->op_failure = status;
    ucp_request_free(request);
}

static void heartbeat_done(void *request, ucs_status_t status, void *argument) {
    link_t *link = argument;
    (void)status; /* a link that can't carry a heartbeat is noticed by its error handler or by silence */
    link->in_flight--;
    link->heartbeat_in_flight = false;
    ucp_request_free(request);
}

static ucp_request_param_t parameters(link_t *link, ucp_send_nbx_callback_t done) {
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .user_data = link};
    param.cb.send = done;
    return param;
}

/* Count a request of the first operation that is under way, or note that it failed at once. */
static void track(link_t *link, ucs_status_ptr_t request) {
    if (UCS_PTR_IS_ERR(request)) link->op_failure = UCS_PTR_STATUS(request);
    else if (request != NULL) link->in_flight++;
}

static header_t make_header(kvt_engine_t *engine, link_t *link, message_kind_t kind) {
    return (header_t){engine->options.instance_id, link->peer, link->number, link->heard_number, kind};
}

/* Post pieces, neighbours merged, up to what one flush may cover. */
static void post_pieces(kvt_engine_t *engine, link_t *link, operation_t *op) {
    ucp_request_param_t param = parameters(link, request_done);
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = engine->memory;
    uint64_t posted = 0;
    while (op->next < op->count && posted < engine->options.max_posted_bytes && link->op_failure == UCS_OK) {
        size_t first = op->next, run = 1;
        while (first + run < op->count && op->source[first + run] == op->source[first] + run &&
               op->target[first + run] == op->target[first] + run &&
               posted + run * op->piece_bytes < engine->options.max_posted_bytes)
            run++;
        size_t bytes = run * op->piece_bytes;
        track(link, ucp_put_nbx(link->endpoint, engine->base + op->source[first] * op->piece_bytes, bytes,
                                link->remote_base + op->target[first] * op->piece_bytes, link->key, &param));
        op->next += run;
        posted += bytes;
    }
    link->bytes_sent += posted;
    op->flushed = false;
}

static void send_note(kvt_engine_t *engine, link_t *link, operation_t *op) {
    ucp_request_param_t param = parameters(link, request_done);
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    op->header = make_header(engine, link, NOTE);
    op->note_sent = true;
    track(link, ucp_am_send_nbx(link->endpoint, AM_ID, &op->header, sizeof op->header, op->note, op->note_length, &param));
}

/* Take the first operation one stage further: pieces, flush, pieces, flush, ..., note. Returns false when it must wait. */
static bool advance(kvt_engine_t *engine, link_t *link) {
    operation_t *op = link->first;
    if (link->state != UP || !op || link->in_flight > (link->heartbeat_in_flight ? 1u : 0u)) return false;
    if (link->op_failure != UCS_OK) {
        end_first_operation(engine, link, link->op_failure);
    } else if (!op->flushed && op->next > 0) {
        ucp_request_param_t param = parameters(link, request_done);
        op->flushed = true;
        track(link, ucp_ep_flush_nbx(link->endpoint, &param));
    } else if (op->next < op->count) {
        post_pieces(engine, link, op);
    } else if (op->note && !op->note_sent) {
        send_note(engine, link, op);
    } else {
        end_first_operation(engine, link, UCS_OK);
    }
    return true;
}

/* ---- links ---- */

static link_t *find_link(kvt_engine_t *engine, uint64_t peer) {
    link_t *link = engine->links;
    while (link && link->peer != peer) link = link->after;
    return link;
}

static void on_endpoint_error(void *argument, ucp_ep_h endpoint, ucs_status_t status) {
    link_t *link = argument;
    (void)endpoint;
    if (link->failure == UCS_OK) link->failure = status;
}

static void give_up(link_t *link, const char *reason, ucs_status_t status) {
    if (link->reason) return;
    link->reason = reason;
    if (link->failure == UCS_OK) link->failure = status;
}

static void push_link_down(kvt_engine_t *engine, uint64_t peer, ucs_status_t status, const char *reason) {
    forget_known(engine, peer);
    push_event(engine, (kvt_event_t){.kind = KVT_LINK_DOWN, .status = status, .peer = peer, .reason = reason});
}

static void open_link(kvt_engine_t *engine, command_t *command) {
    link_t *link = calloc(1, sizeof *link);
    double now = now_s();
    *link = (link_t){.peer = command->peer, .number = ++engine->next_link, .remote_base = command->remote_base,
                     .remote_bytes = command->remote_bytes, .since = now, .last_heard = now, .next_heartbeat = now};
    ucp_ep_params_t param = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                           UCP_EP_PARAM_FIELD_ERR_HANDLER,
                             .address = command->address, .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                             .err_handler = {on_endpoint_error, link}};
    ucs_status_t status = ucp_ep_create(engine->worker, &param, &link->endpoint);
    if (status != UCS_OK) {
        push_link_down(engine, link->peer, status, "no endpoint could be made");
        free(link);
        return;
    }
    status = ucp_ep_rkey_unpack(link->endpoint, command->key, &link->key);
    if (status != UCS_OK) give_up(link, "the peer's pool can't be reached", status);
    pthread_mutex_lock(&engine->mutex);
    link->after = engine->links;
    engine->links = link;
    pthread_mutex_unlock(&engine->mutex);
}

static void send_heartbeat(kvt_engine_t *engine, link_t *link, double now) {
    double interval = link->state == UP ? engine->options.heartbeat_s : 1.0 / CONNECT_HELLOS_PER_S;
    link->next_heartbeat = now + interval;
    if (link->heartbeat_in_flight) return; /* the peer takes nothing now: its silence will tell */
    ucp_request_param_t param = parameters(link, heartbeat_done);
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    link->heartbeat = make_header(engine, link, HEARTBEAT);
    ucs_status_ptr_t request =
        ucp_am_send_nbx(link->endpoint, AM_ID, &link->heartbeat, sizeof link->heartbeat, NULL, 0, &param);
    if (UCS_PTR_IS_PTR(request)) {
        link->in_flight++;
        link->heartbeat_in_flight = true;
    }
}

static void note_lanes(kvt_engine_t *engine, link_t *link) {
    char *text = NULL;
    size_t length = 0;
    FILE *file = open_memstream(&text, &length);
    ucp_ep_print_info(link->endpoint, file);
    fclose(file);
    pthread_mutex_lock(&engine->mutex);
    link->lanes = text;
    pthread_mutex_unlock(&engine->mutex);
}

static void link_heard(kvt_engine_t *engine, link_t *link, const header_t *header) {
    if (header->link < link->heard_number) return; /* from a former life of the link */
    if (header->link > link->heard_number) {
        if (link->state == UP) give_up(link, "the peer started a new link", UCS_ERR_CONNECTION_RESET);
        link->heard_number = header->link;
        link->next_heartbeat = 0; /* answer at once */
    }
    link->last_heard = now_s();
    if (link->state == CONNECTING && header->echo == link->number) {
        link->state = UP;
        link->next_heartbeat = 0;
        note_lanes(engine, link);
        push_event(engine, (kvt_event_t){.kind = KVT_LINK_UP, .peer = link->peer});
    }
}

static ucs_status_t on_message(void *argument, const void *header_data, size_t header_length, void *data, size_t length,
                               const ucp_am_recv_param_t *param) {
    kvt_engine_t *engine = argument;
    header_t header;
    if (header_length != sizeof header || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) return UCS_OK;
    memcpy(&header, header_data, sizeof header);
    if (header.target != engine->options.instance_id) {
        __atomic_add_fetch(&engine->stale_messages, 1, __ATOMIC_RELAXED);
        return UCS_OK;
    }
    link_t *link = find_link(engine, header.sender);
    if (!link || link->state == CLOSING) return UCS_OK; /* not connected (yet): the peer will ask again */
    link_heard(engine, link, &header);
    if (header.kind == NOTE && link->state == UP && !link->reason && header.echo == link->number)
        push_event(engine, (kvt_event_t){.kind = KVT_NOTE, .peer = header.sender, .length = length,
                                         .data = copy_of(data, length)});
    return UCS_OK;
}

static void start_closing(link_t *link) {
    link->state = CLOSING;
    if (link->key) ucp_rkey_destroy(link->key);
    link->key = NULL;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    link->close_request = ucp_ep_close_nbx(link->endpoint, &param);
}

static bool is_closed(link_t *link) {
    if (UCS_PTR_IS_PTR(link->close_request)) {
        if (ucp_request_check_status(link->close_request) == UCS_INPROGRESS) return false;
        ucp_request_free(link->close_request);
        link->close_request = NULL;
    }
    return link->in_flight == 0;
}

/* The contract of shim.h: every operation ends, then the link is reported down. */
static void finish_closing(kvt_engine_t *engine, link_t *link) {
    ucs_status_t status = link->failure != UCS_OK ? link->failure : UCS_ERR_CANCELED;
    while (link->first) end_first_operation(engine, link, status);
    pthread_mutex_lock(&engine->mutex);
    link_t **at = &engine->links;
    while (*at != link) at = &(*at)->after;
    *at = link->after;
    pthread_mutex_unlock(&engine->mutex);
    push_link_down(engine, link->peer, status, link->reason);
    free(link->lanes);
    free(link);
}

static void watch_link(kvt_engine_t *engine, link_t *link, double now) {
    if (link->failure != UCS_OK) give_up(link, "the endpoint failed", link->failure);
    if (link->state == CONNECTING && now - link->since > engine->options.connect_s)
        give_up(link, "the peer did not answer", UCS_ERR_TIMED_OUT);
    if (link->state == UP && !engine->throttled && now - link->last_heard > engine->options.silence_s)
        give_up(link, "the peer fell silent", UCS_ERR_TIMED_OUT);
    if (link->reason && link->state != CLOSING) start_closing(link);
    if (link->state != CLOSING && now >= link->next_heartbeat) send_heartbeat(engine, link, now);
}

/* ---- the thread ---- */

static void submit(kvt_engine_t *engine, operation_t *operation) {
    link_t *link = find_link(engine, operation->peer);
    if (!link || link->state == CLOSING || link->reason) {
        end_operation(engine, operation, UCS_ERR_UNREACHABLE);
        return;
    }
    if (link->last) link->last->after = operation;
    else link->first = operation;
    link->last = operation;
}

static void execute(kvt_engine_t *engine, command_t *command) {
    link_t *link = find_link(engine, command->peer);
    switch (command->kind) {
    case CONNECT: open_link(engine, command); break;
    case DISCONNECT:
        if (link) give_up(link, "closed by us", UCS_ERR_CANCELED);
        break;
    case SUBMIT: submit(engine, command->operation); break;
    case CLOSE:
        engine->closing = true;
        engine->closing_since = now_s();
        for (link = engine->links; link; link = link->after) give_up(link, "closed by us", UCS_ERR_CANCELED);
        break;
    }
    free(command->address);
    free(command->key);
    free(command);
}

static void execute_all(kvt_engine_t *engine) {
    for (command_t *command = take_commands(engine), *after; command; command = after) {
        after = command->after;
        execute(engine, command);
    }
}

static bool is_throttled(kvt_engine_t *engine) {
    pthread_mutex_lock(&engine->mutex);
    engine->throttled = engine->num_waiting_notes > engine->options.max_waiting_notes;
    bool throttled = engine->throttled;
    pthread_mutex_unlock(&engine->mutex);
    return throttled;
}

/* Progress UCX and every link's operation; true while there was something to do. */
static bool work(kvt_engine_t *engine) {
    bool did_something = false;
    if (!is_throttled(engine))
        for (int round = 0; round < 64 && ucp_worker_progress(engine->worker); round++) did_something = true;
    for (link_t *link = engine->links; link; link = link->after)
        if (!link->reason && advance(engine, link)) did_something = true;
    return did_something;
}

static double watch_links(kvt_engine_t *engine, double now) {
    double next = now + 60.0;
    for (link_t *link = engine->links, *after; link; link = after) {
        after = link->after;
        watch_link(engine, link, now);
        if (link->state == CLOSING && is_closed(link)) {
            finish_closing(engine, link);
            continue;
        }
        double due = link->state == CLOSING ? now + 0.001 : link->next_heartbeat;
        if (due < next) next = due;
    }
    return next;
}

/* A gap means that this process was stopped or starved: that is no silence of the peers'. */
static void forgive_gap(kvt_engine_t *engine, double gap) {
    if (gap < engine->options.heartbeat_s) return;
    for (link_t *link = engine->links; link; link = link->after) {
        link->last_heard += gap;
        link->since += gap;
    }
}

static void sleep_until(kvt_engine_t *engine, double until, bool throttled) {
    if (!throttled && ucp_worker_arm(engine->worker) != UCS_OK) return; /* busy: there is something to progress */
    struct pollfd fds[] = {{engine->wake_fd, POLLIN, 0}, {engine->ucx_fd, POLLIN, 0}};
    double left = until - now_s();
    int timeout_ms = left <= 0 ? 0 : (int)(left * 1000) + 1;
    if (poll(fds, throttled ? 1 : 2, timeout_ms) > 0 && (fds[0].revents & POLLIN)) drain_fd(engine->wake_fd);
}

static void *run(void *argument) {
    kvt_engine_t *engine = argument;
    pthread_setname_np(pthread_self(), "kvtransfer");
    double awake = now_s();
    while (!engine->closing || (engine->links && now_s() < engine->closing_since + MAX_CLOSE_S)) {
        double now = now_s();
        forgive_gap(engine, now - awake);
        awake = now;
        execute_all(engine);
        bool busy = work(engine);
        double next = watch_links(engine, now_s());
        if (busy || (engine->closing && !engine->links)) continue;
        sleep_until(engine, next, engine->throttled);
        awake = now_s() < next + 0.1 ? now_s() : next + 0.1; /* what we slept on purpose is no gap */
    }
    return NULL;
}

/* ---- calls ---- */

static ucs_status_t apply_settings(ucp_config_t *config, const char *settings) {
    char *copy = strdup(settings), *rest = NULL;
    ucs_status_t status = UCS_OK;
    for (char *item = strtok_r(copy, ";", &rest); item && status == UCS_OK; item = strtok_r(NULL, ";", &rest)) {
        char *value = strchr(item, '=');
        *value++ = 0;
        status = ucp_config_modify(config, item, value);
        if (status != UCS_OK) fprintf(stderr, "kvtransfer: UCX does not take %s=%s\n", item, value);
    }
    free(copy);
    return status;
}

static ucs_status_t open_worker(kvt_engine_t *engine, const char *settings) {
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) return status;
    status = apply_settings(config, settings);
    ucp_params_t param = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                          .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    if (status == UCS_OK) status = ucp_init(&param, config, &engine->context);
    ucp_config_release(config);
    if (status != UCS_OK) return status;
    ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    if ((status = ucp_worker_create(engine->context, &worker, &engine->worker)) != UCS_OK) return status;
    ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                                                    UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS,
                                      .id = AM_ID, .flags = UCP_AM_FLAG_WHOLE_MSG, .cb = on_message, .arg = engine};
    if ((status = ucp_worker_set_am_recv_handler(engine->worker, &handler)) != UCS_OK) return status;
    return ucp_worker_get_efd(engine->worker, &engine->ucx_fd);
}

static void free_engine(kvt_engine_t *engine) {
    if (engine->memory) ucp_mem_unmap(engine->context, engine->memory);
    if (engine->worker) ucp_worker_destroy(engine->worker);
    if (engine->context) ucp_cleanup(engine->context);
    close(engine->wake_fd);
    close(engine->event_fd);
    pthread_mutex_destroy(&engine->mutex);
    free(engine);
}

kvt_engine_t *kvt_open(const kvt_options_t *options, const char *settings, int *status) {
    kvt_engine_t *engine = calloc(1, sizeof *engine);
    engine->options = *options;
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&engine->mutex, NULL);
    *status = open_worker(engine, settings);
    if (*status == UCS_OK) return engine;
    free_engine(engine);
    return NULL;
}

int kvt_allocate(kvt_engine_t *engine, size_t num_bytes, void **address) {
    ucp_mem_map_params_t param = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                                                UCP_MEM_MAP_PARAM_FIELD_FLAGS,
                                  .length = num_bytes, .flags = UCP_MEM_MAP_ALLOCATE};
    ucs_status_t status = ucp_mem_map(engine->context, &param, &engine->memory);
    if (status != UCS_OK) return status;
    ucp_mem_attr_t attributes = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    if ((status = ucp_mem_query(engine->memory, &attributes)) != UCS_OK) return status;
    memset(attributes.address, 0, num_bytes);
    *address = engine->base = attributes.address;
    engine->num_bytes = num_bytes;
    return UCS_OK;
}

int kvt_start(kvt_engine_t *engine) {
    engine->started = pthread_create(&engine->thread, NULL, run, engine) == 0;
    return engine->started ? UCS_OK : UCS_ERR_NO_RESOURCE;
}

static int64_t copy_out(const void *data, size_t length, void *out, size_t capacity) {
    if (length > capacity) return KVT_OUT_OF_RANGE;
    memcpy(out, data, length);
    return (int64_t)length;
}

int64_t kvt_worker_address(kvt_engine_t *engine, void *out, size_t capacity) {
    ucp_address_t *address;
    size_t length;
    ucs_status_t status = ucp_worker_get_address(engine->worker, &address, &length);
    if (status != UCS_OK) return status;
    int64_t copied = copy_out(address, length, out, capacity);
    ucp_worker_release_address(engine->worker, address);
    return copied;
}

int64_t kvt_pool_key(kvt_engine_t *engine, void *out, size_t capacity) {
    void *key;
    size_t length;
    ucs_status_t status = ucp_rkey_pack(engine->context, engine->memory, &key, &length);
    if (status != UCS_OK) return status;
    int64_t copied = copy_out(key, length, out, capacity);
    ucp_rkey_buffer_release(key);
    return copied;
}

int kvt_connect(kvt_engine_t *engine, uint64_t peer, const void *address, size_t address_length, const void *key,
                size_t key_length, uint64_t remote_base, uint64_t remote_bytes) {
    pthread_mutex_lock(&engine->mutex);
    known_peer_t **at = find_known(engine, peer);
    if (!*at) {
        *at = calloc(1, sizeof **at);
        **at = (known_peer_t){peer, remote_bytes, NULL};
        command_t *command = calloc(1, sizeof *command);
        *command = (command_t){.kind = CONNECT, .peer = peer, .address = copy_of(address, address_length),
                               .key = copy_of(key, key_length), .remote_base = remote_base,
                               .remote_bytes = remote_bytes};
        push_command(engine, command);
    }
    pthread_mutex_unlock(&engine->mutex);
    signal_fd(engine->wake_fd);
    return UCS_OK;
}

void kvt_disconnect(kvt_engine_t *engine, uint64_t peer) {
    command_t *command = calloc(1, sizeof *command);
    *command = (command_t){.kind = DISCONNECT, .peer = peer};
    submit_command(engine, command);
}

static bool in_range(const uint64_t *offsets, size_t count, size_t piece_bytes, uint64_t num_bytes) {
    for (size_t i = 0; i < count; i++)
        if (offsets[i] >= num_bytes / piece_bytes) return false;
    return true;
}

int64_t kvt_write(kvt_engine_t *engine, uint64_t peer, size_t piece_bytes, size_t count, const uint64_t *source,
                  const uint64_t *target, const void *note, size_t note_length) {
    int64_t result = 0;
    pthread_mutex_lock(&engine->mutex);
    known_peer_t *known = *find_known(engine, peer);
    if (!known) result = KVT_UNKNOWN_PEER;
    else if (engine->num_operations >= engine->options.max_operations) result = KVT_QUEUE_FULL;
    else if (!in_range(source, count, piece_bytes, engine->num_bytes) ||
             !in_range(target, count, piece_bytes, known->remote_bytes))
        result = KVT_OUT_OF_RANGE;
    if (result == 0) {
        operation_t *operation = calloc(1, sizeof *operation);
        *operation = (operation_t){.id = ++engine->next_op, .peer = peer, .piece_bytes = piece_bytes, .count = count,
                                   .source = copy_of(source, count * sizeof *source),
                                   .target = copy_of(target, count * sizeof *target),
                                   .note = note_length ? copy_of(note, note_length) : NULL,
                                   .note_length = note_length};
        command_t *command = calloc(1, sizeof *command);
        *command = (command_t){.kind = SUBMIT, .peer = peer, .operation = operation};
        engine->num_operations++;
        push_command(engine, command);
        result = (int64_t)operation->id;
    }
    pthread_mutex_unlock(&engine->mutex);
    if (result > 0) signal_fd(engine->wake_fd);
    return result;
}

size_t kvt_poll(kvt_engine_t *engine, kvt_event_t *out, size_t capacity) {
    size_t count = 0;
    pthread_mutex_lock(&engine->mutex);
    while (count < capacity && engine->first_event) {
        event_node_t *node = engine->first_event;
        engine->first_event = node->after;
        if (!engine->first_event) engine->last_event = NULL;
        if (node->event.kind == KVT_NOTE) engine->num_waiting_notes--;
        out[count++] = node->event;
        free(node);
    }
    if (!engine->first_event) drain_fd(engine->event_fd);
    bool wake = engine->throttled;
    pthread_mutex_unlock(&engine->mutex);
    if (wake) signal_fd(engine->wake_fd);
    return count;
}

int kvt_descriptor(kvt_engine_t *engine) { return engine->event_fd; }

void kvt_release(void *data) { free(data); }

uint64_t kvt_stale_messages(kvt_engine_t *engine) { return __atomic_load_n(&engine->stale_messages, __ATOMIC_RELAXED); }

int64_t kvt_describe(kvt_engine_t *engine, uint64_t peer, char *lanes, size_t capacity, uint64_t *bytes_sent,
                     double *silent_s) {
    int64_t result = KVT_UNKNOWN_PEER;
    pthread_mutex_lock(&engine->mutex);
    link_t *link = find_link(engine, peer);
    if (link && link->lanes) {
        result = snprintf(lanes, capacity, "%s", link->lanes);
        *bytes_sent = link->bytes_sent;
        *silent_s = now_s() - link->last_heard;
    }
    pthread_mutex_unlock(&engine->mutex);
    return result;
}

void kvt_close(kvt_engine_t *engine) {
    if (engine->started) {
        command_t *command = calloc(1, sizeof *command);
        command->kind = CLOSE;
        submit_command(engine, command);
        pthread_join(engine->thread, NULL);
    }
    kvt_event_t event;
    while (kvt_poll(engine, &event, 1)) free(event.data);
    for (command_t *command = take_commands(engine), *after; command; command = after) {
        after = command->after;
        if (command->operation) free_operation(command->operation);
        free(command->address);
        free(command->key);
        free(command);
    }
    while (engine->known) forget_known(engine, engine->known->peer);
    free_engine(engine);
}

const char *kvt_status_string(int status) { return ucs_status_string((ucs_status_t)status); }
