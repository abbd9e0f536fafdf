/* The gated delta rule behind a short convolution (arXiv 2412.06464), token by token.
 *
 * A part is a key head of a request, with the value heads that it serves: nobody else has its channels and states. A
 * token's result depends on its request's text alone, however that is cut into chunks. */
#pragma once

#include <math.h>

#include "elementwise.h"
#include "threads.h"

enum { MAX_CHANNELS = 8192, MAX_TAPS = 8, BLOCK_VECS = 4 };

struct delta_net {
    int64_t num_key_heads, num_value_heads, key_dim, value_dim, conv_width;
    const float *conv;       /* [conv_width][num_channels], the newest token's last */
    const float *decay;      /* [num_value_heads]: below 0 */
    const float *decay_bias; /* [num_value_heads] */
    const float *norm;       /* [value_dim] */
    float eps;
};

struct delta_step {
    const struct delta_net *net;
    const float *projected; /* [num_tokens][channels | gates | numbers of beta | of g] */
    float *newest;          /* [num_channels][conv_width - 1] of slot 0 */
    int64_t newest_stride;  /* from slot to slot */
    float *kept;            /* [num_value_heads][key_dim][value_dim] of slot 0 */
    int64_t kept_stride;
    const int64_t *starts;  /* [batch_size + 1]: first tokens of the requests */
    const int64_t *slots;   /* [batch_size] */
    float *out;             /* [num_tokens][num_value_heads * value_dim] */
};

/* Channels that lie beside each other: queries or keys of a head, or the values that it serves. */
struct span {
    int64_t first, size;
};

INLINE int64_t num_channels(const struct delta_net *net) {
    return 2 * net->num_key_heads * net->key_dim + net->num_value_heads * net->value_dim;
}

INLINE int64_t token_size(const struct delta_net *net) {
    return num_channels(net) + net->num_value_heads * (net->value_dim + 2);
}

INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

INLINE float softplus_of(float x) { return max_of(x, 0.0f) + log1pf(expf(-fabsf(x))); }

INLINE void silu_all(float *x, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(x + i, silu(load(x + i)));
    for (; i < size; i++) x[i] = silu(splat(x[i]))[0];
}

/* The sum of each channel's newest inputs, by their weights; x is the newest, the others are in the window. */
static void convolve(const struct delta_net *net, const float *const *window, struct span span, float *out) {
    const int64_t stride = num_channels(net);
    for (int64_t i = 0; i < span.size; i++) out[i] = net->conv[span.first + i] * window[0][i];
    for (int64_t tap = 1; tap < net->conv_width; tap++) {
        const float *weights = net->conv + tap * stride + span.first, *inputs = window[tap];
        for (int64_t i = 0; i < span.size; i++) out[i] += weights[i] * inputs[i];
    }
    silu_all(out, span.size);
}

/* Makes a vector as long as `length`, but for what keeps a vector of zeros from being divided by zero. */
static void scale_to(float *x, int64_t size, float length) {
    const float scale = length / sqrtf(add_and_sum_squares(x, NULL, size) + 1e-6f);
    for (int64_t i = 0; i < size; i++) x[i] *= scale;
}

/* Some columns of a state: they change by themselves. */
INLINE void correct_block(float *kept, int64_t stride, int64_t num_rows, const float *key, const float *query,
                          const float *value, float remains, float beta, int num_vecs, float *found) {
    vec change[BLOCK_VECS], sums[BLOCK_VECS];
    for (int v = 0; v < num_vecs; v++) change[v] = sums[v] = splat(0.0f);
    for (int64_t row = 0; row < num_rows; row++) {
        for (int v = 0; v < num_vecs; v++)
            change[v] = multiply_add(splat(key[row]), load(kept + row * stride + v * LANES), change[v]);
    }
    for (int v = 0; v < num_vecs; v++) change[v] = beta * (load(value + v * LANES) - remains * change[v]);
    for (int64_t row = 0; row < num_rows; row++) {
        for (int v = 0; v < num_vecs; v++) {
            float *place = kept + row * stride + v * LANES;
            const vec now = multiply_add(splat(key[row]), change[v], remains * load(place));
            store(place, now);
            sums[v] = multiply_add(splat(query[row]), now, sums[v]);
        }
    }
    for (int v = 0; v < num_vecs; v++) store(found + v * LANES, sums[v]);
}

static void correct_column(float *kept, int64_t stride, int64_t num_rows, const float *key, const float *query,
                           float value, float remains, float beta, float *found) {
    float change = 0.0f, sum = 0.0f;
    for (int64_t row = 0; row < num_rows; row++) change += key[row] * kept[row * stride];
    change = beta * (value - remains * change);
    for (int64_t row = 0; row < num_rows; row++) {
        kept[row * stride] = remains * kept[row * stride] + key[row] * change;
        sum += query[row] * kept[row * stride];
    }
    *found = sum;
}

/* Lets a state fade, corrects what the key finds in it, and returns what the query finds then. */
static void correct(const struct delta_net *net, float *kept, const float *key, const float *query, const float *value,
                    float remains, float beta, float *found) {
    const int64_t rows = net->key_dim, columns = net->value_dim;
    int64_t i = 0;
    for (; i + BLOCK_VECS * LANES <= columns; i += BLOCK_VECS * LANES)
        correct_block(kept + i, columns, rows, key, query, value + i, remains, beta, BLOCK_VECS, found + i);
    for (; i + LANES <= columns; i += LANES)
        correct_block(kept + i, columns, rows, key, query, value + i, remains, beta, 1, found + i);
    for (; i < columns; i++)
        correct_column(kept + i, columns, rows, key, query, value[i], remains, beta, found + i);
}

