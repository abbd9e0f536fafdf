/* The life of a link, from connect to the last event.
 *
 *     CONNECTING ── a message echoes our session ──> UP
 *     CONNECTING, UP ── timeout, silence, UCX error, bye, restart, disconnect ──> FAILED ── close endpoint ──> CLOSING
 *     CLOSING ── UCX has completed every request ──> DOWN
 *
 * Sessions. Each link that a process opens has a number, rising within the process. Messages carry the sender's session
 * and echo the receiver's as the sender knows it. A hello is answered until it echoes right, so a link comes up only when
 * our own words came back over the peer's endpoint to us; hellos then go on as heartbeats. A message that echoes an older
 * session is dropped. A peer's higher session means that it has closed its side and begun anew, so ours is closed too:
 * when a link comes up again, nothing that the peer wrote on the former one is still under way.
 */
static void on_endpoint_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    kvt_link *link = arg;
    (void)ep;
    link->is_cut = true;
    fail_link(link, "lost the peer: %s", ucs_status_string(status));
}

static void on_hello_sent(void *request, ucs_status_t status, void *user_data)
{
    kvt_link *link = user_data;
    link->hello_in_flight = false;
    settle_request(link, request, status, "heartbeat");
}

static void on_bye_sent(void *request, ucs_status_t status, void *user_data)
{
    settle_request(user_data, request, status, "bye");
}

static void on_endpoint_closed(void *request, ucs_status_t status, void *user_data)
{
    kvt_link *link = user_data;
    (void)status;
    ucp_request_free(request);
    link->num_requests--;
}

static void open_endpoint(kvt_link *link)
{
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = link->address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {on_endpoint_error, link},
    };
    ucs_status_t status = ucp_ep_create(link->engine->worker, &params, &link->ep);
    if (status != UCS_OK) {
        link->ep = NULL;
        fail_link(link, "no endpoint: %s", ucs_status_string(status));
        return;
    }
    if (link->pool_key == NULL)
        return;
    status = ucp_ep_rkey_unpack(link->ep, link->pool_key, &link->rkey);
    if (status != UCS_OK) {
        link->rkey = NULL;
        fail_link(link, "no access to the peer's pool: %s", ucs_status_string(status));
    }
}

static void open_link(kvt_engine *engine, kvt_link *link)
{
    link->next = engine->links;
    engine->links = link;
    link->deadline_s = now_s() + engine->connect_timeout_s;
    open_endpoint(link);
    if (engine->device != NULL)
        open_on_device(link);
    free(link->address);
    free(link->pool_key);
    link->address = link->pool_key = NULL;
}

static void come_up(kvt_link *link)
{
    kvt_engine *engine = link->engine;
    link->state = LINK_UP;
    link->answer_due = true; /* the peer may not know yet that we heard it */
    find_paths(link);
    pthread_mutex_lock(&engine->lock);
    link->is_up = true;
    append_event(engine, &link->up);
    pthread_mutex_unlock(&engine->lock);
}

static void send_hello(kvt_link *link, double now)
{
    check_device(link);
    link->hello_due_s = now + (link->state == LINK_UP ? link->engine->heartbeat_s : HELLO_RETRY_S);
    if (link->hello_in_flight)
        return; /* the last one has not left yet */
    link->answer_due = false;
    link->hello = make_header(link, MESSAGE_HELLO);
    link->hello.hello.sent_s = now;
    link->hello.hello.echo_s = link->peer_clock_s;
    link->hello.hello.held_s = now - link->peer_clock_at_s;
    link->hello_in_flight = send_bytes(link, &link->hello, NULL, 0, on_hello_sent, link);
}

/* Best effort: a peer that was stopped and wakes up must not go on writing, and shared memory does not tell it. */
static void say_goodbye(kvt_link *link)
{
    if (link->is_cut || link->peer_session == 0)
        return;
    link->bye = make_header(link, MESSAGE_BYE);
    send_bytes(link, &link->bye, NULL, 0, on_bye_sent, link);
}

static void close_endpoint(kvt_link *link)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
        .cb.send = on_endpoint_closed,
        .user_data = link,
    };
    link->state = LINK_CLOSING;
    if (link->ep == NULL)
        return;
    say_goodbye(link);
    link->num_requests += UCS_PTR_IS_PTR(ucp_ep_close_nbx(link->ep, &param));
    link->ep = NULL;
}

static void drop_early(kvt_link *link)
{
    early_message *early = link->early;
    link->early = early->next;
    link->num_early--;
    link->early_bytes -= early->len;
    free(early);
}

static void fail_operations(kvt_link *link)
{
    for (stream *stream = link->streams; stream != NULL; stream = stream->next)
        while (stream->first != NULL) {
            event_node *done = &pop_operation(stream)->done;
            done->event.text = link->reason;
            append_event(link->engine, done);
        }
}

/* Move what was submitted to this link, and not taken yet, to the link; drop its other commands. Needs the lock. */
static void take_late_operations(kvt_link *link)
{
    command_list kept = {NULL, NULL};
    command *command = link->engine->commands.head, *next;
    link->engine->commands.head = NULL;
    for (; command != NULL; command = next) {
        next = command->next;
        if (command->link != link) {
            command->next = NULL;
            if (kept.head == NULL)
                kept.head = command;
            else
                kept.tail->next = command;
            kept.tail = command;
        } else if (command->kind == COMMAND_SUBMIT) {
            append_operation(link, command->op);
        }
    }
    link->engine->commands = kept;
}

/* UCX is done with the link: report every operation, then the end. The caller owns the link from here. */
static void bring_down(kvt_link *link)
{
    kvt_engine *engine = link->engine;
    if (link->rkey != NULL)
        ucp_rkey_destroy(link->rkey);
    if (engine->device != NULL)
        close_on_device(link);
    while (link->early != NULL)
        drop_early(link);
    for (kvt_link **at = &engine->links; *at != NULL; at = &(*at)->next)
        if (*at == link) {
            *at = link->next;
            break;
        }
    link->state = LINK_DOWN;
    pthread_mutex_lock(&engine->lock);
    take_late_operations(link);
    fail_operations(link);
    link->is_down = true;
    link->down.event.text = link->reason;
    append_event(engine, &link->down);
    pthread_mutex_unlock(&engine->lock);
}

static void check_times(kvt_link *link, double now)
{
    const kvt_engine *engine = link->engine;
    double silent_s = now - atomic_load(&link->last_heard_s);
    if (link->state == LINK_CONNECTING && now > link->deadline_s)
        fail_link(link, "no answer within %.1f s", engine->connect_timeout_s);
    if (link->state == LINK_UP && silent_s > engine->silence_s)
        fail_link(link, "silent for %.1f s", silent_s);
    check_deadlines(link, now);
    if (link->early != NULL && now > link->early->since_s + engine->silence_s)
        fail_link(link, "message %lu is missing", (unsigned long)link->num_received);
}

/* Do what is due. `has_listened`: silence is silence. Returns whether there is more to do at once. */
static bool step_link(kvt_link *link, double now, bool has_listened)
{
    bool busy = settle_device(link);
    if (has_listened)
        check_times(link, now);
    if (link->state <= LINK_UP && (link->answer_due || now >= link->hello_due_s))
        send_hello(link, now);
    if (link->state == LINK_UP)
        busy |= pump_operations(link) || populate_some(link);
    if (link->state == LINK_FAILED) {
        close_endpoint(link);
        busy = true;
    }
    if (link->state == LINK_CLOSING && link->num_requests == 0 && has_device_finished(link))
        bring_down(link);
    return busy;
}
