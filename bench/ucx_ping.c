/* UCX's own round trip of a small active message between two processes that sleep on its event descriptor: played by C
 * from end to end, or a call at a time for a caller that waits by itself. */
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

static volatile uint64_t num_received;

static ucs_status_t on_message(void *arg, const void *header, size_t header_len, void *data, size_t len,
                               const ucp_am_recv_param_t *param)
{
    num_received++;
    return UCS_OK;
}

static ucp_worker_h open_worker(const char *transports)
{
    ucp_config_t *config;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    ucp_worker_params_t worker_params = {.field_mask = 0};
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB, .id = 1, .cb = on_message};
    if (ucp_config_read(NULL, NULL, &config) || ucp_config_modify(config, "TLS", transports) ||
        ucp_config_modify(config, "MM_ERROR_HANDLING", "y") || ucp_init(&params, config, &context) ||
        ucp_worker_create(context, &worker_params, &worker) || ucp_worker_set_am_recv_handler(worker, &handler))
        abort();
    ucp_config_release(config);
    return worker;
}

/* Swap worker addresses through a socket. */
static ucp_ep_h connect_through(ucp_worker_h worker, int socket)
{
    char theirs[4096];
    size_t len;
    ucp_address_t *ours;
    ucp_ep_h ep;
    if (ucp_worker_get_address(worker, &ours, &len) || write(socket, ours, len) != (ssize_t)len ||
        read(socket, theirs, sizeof theirs) <= 0)
        abort();
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        .address = (ucp_address_t *)theirs,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
    };
    if (ucp_ep_create(worker, &params, &ep))
        abort();
    return ep;
}

static void wait_for(ucp_worker_h worker, uint64_t count)
{
    struct pollfd fd = {.events = POLLIN};
    if (ucp_worker_get_efd(worker, &fd.fd))
        abort();
    while (num_received < count)
        if (ucp_worker_progress(worker) == 0 && num_received < count && ucp_worker_arm(worker) == UCS_OK)
            poll(&fd, 1, -1);
}

static void send_message(ucp_worker_h worker, ucp_ep_h ep, const void *data, size_t len)
{
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_AM_SEND_FLAG_EAGER};
    ucs_status_ptr_t request = ucp_am_send_nbx(ep, 1, NULL, 0, data, len, &param);
    if (UCS_PTR_IS_ERR(request))
        abort();
    while (UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_INPROGRESS)
        ucp_worker_progress(worker);
    if (UCS_PTR_IS_PTR(request))
        ucp_request_free(request);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

typedef struct {
    ucp_worker_h worker;
    ucp_ep_h ep;
} player;

player *ping_open(const char *transports, int socket, int *descriptor)
{
    player *player = malloc(sizeof *player);
    player->worker = open_worker(transports);
    player->ep = connect_through(player->worker, socket);
    if (ucp_worker_get_efd(player->worker, descriptor))
        abort();
    return player;
}

void ping_send(player *player, const void *data, size_t len)
{
    send_message(player->worker, player->ep, data, len);
}

/* How many messages have come so far; 0: none new, and the descriptor will be readable when there are. */
uint64_t ping_receive(player *player)
{
    uint64_t before = num_received;
    while (num_received == before)
        if (ucp_worker_progress(player->worker) == 0 && num_received == before &&
            ucp_worker_arm(player->worker) == UCS_OK)
            return 0;
    return num_received;
}

/* Answer every message, for ever. */
void ping_answer(player *player, const void *data, size_t len)
{
    for (uint64_t count = 1;; count++) {
        wait_for(player->worker, count);
        send_message(player->worker, player->ep, data, len);
    }
}

/* Return the seconds of one round trip. */
double ping_once(player *player, const void *data, size_t len)
{
    double began = now_s();
    uint64_t before = num_received;
    send_message(player->worker, player->ep, data, len);
    wait_for(player->worker, before + 1);
    return now_s() - began;
}
