/* Active messages: their headers, and the requests that carry them. */

#define MESSAGE_ID 1

/* How many numbered messages were dealt with, in order: the pages among them are in the pool. */
static uint64_t num_dealt_with(const kvt_link *link)
{
    bool is_landing = link->num_landed < link->num_landings;
    return is_landing ? link->landings[link->num_landed % MAX_PIECES].number : link->num_received;
}

static message_header make_header(const kvt_link *link, message_kind kind)
{
    message_header header = {
        .version = HEADER_VERSION,
        .kind = kind,
        .sender = link->engine->instance_id,
        .target = link->peer,
        .session = link->session,
        .echo = link->peer_session,
        .received = num_dealt_with(link),
    };
    memcpy(header.key, link->key, sizeof header.key);
    return header;
}

/* Account for what a UCX call returned: true when its callback will come. */
static bool is_pending(kvt_link *link, ucs_status_ptr_t result, const char *what)
{
    if (UCS_PTR_IS_ERR(result)) {
        fail_link(link, "%s failed: %s", what, ucs_status_string(UCS_PTR_STATUS(result)));
        return false;
    }
    if (result == NULL)
        return false; /* complete already */
    link->num_requests++;
    return true;
}

/* In a callback: the request is over. */
static void settle_request(kvt_link *link, void *request, ucs_status_t status, const char *what)
{
    ucp_request_free(request);
    link->num_requests--;
    if (status != UCS_OK)
        fail_link(link, "%s failed: %s", what, ucs_status_string(status));
}

/* `header` and the data must live until the callback; false: it will not come. Eager: the receiver's callback gets the
 * data itself. `count` is in bytes, or in entries for an iov. */
static bool send_message(kvt_link *link, const message_header *header, const void *data, size_t count,
                         ucp_datatype_t datatype, ucp_send_nbx_callback_t callback, void *user_data)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                        UCP_OP_ATTR_FIELD_DATATYPE,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = callback,
        .datatype = datatype,
        .user_data = user_data,
    };
    ucs_status_ptr_t result = ucp_am_send_nbx(link->ep, MESSAGE_ID, header, sizeof *header, data, count, &param);
    return is_pending(link, result, "send");
}

static bool send_bytes(kvt_link *link, const message_header *header, const void *data, size_t len,
                       ucp_send_nbx_callback_t callback, void *user_data)
{
    return send_message(link, header, data, len, ucp_dt_make_contig(1), callback, user_data);
}
