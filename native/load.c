/* Loading a model: its description is checked, its weights are read (weights.c), its memory prepared. */
#include <stdlib.h>

#include "weights.h"

static int in_range(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }

/* All numbers of delta nets are 0, or each is in its range. */
static int fits_delta_nets(const Architecture *a) {
    if (!a->delta_key_heads)
        return !a->delta_value_heads && !a->delta_key_size && !a->delta_value_size;
    return in_range(a->delta_key_heads, 1, 1024) && in_range(a->delta_value_heads, 1, 1024) &&
           a->delta_value_heads % a->delta_key_heads == 0 && in_range(a->delta_key_size, 16, 256) &&
           a->delta_key_size % 16 == 0 && in_range(a->delta_value_size, 16, 256) && a->delta_value_size % 16 == 0;
}

static int check_architecture(const Architecture *a, char message[256]) {
    struct {
        const char *name;
        int fits;
        int64_t value;
    } rules[] = {
        {"vocabulary", in_range(a->vocabulary, 1, 1 << 24), a->vocabulary},
        {"hidden size", in_range(a->hidden, 32, 1 << 17) && a->hidden % 32 == 0, a->hidden},
        {"number of layers", in_range(a->layers, 1, 4096), a->layers},
        {"number of query heads", in_range(a->query_heads, 1, 1024), a->query_heads},
        {"number of key heads", in_range(a->key_heads, 1, 1024) && a->query_heads % a->key_heads == 0, a->key_heads},
        {"head size", in_range(a->head_size, 16, 256) && a->head_size % 16 == 0, a->head_size},
        {"feed-forward size", in_range(a->feed_forward, 32, 1 << 20) && a->feed_forward % 32 == 0, a->feed_forward},
        {"context", in_range(a->context, 1, 1 << 28), a->context},
        {"number of rotated dimensions", in_range(a->rope_size, 0, a->head_size) && a->rope_size % 2 == 0,
         a->rope_size},
        {"rope pairing", in_range(a->rope_halves, 0, 1), a->rope_halves},
        {"number of rope tables", in_range(a->rope_tables, 1, ROPE_TABLES), a->rope_tables},
        {"activation", in_range(a->activation, ACTIVATION_SILU, ACTIVATION_GELU_TANH), a->activation},
        {"norm of queries and keys", in_range(a->query_key_norm, NORM_OF_HEADS, NORM_OF_ALL_HEADS), a->query_key_norm},
        {"length of a temperature", in_range(a->temperature_length, 0, INT32_MAX), a->temperature_length},
        {"gating of attention",
         in_range(a->gated_attention, 0, 1) && !(a->gated_attention && a->query_key_norm == NORM_OF_ALL_HEADS),
         a->gated_attention},
        {"number of key heads of delta nets, with their sizes,", fits_delta_nets(a), a->delta_key_heads},
        {"number of experts", in_range(a->experts, 0, MOST_EXPERTS), a->experts},
        {"number of a token's experts", in_range(a->experts_used, a->experts > 0, a->experts), a->experts_used},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (!rules[i].fits)
            return fail(message, "the %s is %lld, which the engine does not run", rules[i].name,
                        (long long)rules[i].value);
    if (!(a->norm_epsilon >= 0 && a->norm_epsilon < 1))
        return fail(message, "the epsilon of its norms is %g", (double)a->norm_epsilon);
    const float factors[] = {a->embedding_scale,  a->attention_scale, a->rope_magnitude,
                             a->second_magnitude, a->residual_scale,  a->logit_scale};
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++)
        if (!(factors[i] > 0 && factors[i] < 1e6f))
            return fail(message, "a scale is %g", (double)factors[i]);
    if (!(a->temperature_growth >= 0 && a->temperature_growth < 1e6f))
        return fail(message, "the temperature of attention grows by %g", (double)a->temperature_growth);
    return DRAFTREE_OK;
}

