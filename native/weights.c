/* The weights of a model: the shapes that its tensors must have, and where they lie in memory. */
#include "weights.h"

#include <stddef.h>
#include <stdlib.h>

enum { ALIGNMENT = 64 };

/* Numbers of a model that shapes of its tensors are made of. INPUTS: what the first layer reads, which is as wide as
 * embedding and state side by side in EAGLE-3. NORMED_QUERIES, NORMED_KEYS: what their norms are over. WIDE_OF_ALL,
 * HIDDEN_OF_ALL: of all experts together. */
typedef enum {
    ONE,
    HIDDEN,
    INPUTS,
    QUERIES,
    GATED_QUERIES,
    KEYS,
    NORMED_QUERIES,
    NORMED_KEYS,
    WIDE,
    CHANNELS,
    VALUES,
    VALUE_HEADS,
    VALUE_SIZE,
    INPUTS_OF_TAPS,
    EXPERTS,
    WIDE_OF_ALL,
    HIDDEN_OF_ALL,
} Size;

/* Which layers have a tensor: all, some, those that attend, recurrent ones, those with experts. */
typedef enum { IN_ALL, IN_SOME, IN_ATTENDING, IN_RECURRENT, IN_ROUTED } Where;

/* A tensor of a layer: vectors, and columns of few numbers, are kept as floats, matrices are packed. */
static const struct {
    const char *name;
    size_t place; /* in Layer */
    Size rows, columns;
    int vector;
    Where where;
} LAYER[LAYER_TENSORS] = {
    [ATTENTION_NORM] = {"attention norm", offsetof(Layer, attention_norm), ONE, HIDDEN, 1, IN_ALL},
    [QUERY] = {"query", offsetof(Layer, query), GATED_QUERIES, INPUTS, 0, IN_ATTENDING},
    [KEY] = {"key", offsetof(Layer, key), KEYS, INPUTS, 0, IN_ATTENDING},
    [VALUE] = {"value", offsetof(Layer, value), KEYS, INPUTS, 0, IN_ATTENDING},
    [QUERY_BIAS] = {"query bias", offsetof(Layer, query_bias), ONE, QUERIES, 1, IN_SOME},
    [KEY_BIAS] = {"key bias", offsetof(Layer, key_bias), ONE, KEYS, 1, IN_SOME},
    [VALUE_BIAS] = {"value bias", offsetof(Layer, value_bias), ONE, KEYS, 1, IN_SOME},
    [QUERY_NORM] = {"query norm", offsetof(Layer, query_norm), ONE, NORMED_QUERIES, 1, IN_SOME},
    [KEY_NORM] = {"key norm", offsetof(Layer, key_norm), ONE, NORMED_KEYS, 1, IN_SOME},
    [ATTENTION_OUTPUT] = {"attention output", offsetof(Layer, output), HIDDEN, QUERIES, 0, IN_ATTENDING},
    [ATTENTION_POST_NORM] = {"attention post-norm", offsetof(Layer, attention_post_norm), ONE, HIDDEN, 1, IN_SOME},
    [FEED_FORWARD_NORM] = {"feed-forward norm", offsetof(Layer, feed_forward_norm), ONE, HIDDEN, 1, IN_ALL},
    [GATE] = {"gate", offsetof(Layer, gate), WIDE_OF_ALL, HIDDEN, 0, IN_ALL},
    [UP] = {"up", offsetof(Layer, up), WIDE_OF_ALL, HIDDEN, 0, IN_ALL},
    [DOWN] = {"down", offsetof(Layer, down), HIDDEN_OF_ALL, WIDE, 0, IN_ALL},
    [FEED_FORWARD_POST_NORM] = {"feed-forward post-norm", offsetof(Layer, feed_forward_post_norm), ONE, HIDDEN, 1,
                                IN_SOME},
    [ATTENTION_OUTPUT_BIAS] = {"attention output bias", offsetof(Layer, output_bias), ONE, HIDDEN, 1, IN_SOME},
    [DELTA_INPUT] = {"delta net's input", offsetof(Layer, delta_input), CHANNELS, HIDDEN, 0, IN_RECURRENT},
    [DELTA_GATE] = {"delta net's gate", offsetof(Layer, delta_gate), VALUES, HIDDEN, 0, IN_RECURRENT},
    [DELTA_DECAY] = {"delta net's decay", offsetof(Layer, delta_decay), VALUE_HEADS, HIDDEN, 0, IN_RECURRENT},
    [DELTA_RATE] = {"delta net's rate", offsetof(Layer, delta_rate), VALUE_HEADS, HIDDEN, 0, IN_RECURRENT},
    [DELTA_CONVOLUTION] = {"delta net's convolution", offsetof(Layer, delta_convolution), CHANNELS, INPUTS_OF_TAPS, 1,
                           IN_RECURRENT},
    [DELTA_TIME] = {"delta net's time", offsetof(Layer, delta_time), ONE, VALUE_HEADS, 1, IN_RECURRENT},
    [DELTA_SPEED] = {"delta net's speed", offsetof(Layer, delta_speed), ONE, VALUE_HEADS, 1, IN_RECURRENT},
    [DELTA_NORM] = {"delta net's norm", offsetof(Layer, delta_norm), ONE, VALUE_SIZE, 1, IN_RECURRENT},
    [DELTA_OUTPUT] = {"delta net's output", offsetof(Layer, delta_output), HIDDEN, VALUES, 0, IN_RECURRENT},
    [ROUTER] = {"router", offsetof(Layer, router), EXPERTS, HIDDEN, 0, IN_ROUTED},
};
static const char *const MODEL_NAMES[MODEL_TENSORS] = {"embedding", "output norm", "output"};
static const char *const DRAFT_HEAD_NAMES[DRAFT_HEAD_TENSORS] = {"input", "input bias", "feature norm",
                                                                 "embedding norm", "state norm"};

