/* Loading a model: its description is checked, its memory laid out, its weights read (read.c). */
#include <stddef.h>
#include <stdlib.h>

#include "model.h"
#include "read.h"

enum { ALIGNMENT = 64 };

/* Numbers of a model that shapes of its tensors are made of. INPUTS: what the first layer reads, which is as wide as
 * embedding and state side by side in EAGLE-3. NORMED_QUERIES, NORMED_KEYS: what their norms are over. */
typedef enum { ONE, HIDDEN, INPUTS, QUERIES, KEYS, NORMED_QUERIES, NORMED_KEYS, WIDE } Size;

/* A tensor of a layer: vectors are kept as floats, matrices are packed. */
static const struct {
    const char *name;
    size_t place; /* in Layer */
    Size rows, columns;
    int vector, optional;
} LAYER[LAYER_TENSORS] = {
    [ATTENTION_NORM] = {"attention norm", offsetof(Layer, attention_norm), ONE, HIDDEN, 1, 0},
    [QUERY] = {"query", offsetof(Layer, query), QUERIES, INPUTS, 0, 0},
    [KEY] = {"key", offsetof(Layer, key), KEYS, INPUTS, 0, 0},
    [VALUE] = {"value", offsetof(Layer, value), KEYS, INPUTS, 0, 0},
    [QUERY_BIAS] = {"query bias", offsetof(Layer, query_bias), ONE, QUERIES, 1, 1},
    [KEY_BIAS] = {"key bias", offsetof(Layer, key_bias), ONE, KEYS, 1, 1},
    [VALUE_BIAS] = {"value bias", offsetof(Layer, value_bias), ONE, KEYS, 1, 1},
    [QUERY_NORM] = {"query norm", offsetof(Layer, query_norm), ONE, NORMED_QUERIES, 1, 1},
    [KEY_NORM] = {"key norm", offsetof(Layer, key_norm), ONE, NORMED_KEYS, 1, 1},
    [ATTENTION_OUTPUT] = {"attention output", offsetof(Layer, output), HIDDEN, QUERIES, 0, 0},
    [ATTENTION_POST_NORM] = {"attention post-norm", offsetof(Layer, attention_post_norm), ONE, HIDDEN, 1, 1},
    [FEED_FORWARD_NORM] = {"feed-forward norm", offsetof(Layer, feed_forward_norm), ONE, HIDDEN, 1, 0},
    [GATE] = {"gate", offsetof(Layer, gate), WIDE, HIDDEN, 0, 0},
    [UP] = {"up", offsetof(Layer, up), WIDE, HIDDEN, 0, 0},
    [DOWN] = {"down", offsetof(Layer, down), HIDDEN, WIDE, 0, 0},
    [FEED_FORWARD_POST_NORM] = {"feed-forward post-norm", offsetof(Layer, feed_forward_post_norm), ONE, HIDDEN, 1, 1},
    [ATTENTION_OUTPUT_BIAS] = {"attention output bias", offsetof(Layer, output_bias), ONE, HIDDEN, 1, 1},
};
static const char *const MODEL_NAMES[MODEL_TENSORS] = {"embedding", "output norm", "output"};
static const char *const DRAFT_HEAD_NAMES[DRAFT_HEAD_TENSORS] = {"input", "input bias", "feature norm", "state norm"};

/* What a model is loaded from. */
typedef struct {
    Stored stored;
    const double *rope_frequencies;
    const int32_t *layer_rope, *layer_window; /* NULL: all 0 */
    const TensorPlace *layers;                /* [layers][LAYER_TENSORS] */
    const TensorPlace *model;                 /* [MODEL_TENSORS] */
    const TensorPlace *draft_head;            /* [DRAFT_HEAD_TENSORS]; NULL: it is no draft head */
    const int32_t *tokens;                    /* of a draft head's outputs */
    int64_t most_bytes;                       /* that packed weights may take */
    int64_t *weight_bytes;                    /* what they take; NULL: nobody wants to know */
    int (*progress)(double);
    char *message;
} LoadSource;

static int in_range(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }

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

/* The shape that a tensor must have: rows x columns. */
typedef struct {
    int64_t rows, columns;
    int optional;
} Shape;