static int copy_layers(Model *model, const LoadSource *source) {
    const Architecture *a = &model->architecture;
    const size_t frequencies = (size_t)a->rope_tables * (size_t)(a->rope_size / 2);
    model->layers = calloc((size_t)a->layers, sizeof *model->layers);
    model->rope_frequencies = calloc(frequencies ? frequencies : 1, sizeof *model->rope_frequencies);
    if (!model->layers || !model->rope_frequencies)
        return DRAFTREE_NO_MEMORY;
    for (size_t i = 0; i < frequencies; i++) {
        if (!(source->rope_frequencies[i] >= 0 && source->rope_frequencies[i] <= 1e3))
            return fail(source->message, "a rope frequency is %g", source->rope_frequencies[i]);
        model->rope_frequencies[i] = source->rope_frequencies[i];
    }
    int attending = 0, recurrent = 0;
    for (int layer = 0; layer < a->layers; layer++) {
        const int of_delta_net = source->layers[(size_t)layer * LAYER_TENSORS + DELTA_INPUT].format >= 0;
        if (of_delta_net && !a->delta_key_heads)
            return fail(source->message, "layer %d is recurrent, in a model without states", layer);
        model->layers[layer].place = of_delta_net ? recurrent++ : attending++;
    }
    for (int layer = 0; layer < a->layers && source->layer_rope; layer++) {
        const int32_t rope = source->layer_rope[layer], window = source->layer_window[layer];
        if (!in_range(rope, 0, a->rope_tables - 1) || window < 0)
            return fail(source->message, "layer %d has rope table %d and window %d", layer, rope, window);
        model->layers[layer].rope = rope;
        model->layers[layer].window = window;
    }
    return DRAFTREE_OK;
}

/* Load what models and heads have in common, on a pool that is there. */
static int load(Model *model, const LoadSource *source) {
    const Architecture *a = &model->architecture;
    int error = check_tensors(model, source);
    if (!error)
        error = read_weights(model, source);
    if (error)
        return error;
    int recurrent = 0;
    for (int layer = 0; layer < a->layers; layer++)
        recurrent += is_recurrent(&model->layers[layer]);
    start_cache(&model->cache, a->layers - recurrent, a->key_heads, a->head_size, a->hidden);
    model->cache.states = (StateSizes){.layers = recurrent,
                                       .matrices = delta_values(a) * a->delta_key_size,
                                       .channels = delta_channels(a),
                                       .heads = a->delta_value_heads,
                                       .bytes = &model->cache.bytes};
    return start_workspace(model);
}

static int load_model(Model *model, int threads, const LoadSource *source) {
    int error = check_architecture(&model->architecture, source->message);
    if (!error)
        error = copy_layers(model, source);
    if (error)
        return error;
    model->tokens = model->architecture.vocabulary;
    model->pool = new_pool(threads);
    return model->pool ? load(model, source) : DRAFTREE_NO_MEMORY;
}

/* Hand over a model, or free it and return why it was not loaded. */
static int loaded_or_freed(int error, Model *loaded, Model **model) {
    if (error)
        draftree_free(loaded);
    else
        *model = loaded;
    return error;
}

int draftree_load(const int64_t *files, const int64_t *sizes, int32_t file_count, const Architecture *architecture,
                  const double *rope_frequencies, const int32_t *layer_rope, const int32_t *layer_window,
                  const TensorPlace *layer_tensors, const TensorPlace *model_tensors, int threads, const char *tier,
                  int64_t most_bytes, int (*progress)(double), int64_t *weight_bytes, char message[256],
                  Model **model) {
    message[0] = '\0';
    if (threads < 1 || threads > 1024 || most_bytes < 0)
        return DRAFTREE_BAD_ARGUMENT;
    const Tier *found = find_tier(tier);
    if (!found)
        return DRAFTREE_NO_TIER;
    Model *loaded = calloc(1, sizeof *loaded);
    if (!loaded)
        return DRAFTREE_NO_MEMORY;
    loaded->architecture = *architecture;
    loaded->tier = found;
    const LoadSource source = {.stored = {.files = files, .sizes = sizes, .file_count = file_count},
                               .rope_frequencies = rope_frequencies,
                               .layer_rope = layer_rope,
                               .layer_window = layer_window,
                               .layers = layer_tensors,
                               .model = model_tensors,
                               .most_bytes = most_bytes,
                               .progress = progress,
                               .weight_bytes = weight_bytes,
                               .message = message};
    return loaded_or_freed(load_model(loaded, threads, &source), loaded, model);
}

int draftree_share_threads(Model *model, const Model *other) {
    if (pool_threads(model->pool) != pool_threads(other->pool))
        return DRAFTREE_BAD_ARGUMENT;
    Pool *own = model->pool;
    model->pool = retain_pool(other->pool);
    release_pool(own);
    return DRAFTREE_OK;
}

/* ---- draft heads */

