/* Recurrent states of rows (states.h). */
#include "states.h"

#include <stdlib.h>
#include <string.h>

#include "draftree.h"
#include "platform.h"

static int64_t state_bytes(const StateSizes *sizes) {
    return sizes->layers * state_numbers(sizes) * (int64_t)sizeof(float);
}

static int64_t record_bytes(const StateSizes *sizes, int64_t records) {
    return records * sizes->layers * record_numbers(sizes) * (int64_t)sizeof(float);
}

static State *new_state(const StateSizes *sizes) {
    State *state = malloc(sizeof *state);
    float *numbers = state ? allocate((size_t)state_bytes(sizes)) : NULL;
    if (!numbers) {
        free(state);
        return NULL;
    }
    *state = (State){.references = 1, .numbers = numbers};
    *sizes->bytes += state_bytes(sizes);
    return state;
}

static State *retained(State *state) {
    if (state)
        state->references++;
    return state;
}

/* Give a place's state back, and have none there. */
static void release_state(const StateSizes *sizes, State **place) {
    State *state = *place;
    *place = NULL;
    if (!state || --state->references)
        return;
    *sizes->bytes -= state_bytes(sizes);
    release(state->numbers, (size_t)state_bytes(sizes));
    free(state);
}

/* Room for so many records, and not for many more; the first `kept` stay. */
static int reserve_records(const StateSizes *sizes, RowStates *states, int64_t count, int64_t kept) {
    if (count <= states->record_capacity && states->record_capacity <= 4 * count + 16)
        return DRAFTREE_OK;
    const int64_t capacity = count + count / 4 + 4;
    float *records = allocate((size_t)record_bytes(sizes, capacity));
    if (!records)
        return DRAFTREE_NO_MEMORY;
    if (kept)
        memcpy(records, states->records, (size_t)record_bytes(sizes, kept));
    release(states->records, (size_t)record_bytes(sizes, states->record_capacity));
    *sizes->bytes += record_bytes(sizes, capacity - states->record_capacity);
    states->records = records;
    states->record_capacity = capacity;
    return DRAFTREE_OK;
}

static int reserve_tokens(RowStates *states, int32_t cells) {
    if (cells <= states->token_capacity)
        return DRAFTREE_OK;
    const int32_t capacity = cells + cells / 4 + 64;
    int32_t *tokens = realloc(states->tokens, (size_t)capacity * sizeof *tokens);
    if (!tokens)
        return DRAFTREE_NO_MEMORY;
    states->tokens = tokens;
    states->token_capacity = capacity;
    return DRAFTREE_OK;
}

int reserve_states(const StateSizes *sizes, RowStates *states, int32_t nodes, int32_t count, int32_t in_place,
                   int32_t cells) {
    if (!count) /* it takes no part: what its nodes lack is read again when it does */
        return DRAFTREE_OK;
    if (!nodes)
        states->first_record = states->replayed;
    const int64_t kept = (int64_t)states->first_record + nodes - states->unrecorded;
    if (reserve_tokens(states, cells) || reserve_records(sizes, states, kept + count - in_place, kept))
        return DRAFTREE_NO_MEMORY;
    if (in_place && !states->ahead && !(states->ahead = new_state(sizes)))
        return DRAFTREE_NO_MEMORY;
    const int shared = !states->state || states->state->references > 1;
    if (states->replayed && shared && !states->fresh && !(states->fresh = new_state(sizes)))
        return DRAFTREE_NO_MEMORY;
    states->unrecorded += in_place;
    return DRAFTREE_OK;
}

void settle_states(const StateSizes *sizes, RowStates *states, int32_t nodes) {
    if (states->replayed) {
        const int32_t length = replayable_length(states);
        if (states->fresh) {
            release_state(sizes, &states->state);
            states->state = states->fresh;
            states->fresh = NULL;
        }
        states->state->length = length;
        states->replayed = 0;
    }
    states->ahead_nodes = nodes < states->unrecorded ? nodes : states->unrecorded;
}

static void forget_ahead(const StateSizes *sizes, RowStates *states) {
    release_state(sizes, &states->ahead);
    states->ahead_nodes = states->unrecorded = 0;
}

/* Keep the state of the row behind its tokens now, in place of the oldest. */
static void mark_state(const StateSizes *sizes, RowStates *states) {
    if (states->mark_count == MOST_MARKS) {
        release_state(sizes, &states->marks[0]);
        memmove(states->marks, states->marks + 1, (MOST_MARKS - 1) * sizeof *states->marks);
        states->mark_count--;
    }
    states->marks[states->mark_count++] = retained(states->state);
}

