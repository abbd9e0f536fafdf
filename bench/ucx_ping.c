/* UCX's own round trip of a small active message between two processes that sleep on its event descriptor. */
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#define PAUSE_US 1000 /* the other process is asleep by then */

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

static int compare(const void *one, const void *other)
{
    double difference = *(const double *)one - *(const double *)other;
    return (difference > 0) - (difference < 0);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Play `rounds` round trips of `len` bytes with the process at the other end of the socket. Returns their median. */
double ucx_ping(const char *transports, int socket, int begins, int rounds, uint64_t len)
{
    ucp_worker_h worker = open_worker(transports);
    ucp_ep_h ep = connect_through(worker, socket);
    char *data = calloc(1, len);
    double *times = calloc((size_t)rounds, sizeof *times);
    for (int i = 0; i < rounds; i++) {
        if (begins)
            usleep(PAUSE_US);
        double began = now_s();
        if (begins)
            send_message(worker, ep, data, len);
        wait_for(worker, (uint64_t)i + 1);
        if (!begins)
            send_message(worker, ep, data, len);
        times[i] = now_s() - began;
    }
    if (!begins) /* the last message is on its way until the other process hangs up */
        while (read(socket, data, 1) > 0)
            ucp_worker_progress(worker);
    qsort(times, (size_t)rounds, sizeof *times, compare);
    double median = times[rounds / 2];
    free(times);
    free(data);
    return median;
}
