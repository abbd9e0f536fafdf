/* Puts 64 bytes to an address in another process, over any lane, with a key of our own memory: what UCX emulates looks at
 * neither. */
#include <time.h>
#include <ucp/api/ucp.h>

static void on_end(void *request, ucs_status_t status, void *is_over)
{
    (void)status;
    ucp_request_free(request);
    *(int *)is_over = 1;
}

static void on_error(void *is_over, ucp_ep_h ep, ucs_status_t status)
{
    (void)ep, (void)status;
    *(int *)is_over = 1;
}

static ucp_worker_h open_worker(char *memory, size_t len, ucp_context_h *context, void **key)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA | UCP_FEATURE_AM};
    ucp_mem_map_params_t region = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                                   .address = memory,
                                   .length = len};
    ucp_worker_params_t worker_params = {.field_mask = 0};
    ucp_worker_h worker;
    ucp_mem_h mapped;
    size_t key_len;
    if (ucp_init(&params, NULL, context) != UCS_OK || ucp_worker_create(*context, &worker_params, &worker) != UCS_OK ||
        ucp_mem_map(*context, &region, &mapped) != UCS_OK || ucp_rkey_pack(*context, mapped, key, &key_len) != UCS_OK)
        return NULL;
    return worker;
}

/* Returns 0 when it has tried for as long as it takes, whatever came of it. */
int strike(const void *address, uint64_t target)
{
    static char bytes[4096] = {[0 ... 63] = 'X'};
    static int is_over;
    void *key;
    ucp_context_h context;
    ucp_worker_h worker = open_worker(bytes, sizeof bytes, &context, &key);
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {on_error, &is_over},
    };
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb.send = on_end,
                                 .user_data = &is_over};
    ucp_ep_h ep;
    ucp_rkey_h rkey;
    if (worker == NULL || ucp_ep_create(worker, &params, &ep) != UCS_OK || ucp_ep_rkey_unpack(ep, key, &rkey) != UCS_OK)
        return 1;
    ucp_put_nbx(ep, bytes, 64, target, rkey, &param);
    ucp_request_param_t flush = {.op_attr_mask = 0};
    ucp_ep_flush_nbx(ep, &flush);
    for (time_t until = time(NULL) + 2; time(NULL) < until && !is_over;)
        ucp_worker_progress(worker);
    for (time_t until = time(NULL) + 1; time(NULL) < until;) /* what is emulated arrives after its end here */
        ucp_worker_progress(worker);
    return 0;
}