/* Records of kept nodes, which lie behind `unrecorded` others, from `to` on. */
static void move_records(const StateSizes *sizes, RowStates *states, const int32_t *keep, int32_t count, int32_t to) {
    const int32_t from = states->first_record - states->unrecorded;
    for (int32_t i = 0; i < count; i++)
        if (from + keep[i] != to + i)
            memcpy(record_layer(sizes, states, to + i, 0), record_layer(sizes, states, from + keep[i], 0),
                   (size_t)record_bytes(sizes, 1));
}

/* All nodes that are read in place are kept. */
static void keep_ahead(const StateSizes *sizes, RowStates *states, int32_t length, const int32_t *keep, int32_t count,
                       int32_t trunk) {
    const int32_t read = states->ahead_nodes;
    move_records(sizes, states, keep + read, count - read, 0);
    states->first_record = 0;
    if (trunk < read) {
        states->ahead_nodes = states->unrecorded = read - trunk;
        return;
    }
    release_state(sizes, &states->state);
    states->state = states->ahead;
    states->state->length = length + read;
    states->ahead = NULL;
    states->ahead_nodes = states->unrecorded = 0;
    mark_state(sizes, states);
    states->first_record = states->replayed = trunk - read;
}

void keep_states(const StateSizes *sizes, RowStates *states, int32_t length, const int32_t *keep, int32_t count,
                 int32_t trunk) {
    if (!sizes->layers)
        return;
    for (int32_t i = 0; i < count; i++)
        states->tokens[length + i] = states->tokens[length + keep[i]];
    const int32_t read = states->ahead_nodes;
    if (!count) {
        forget_ahead(sizes, states);
        states->lost = 0;
    } else if (read && read <= count && keep[read - 1] == read - 1) {
        keep_ahead(sizes, states, length, keep, count, trunk);
    } else if (states->lost || keep[0] < read) { /* the records of some of them are missing */
        forget_ahead(sizes, states);
        states->lost = count > trunk;
    } else {
        move_records(sizes, states, keep, count, states->replayed);
        forget_ahead(sizes, states);
        states->replayed += trunk;
        states->first_record = states->replayed;
    }
}

void drop_node_states(const StateSizes *sizes, RowStates *states, int32_t count) {
    if (!sizes->layers)
        return;
    states->lost = count && (states->lost || states->ahead_nodes > count);
    if (states->ahead_nodes > count || !states->ahead_nodes)
        forget_ahead(sizes, states);
    states->unrecorded = states->ahead_nodes;
}

/* The last of a row's states that has read no more than `length` tokens; NULL: it is behind none. */
static State *state_before(const RowStates *states, int32_t length) {
    State *found = states->state && states->state->length <= length ? states->state : NULL;
    for (int32_t i = 0; i < states->mark_count; i++) {
        State *mark = states->marks[i];
        if (mark->length <= length && (!found || mark->length > found->length))
            found = mark;
    }
    return found;
}

/* Committed tokens behind the state of `length` tokens whose records serve a row that begins there. */
static int32_t records_before(const RowStates *states, const State *state, int32_t length) {
    if (state != states->state)
        return 0;
    const int32_t left = length - (state ? state->length : 0);
    return left < states->replayed ? left : states->replayed;
}

void cut_states(const StateSizes *sizes, RowStates *states, int32_t length) {
    if (!sizes->layers)
        return;
    State *state = state_before(states, length);
    states->replayed = records_before(states, state, length);
    retained(state);
    release_state(sizes, &states->state);
    states->state = state;
    while (states->mark_count && states->marks[states->mark_count - 1]->length > length)
        release_state(sizes, &states->marks[--states->mark_count]);
}

int fork_states(const StateSizes *sizes, const RowStates *source, int32_t length, RowStates *copy) {
    if (!sizes->layers)
        return DRAFTREE_OK;
    State *state = state_before(source, length);
    const int32_t replayed = records_before(source, state, length);
    if (reserve_tokens(copy, length) || reserve_records(sizes, copy, replayed, 0))
        return DRAFTREE_NO_MEMORY;
    if (length)
        memcpy(copy->tokens, source->tokens, (size_t)length * sizeof *copy->tokens);
    if (replayed)
        memcpy(copy->records, source->records, (size_t)record_bytes(sizes, replayed));
    copy->replayed = replayed;
    copy->state = retained(state);
    for (int32_t i = 0; i < source->mark_count && source->marks[i]->length <= length; i++)
        copy->marks[copy->mark_count++] = retained(source->marks[i]);
    return DRAFTREE_OK;
}

void close_states(const StateSizes *sizes, RowStates *states) {
    if (!sizes->layers)
        return;
    forget_ahead(sizes, states);
    release_state(sizes, &states->state);
    release_state(sizes, &states->fresh);
    while (states->mark_count)
        release_state(sizes, &states->marks[--states->mark_count]);
    release(states->records, (size_t)record_bytes(sizes, states->record_capacity));
    *sizes->bytes -= record_bytes(sizes, states->record_capacity);
    free(states->tokens);
}
