/* Feeds the transfer engine's receiver whatever a peer, or somebody else, may send: `receive_fuzz SEED COUNT`.
 *
 * Built with the compiler's sanitizers. It has a link and a pool, and no UCX runs: receiving calls none. Each message is
 * checked by what must hold after it: without the key nothing changes but the count, and no page changes that is not
 * granted. A broken link is made anew.
 */
#include "shim_unit.c"

#include <assert.h>

#define NUM_PAGES 16
#define PAGE_BYTES 256
#define GRANTED 5
#define PEER 7
#define ME 9

static uint64_t state;

static uint64_t chance(uint64_t below)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % below;
}

/* A number that is near a border now and then. */
static uint64_t nasty(uint64_t usual)
{
    static const uint64_t odd[] = {0, 1, 255, 256, 1u << 31, UINT32_MAX, UINT64_MAX, UINT64_MAX - 255, (uint64_t)1 << 63};
    return chance(8) ? chance(usual) : odd[chance(sizeof odd / sizeof odd[0])];
}

static void begin_link(kvt_engine *engine, kvt_link *link)
{
    while (link->early != NULL)
        drop_early(link);
    memset(link, 0, sizeof *link);
    link->engine = engine;
    link->peer = PEER;
    link->session = 3;
    link->peer_session = 4;
    link->state = LINK_UP;
}

static message_header random_header(const kvt_engine *engine, const kvt_link *link)
{
    message_header header = {
        .version = chance(50) ? HEADER_VERSION : (uint32_t)nasty(9),
        .kind = chance(20) ? 1 + (uint32_t)chance(4) : (uint32_t)nasty(9),
        .sender = chance(30) ? PEER : nasty(20),
        .target = chance(30) ? ME : nasty(20),
        .session = chance(30) ? link->peer_session : nasty(9),
        .echo = chance(30) ? link->session : nasty(9),
        .received = nasty(9),
        .number = chance(8) ? link->num_received : nasty(link->num_received + 9),
    };
    memcpy(header.key, engine->key, sizeof header.key);
    if (header.kind == MESSAGE_PAGES)
        header.pages.num_runs = chance(4) ? 1 + chance(3) : nasty(80);
    else if (header.kind == MESSAGE_HELLO)
        memcpy(&header.hello, (uint64_t[]){nasty(9), nasty(9), nasty(9)}, sizeof header.hello);
    if (chance(10) == 0)
        header.key[chance(sizeof header.key)] ^= (uint8_t)(1u << chance(8));
    return header;
}

/* Targets that often make sense, then bytes; returns their length. */
static size_t random_data(char *data, size_t size)
{
    size_t len = chance(3) ? chance(1024) : chance(size + 1);
    for (size_t i = 0; i < len; i++)
        data[i] = (char)chance(256);
    for (size_t i = 0; i < 3 && (i + 1) * sizeof(byte_target) <= len; i++) {
        byte_target target = {chance(3) ? GRANTED * PAGE_BYTES + chance(PAGE_BYTES) : nasty(NUM_PAGES * PAGE_BYTES),
                              chance(3) ? 1 + chance(64) : nasty(600)};
        memcpy(data + i * sizeof target, &target, sizeof target);
    }
    return len;
}

/* Every byte of the pool that is not of the granted page. */
static uint64_t closed_bytes(const kvt_engine *engine)
{
    uint64_t granted = GRANTED * PAGE_BYTES, behind = granted + PAGE_BYTES;
    return digest_bytes(engine->pool, 0, granted) +
           digest_bytes(engine->pool + behind, behind, NUM_PAGES * PAGE_BYTES - behind);
}

static void deliver(kvt_engine *engine, kvt_link *link, char *data, size_t size)
{
    message_header header = random_header(engine, link);
    size_t header_len = chance(30) ? sizeof header : chance(sizeof header), len = random_data(data, size);
    bool is_authentic = header_len == sizeof header && header.version == HEADER_VERSION &&
                        memcmp(header.key, engine->key, sizeof header.key) == 0;
    uint64_t before = engine->num_unauthenticated, num_received = link->num_received, dropped = engine->num_dropped_messages;
    ucp_am_recv_param_t param = {.recv_attr = chance(40) ? 0 : UCP_AM_RECV_ATTR_FLAG_RNDV};
    char *exact_header = malloc(header_len ? header_len : 1), *exact = malloc(len ? len : 1); /* so that reading on is seen */
    memcpy(exact_header, &header, header_len);
    memcpy(exact, data, len);
    on_message(engine, exact_header, header_len, exact, len, &param);
    free(exact);
    free(exact_header);
    assert((engine->num_unauthenticated == before + 1) == !is_authentic);
    if (!is_authentic)
        assert(link->state == LINK_UP && link->num_received == num_received);
    else if (header.sender != PEER || header.target != ME || header.session < 4)
        assert(link->state == LINK_UP && link->num_received == num_received && engine->num_dropped_messages == dropped + 1);
    assert(link->num_early <= MAX_EARLY && link->early_bytes <= MAX_EARLY_BYTES);
}

static void drop_all_events(kvt_engine *engine)
{
    event_node *node;
    while ((node = pop_event(engine)) != NULL) {
        settle_event(engine, node);
        free(node->memory);
    }
}

int main(int argc, char **argv)
{
    (void)argc;
    static char data[64 << 10];
    kvt_options options = {.instance_id = ME, .only_granted = 1, .max_waiting_notes = 100, .key = "sixteen bytes o"};
    kvt_engine *engine = new_engine(&options);
    kvt_link *link = calloc(1, sizeof *link);
    state = strtoull(argv[1], NULL, 10) * 2654435761u + 1;
    engine->pool = calloc(NUM_PAGES, PAGE_BYTES);
    engine->page_nbytes = PAGE_BYTES;
    engine->num_pages = NUM_PAGES;
    engine->links = link;
    assert(open_grants(&engine->grants, NUM_PAGES));
    set_grants(&engine->grants, PEER, 1, (int64_t[]){GRANTED});
    begin_link(engine, link);
    uint64_t untouched = closed_bytes(engine), ends = 0, notes = 0;
    for (uint64_t left = strtoull(argv[2], NULL, 10); left > 0; left--) {
        deliver(engine, link, data, sizeof data);
        assert(closed_bytes(engine) == untouched);
        notes += engine->num_notes_waiting;
        drop_all_events(engine);
        if (link->state != LINK_UP) {
            begin_link(engine, link);
            ends++;
        }
    }
    begin_link(engine, link);
    printf("%lu unauthenticated, %lu dropped, %lu ungranted, %lu notes, %lu links ended, page %s\n",
           (unsigned long)engine->num_unauthenticated, (unsigned long)engine->num_dropped_messages,
           (unsigned long)engine->num_ungranted, (unsigned long)notes, (unsigned long)ends,
           digest_bytes(engine->pool + GRANTED * PAGE_BYTES, 0, PAGE_BYTES) ? "written" : "empty");
    free(link);
    free(engine->pool);
    free_engine(engine);
    return 0;
}