/* What was found, normed and weighed by its gates. */
static void norm_and_gate(const struct delta_net *net, float *found, const float *gates) {
    rms_norm_row(found, NULL, net->norm, net->eps, net->value_dim, found);
    int64_t i = 0;
    for (; i + LANES <= net->value_dim; i += LANES) store(found + i, load(found + i) * silu(load(gates + i)));
    for (; i < net->value_dim; i++) found[i] *= silu(splat(gates[i]))[0];
}

/* One token, once its channels are convolved: `head` [query | key | values]. */
static void delta_token(const struct delta_step *step, int64_t key_head, float *head, int64_t token, int64_t slot) {
    const struct delta_net *net = step->net;
    const int64_t heads = net->num_value_heads, shared = heads / net->num_key_heads, columns = net->value_dim;
    const float *gates = step->projected + token * token_size(net) + num_channels(net), *betas = gates + heads * columns;
    float *query = head, *key = head + net->key_dim, *values = key + net->key_dim;
    scale_to(query, net->key_dim, 1.0f / sqrtf((float)net->key_dim));
    scale_to(key, net->key_dim, 1.0f);
    for (int64_t i = 0; i < shared; i++) {
        const int64_t at = key_head * shared + i;
        float *found = step->out + (token * heads + at) * columns;
        float *kept = step->kept + slot * step->kept_stride + at * net->key_dim * columns;
        const float remains = expf(net->decay[at] * softplus_of(betas[heads + at] + net->decay_bias[at]));
        correct(net, kept, key, query, values + i * columns, remains, sigmoid_of(betas[at]), found);
        norm_and_gate(net, found, gates + at * columns);
    }
}

/* A key head's channels, [query | key | values], of the newest tokens: of each the input of the convolution. */
struct window {
    struct span spans[3];
    int64_t num_taps;
    float *taps[MAX_TAPS]; /* the oldest token's first */
    float memory[MAX_CHANNELS];
};

static void open_window(struct window *window, const struct delta_net *net, int64_t key_head) {
    const int64_t keys = net->num_key_heads * net->key_dim;
    const int64_t values = net->num_value_heads / net->num_key_heads * net->value_dim;
    window->spans[0] = (struct span){key_head * net->key_dim, net->key_dim};
    window->spans[1] = (struct span){keys + key_head * net->key_dim, net->key_dim};
    window->spans[2] = (struct span){2 * keys + key_head * values, values};
    window->num_taps = net->conv_width;
    for (int64_t i = 0; i < net->conv_width; i++) window->taps[i] = window->memory + i * (2 * net->key_dim + values);
}

/* Reads all but the newest from a request's state. */
static void read_window(struct window *window, const float *newest) {
    const int64_t kept = window->num_taps - 1;
    int64_t at = 0;
    for (int i = 0; i < 3; i++) {
        const float *channel = newest + window->spans[i].first * kept;
        for (const int64_t end = at + window->spans[i].size; at < end; at++, channel += kept) {
            for (int64_t tap = 0; tap < kept; tap++) window->taps[tap][at] = channel[tap];
        }
    }
}

static void write_window(const struct window *window, float *newest) {
    const int64_t kept = window->num_taps - 1;
    int64_t at = 0;
    for (int i = 0; i < 3; i++) {
        float *channel = newest + window->spans[i].first * kept;
        for (const int64_t end = at + window->spans[i].size; at < end; at++, channel += kept) {
            for (int64_t tap = 0; tap < kept; tap++) channel[tap] = window->taps[tap][at];
        }
    }
}

/* Takes a token in, and lets the oldest go. */
static void pass_window(const struct delta_net *net, struct window *window, const float *channels, float *out) {
    float **taps = window->taps, *const oldest = taps[0], *newest = taps[window->num_taps - 1];
    const float *inputs[MAX_TAPS];
    int64_t at = 0;
    for (int i = 0; i < 3; i++) {
        const struct span span = window->spans[i];
        memcpy(newest + at, channels + span.first, (size_t)span.size * sizeof *newest);
        for (int64_t tap = 0; tap < window->num_taps; tap++) inputs[tap] = taps[tap] + at;
        convolve(net, inputs, span, out + at);
        at += span.size;
    }
    memmove(taps, taps + 1, (size_t)(window->num_taps - 1) * sizeof *taps);
    taps[window->num_taps - 1] = oldest;
}

static void delta_part(const void *delta_step, int64_t part) {
    const struct delta_step *step = delta_step;
    const struct delta_net *net = step->net;
    const int64_t request = part / net->num_key_heads, key_head = part % net->num_key_heads;
    if (step->slots[request] < 0) return; /* nobody's */
    float *newest = step->newest + step->slots[request] * step->newest_stride;
    float head[MAX_CHANNELS];
    struct window window;
    open_window(&window, net, key_head);
    read_window(&window, newest);
    for (int64_t token = step->starts[request]; token < step->starts[request + 1]; token++) {
        pass_window(net, &window, step->projected + token * token_size(net), head);
        delta_token(step, key_head, head, token, step->slots[request]);
    }
    write_window(&window, newest);
}