/* The first layer of EAGLE-3 reads embeddings and states side by side; that of EAGLE-1 may lack a norm. */
static Shape layer_shape(const Model *model, int layer, int tensor) {
    const Architecture *a = &model->architecture;
    const int first = model->draft_head && !layer, joins = first && model->draft_head->architecture.fuses_states;
    const int whole = a->query_key_norm == NORM_OF_ALL_HEADS;
    const int64_t queries = (int64_t)a->query_heads * a->head_size, keys = (int64_t)a->key_heads * a->head_size;
    const int64_t sizes[] = {
        [ONE] = 1,
        [HIDDEN] = a->hidden,
        [INPUTS] = joins ? 2 * (int64_t)a->hidden : a->hidden,
        [QUERIES] = queries,
        [KEYS] = keys,
        [NORMED_QUERIES] = whole ? queries : a->head_size,
        [NORMED_KEYS] = whole ? keys : a->head_size,
        [WIDE] = a->feed_forward,
    };
    const int pre_norm = tensor == ATTENTION_NORM || tensor == FEED_FORWARD_NORM;
    const int optional =
        LAYER[tensor].optional || (pre_norm && !model->draft_head) || (tensor == ATTENTION_NORM && first && !joins);
    return (Shape){sizes[LAYER[tensor].rows], sizes[LAYER[tensor].columns], optional};
}

static Shape model_shape(const Model *model, int tensor) {
    const Architecture *a = &model->architecture;
    if (tensor == OUTPUT_NORM)
        return (Shape){1, a->hidden, model->draft_head && !model->draft_head->architecture.fuses_states};
    if (tensor == EMBEDDING && model->draft_head) /* else the target's */
        return (Shape){model->draft_head->target->architecture.vocabulary, a->hidden,
                       model->draft_head->target->architecture.hidden == a->hidden};
    return (Shape){a->vocabulary, a->hidden, model->draft_head && model->draft_head->architecture.learns};
}

static Shape draft_head_shape(const Model *model, int tensor) {
    const DraftHeadArchitecture *draft_head = &model->draft_head->architecture;
    const int64_t hidden = model->architecture.hidden;
    const int64_t features = (int64_t)draft_head->features * model->draft_head->target->architecture.hidden;
    switch (tensor) {
    case INPUT: return (Shape){hidden, draft_head->fuses_states ? features : 2 * hidden, 0};
    case INPUT_BIAS: return (Shape){1, hidden, 1};
    case FEATURE_NORM: return (Shape){1, features, 1};
    default: return (Shape){1, hidden, !draft_head->fuses_states}; /* STATE_NORM */
    }
}

static Tensor layer_tensor(const LoadSource *source, int layer, int tensor) {
    return (Tensor){.place = &source->layers[(size_t)layer * LAYER_TENSORS + (size_t)tensor],
                    .name = LAYER[tensor].name,
                    .layer = layer};
}

static Tensor model_tensor(const LoadSource *source, int tensor) {
    return (Tensor){.place = &source->model[tensor], .name = MODEL_NAMES[tensor], .layer = -1};
}

static Tensor draft_head_tensor(const LoadSource *source, int tensor) {
    return (Tensor){.place = &source->draft_head[tensor], .name = DRAFT_HEAD_NAMES[tensor], .layer = -1};
}

static int check_tensor(Shape shape, Tensor tensor, const LoadSource *source) {
    const TensorPlace *place = tensor.place;
    char name[TENSOR_NAME], *message = source->message;
    name_tensor(&tensor, name);
    if (place->format < 0)
        return shape.optional ? DRAFTREE_OK : fail(message, "the %s is missing", name);
    if (place->rows != shape.rows || place->columns != shape.columns)
        return fail(message, "the %s is %d x %d where %lld x %lld fits", name, place->rows, place->columns,
                    (long long)shape.rows, (long long)shape.columns);
    const size_t row_bytes = format_row_bytes(place->format, place->columns);
    if (!row_bytes)
        return fail(message, "the %s is of type %d, which the engine does not read in rows of %d", name, place->format,
                    place->columns);
    if (row_bytes > (size_t)stored_bytes(&source->stored, place->offset) / (size_t)place->rows)
        return fail(message, "the %s lies past the end of the file", name);
    return DRAFTREE_OK;
}

/* Everything that has a place in the model. Two rounds over all tensors: the first adds up their memory, the second
 * hands it out and lists what to read into it. */
typedef struct {
    Model *model;
    const LoadSource *source;
    uint8_t *memory; /* NULL in the first round */
    size_t bytes;    /* handed out */
    Tensor *tensors; /* to read */
    int count;
} WeightArena;

static uint8_t *arena_take(WeightArena *arena, size_t bytes) {
    uint8_t *place = arena->memory ? arena->memory + arena->bytes : NULL;
    arena->bytes += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return place;
}

static void place_vector(WeightArena *arena, Tensor tensor, float **vector) {
    if (tensor.place->format < 0)
        return;
    tensor.vector = (float *)(void *)arena_take(arena, (size_t)tensor.place->columns * sizeof(float));
    if (!tensor.vector)
        return;
    *vector = tensor.vector;
    arena->tensors[arena->count++] = tensor;
}

static void place_matrix(WeightArena *arena, Tensor tensor, PackedMatrix *matrix) {
    const TensorPlace *place = tensor.place;
    if (place->format < 0)
        return;
    const size_t tile_bytes = packed_tile_bytes(place->format, place->columns);
    tensor.tiles = arena_take(arena, (size_t)tiles_of(place->rows) * tile_bytes);
    if (!tensor.tiles)
        return;
    *matrix = (PackedMatrix){place->format, place->rows, place->columns, tile_bytes, tensor.tiles};
    arena->tensors[arena->count++] = tensor;
}