/* The shape that a tensor must have: rows x columns. */
typedef struct {
    int64_t rows, columns;
    int optional;
} Shape;

/* The first layer of EAGLE-3 reads embeddings and states side by side; that of any head may lack a norm of its own. */
static Shape layer_shape(const Model *model, const LoadSource *source, int layer, int tensor) {
    const Architecture *a = &model->architecture;
    const int first = model->draft_head && !layer, joins = first && model->draft_head->architecture.fuses_states;
    const int whole = a->query_key_norm == NORM_OF_ALL_HEADS;
    const int64_t queries = (int64_t)a->query_heads * a->head_size, keys = (int64_t)a->key_heads * a->head_size;
    const int64_t networks = a->experts ? a->experts : 1;
    const int64_t sizes[] = {
        [ONE] = 1,
        [HIDDEN] = a->hidden,
        [INPUTS] = joins ? 2 * (int64_t)a->hidden : a->hidden,
        [QUERIES] = queries,
        [GATED_QUERIES] = gated_query_size(a),
        [KEYS] = keys,
        [NORMED_QUERIES] = whole ? queries : a->head_size,
        [NORMED_KEYS] = whole ? keys : a->head_size,
        [WIDE] = a->feed_forward,
        [CHANNELS] = delta_channels(a),
        [VALUES] = delta_values(a),
        [VALUE_HEADS] = a->delta_value_heads,
        [VALUE_SIZE] = a->delta_value_size,
        [INPUTS_OF_TAPS] = TAPS,
        [EXPERTS] = a->experts,
        [WIDE_OF_ALL] = networks * a->feed_forward,
        [HIDDEN_OF_ALL] = networks * a->hidden,
    };
    const int recurrent = source->layers[(size_t)layer * LAYER_TENSORS + DELTA_INPUT].format >= 0;
    const Where where = LAYER[tensor].where;
    const int lacking =
        where == IN_SOME || where == (recurrent ? IN_ATTENDING : IN_RECURRENT) || (where == IN_ROUTED && !a->experts);
    const int pre_norm = tensor == ATTENTION_NORM || tensor == FEED_FORWARD_NORM;
    const int optional = lacking || (pre_norm && !model->draft_head) || (tensor == ATTENTION_NORM && first);
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
    default: return (Shape){1, hidden, !draft_head->fuses_states}; /* EMBEDDING_NORM, STATE_NORM */
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
    if (place->rows < 1 || place->rows != shape.rows || place->columns != shape.columns)
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
    tensor.vector =
        (float *)(void *)arena_take(arena, (size_t)tensor.place->rows * (size_t)tensor.place->columns * sizeof(float));
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
    place_vector(arena, draft_head_tensor(source, EMBEDDING_NORM), &model->draft_head->embedding_norm);
    place_vector(arena, draft_head_tensor(source, STATE_NORM), &model->draft_head->state_norm);
}

int read_weights(Model *model, const LoadSource *source) {
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

int check_tensors(const Model *model, const LoadSource *source) {
    int error = DRAFTREE_OK;
    for (int tensor = 0; tensor < MODEL_TENSORS && !error; tensor++)
        error = check_tensor(model_shape(model, tensor), model_tensor(source, tensor), source);
    for (int tensor = 0; model->draft_head && tensor < DRAFT_HEAD_TENSORS && !error; tensor++)
        error = check_tensor(draft_head_shape(model, tensor), draft_head_tensor(source, tensor), source);
    for (int layer = 0; layer < model->architecture.layers && !error; layer++)
        for (int tensor = 0; tensor < LAYER_TENSORS && !error; tensor++)
            error =
                check_tensor(layer_shape(model, source, layer, tensor), layer_tensor(source, layer, tensor), source);
    return error;
}