static int check_draft_head(const Model *model, const int32_t *tokens, char message[256]) {
    const DraftHead *draft_head = model->draft_head;
    const DraftHeadArchitecture *h = &draft_head->architecture;
    const Architecture *target = &draft_head->target->architecture;
    if (!in_range(h->features, 1, MOST_FEATURES) || (!h->fuses_states && h->features != 1))
        return fail(message, "it reads %d hidden states, which the engine does not run", h->features);
    for (int32_t k = 0; k < h->features; k++)
        if (!in_range(h->places[k], 0, MOST_TRACKED - 1))
            return fail(message, "hidden state %d is the target's %d", k, h->places[k]);
    if ((!h->fuses_states || h->learns) && model->architecture.hidden != target->hidden)
        return fail(message, "its states are of %d numbers, and the target's of %d", model->architecture.hidden,
                    target->hidden);
    for (int32_t i = 0; i < model->architecture.vocabulary; i++)
        if (!in_range(tokens[i], 0, target->vocabulary - 1))
            return fail(message, "its output %d is token %d of %d", i, tokens[i], target->vocabulary);
    return DRAFTREE_OK;
}

/* List the tokens of a draft head's outputs; let its cells keep the state that the next node reads. */
static int start_draft_head(Model *model, const int32_t *tokens) {
    DraftHead *draft_head = model->draft_head;
    draft_head->tokens = calloc((size_t)output_stride(model), sizeof *draft_head->tokens);
    draft_head->known = calloc((size_t)model->tokens, 1);
    if (!draft_head->tokens || !draft_head->known)
        return DRAFTREE_NO_MEMORY;
    for (int32_t i = 0; i < model->architecture.vocabulary; i++) {
        draft_head->tokens[i] = tokens[i];
        draft_head->known[tokens[i]] = 1;
    }
    for (int32_t k = 0; k < draft_head->architecture.features; k++)
        if (draft_head->architecture.places[k] > draft_head->last_place)
            draft_head->last_place = draft_head->architecture.places[k];
    if (draft_head->architecture.learns)
        model->cache.learned_tile_bytes = draft_head->target->output.tile_bytes;
    model->tracked[0] = draft_head->architecture.norms_state ? -1 : model->architecture.layers;
    track_states(&model->cache, 1);
    return DRAFTREE_OK;
}

static int load_draft_head(Model *model, const LoadSource *source) {
    const Model *target = model->draft_head->target;
    int error = check_architecture(&model->architecture, source->message);
    if (!error)
        error = check_draft_head(model, source->tokens, source->message);
    if (!error)
        error = copy_layers(model, source);
    if (error)
        return error;
    model->tokens = target->architecture.vocabulary;
    model->embeddings = target->embeddings;
    error = load(model, source);
    return error ? error : start_draft_head(model, source->tokens);
}

int draftree_load_draft_head(const Model *target, const uint8_t *weights, int64_t size,
                             const Architecture *architecture, const DraftHeadArchitecture *draft_head,
                             const double *rope_frequencies, const TensorPlace *layer_tensors,
                             const TensorPlace *model_tensors, const TensorPlace *draft_head_tensors,
                             const int32_t *tokens, char message[256], Model **model) {
    message[0] = '\0';
    if (size < 0 || target->draft_head)
        return DRAFTREE_BAD_ARGUMENT;
    Model *loaded = calloc(1, sizeof *loaded);
    if (!loaded)
        return DRAFTREE_NO_MEMORY;
    loaded->architecture = *architecture;
    loaded->tier = target->tier;
    loaded->pool = retain_pool(target->pool);
    loaded->draft_head = calloc(1, sizeof *loaded->draft_head);
    int error = DRAFTREE_NO_MEMORY;
    if (loaded->draft_head) {
        *loaded->draft_head = (DraftHead){.architecture = *draft_head, .target = target};
        const LoadSource source = {.stored = {.sizes = &size, .file_count = 1, .memory = weights},
                                   .rope_frequencies = rope_frequencies,
                                   .layers = layer_tensors,
                                   .model = model_tensors,
                                   .draft_head = draft_head_tensors,
                                   .tokens = tokens,
                                   .most_bytes = INT64_MAX,
                                   .message = message};
        error = load_draft_head(loaded, &source);
    }
    return loaded_or_freed(error, loaded, model);
}

static void free_draft_head(DraftHead *draft_head) {
    free(draft_head->tokens);
    free(draft_head->known);
    free(draft_head);
}

void draftree_free(Model *model) {
    if (!model)
        return;
    free_workspace(model);
    free_cache(&model->cache);
    if (model->draft_head)
        free_draft_head(model->draft_head);
    release_pool(model->pool);
    release(model->weights, model->weight_bytes);
    free(model->layers);
    free(model->rope_frequencies);
    free(model);
}