/* The output layer of a draft head that learns: rows of the target's. */
static void place_output_rows(WeightArena *arena) {
    Model *model = arena->model;
    PackedMatrix output = model->draft_head->target->output;
    output.rows = model->architecture.vocabulary;
    uint8_t *tiles = arena_take(arena, (size_t)tiles_of(output.rows) * output.tile_bytes);
    for (int64_t row = 0; tiles && row < output.rows; row++)
        packed_copy_row(&model->draft_head->target->output, arena->source->tokens[row], (int)(row % TILE_ROWS),
                        tiles + (size_t)(row / TILE_ROWS) * output.tile_bytes);
    output.tiles = tiles;
    model->output = output;
}

/* One matrix in a tied model. A draft head without embeddings reads its target's. */
static void place_outputs_and_embeddings(WeightArena *arena) {
    Model *model = arena->model;
    const TensorPlace *output = &arena->source->model[OUTPUT], *embedding = &arena->source->model[EMBEDDING];
    if (model->draft_head && model->draft_head->architecture.learns)
        place_output_rows(arena);
    else
        place_matrix(arena, model_tensor(arena->source, OUTPUT), &model->output);
    if (!model->draft_head && embedding->offset == output->offset && embedding->format == output->format)
        model->embeddings = model->output;
    else
        place_matrix(arena, model_tensor(arena->source, EMBEDDING), &model->embeddings);
}

static void place_layer(WeightArena *arena, int layer) {
    for (int tensor = 0; tensor < LAYER_TENSORS; tensor++) {
        void *place = (char *)&arena->model->layers[layer] + LAYER[tensor].place;
        if (LAYER[tensor].vector)
            place_vector(arena, layer_tensor(arena->source, layer, tensor), place);
        else
            place_matrix(arena, layer_tensor(arena->source, layer, tensor), place);
    }
}

static void lay_out_weights(WeightArena *arena) {
    Model *model = arena->model;
    const LoadSource *source = arena->source;
    arena->bytes = 0;
    for (int layer = 0; layer < model->architecture.layers; layer++)
        place_layer(arena, layer);
    place_vector(arena, model_tensor(source, OUTPUT_NORM), &model->output_norm);
    place_outputs_and_embeddings(arena);
    if (!model->draft_head)
        return;
    place_matrix(arena, draft_head_tensor(source, INPUT), &model->draft_head->input);
    place_vector(arena, draft_head_tensor(source, INPUT_BIAS), &model->draft_head->input_bias);
    place_vector(arena, draft_head_tensor(source, FEATURE_NORM), &model->draft_head->feature_norm);
    place_vector(arena, draft_head_tensor(source, STATE_NORM), &model->draft_head->state_norm);
}

static int read_weights(Model *model, const LoadSource *source) {
    WeightArena arena = {.model = model, .source = source};
    lay_out_weights(&arena);
    if (source->weight_bytes)
        *source->weight_bytes = (int64_t)arena.bytes;
    if (arena.bytes > (size_t)source->most_bytes)
        return DRAFTREE_TOO_LARGE;
    model->weight_bytes = arena.bytes;
    model->weights = arena.memory = allocate(arena.bytes);
    const size_t most = (size_t)model->architecture.layers * LAYER_TENSORS + MODEL_TENSORS + DRAFT_HEAD_TENSORS;
    arena.tensors = calloc(most, sizeof *arena.tensors);
    int error = DRAFTREE_NO_MEMORY;
    if (arena.memory && arena.tensors) {
        lay_out_weights(&arena);
        error =
            read_tensors(&source->stored, arena.tensors, arena.count, model->pool, source->progress, source->message);
    }
    free(arena.tensors);
    return error;
}

static int check_tensors(const Model *model, const LoadSource *source) {
    int error = DRAFTREE_OK;
    for (int tensor = 0; tensor < MODEL_TENSORS && !error; tensor++)
        error = check_tensor(model_shape(model, tensor), model_tensor(source, tensor), source);
    for (int tensor = 0; model->draft_head && tensor < DRAFT_HEAD_TENSORS && !error; tensor++)
        error = check_tensor(draft_head_shape(model, tensor), draft_head_tensor(source, tensor), source);
    for (int layer = 0; layer < model->architecture.layers && !error; layer++)
        for (int tensor = 0; tensor < LAYER_TENSORS && !error; tensor++)
            error = check_tensor(layer_shape(model, layer, tensor), layer_tensor(source, layer, tensor), source);
    return error;
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
    start_cache(&model->cache, a->layers, a->key_heads, a->head_size, a->hidden);
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
