/* Two vocabularies: a table of what tokens and texts of the one are in the other, which the caller fills; and
 * distributions of the target's tokens from those of the model's. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "noise.h"
#include "translation.h"

/* Probability that is added to each of the target's tokens. */
static const double SMOOTHING = 1e-30;

struct Translation {
    int64_t count, capacity;   /* entries, and places for them: a power of two, or 0 */
    TranslationEntry *entries; /* [capacity]; those without a key are free */
    int64_t id_count, id_capacity;
    int32_t *ids; /* of all readings */
};

/* No key is packed as 0. */
static uint64_t packed(const TranslationKey *key) {
    return (uint64_t)(key->kind + 1) << 62 | (uint64_t)key->text << 31 | (uint64_t)key->token;
}

static int64_t place_of(const Translation *translation, uint64_t key) {
    uint64_t place = mixed(key);
    for (;; place++) {
        const TranslationEntry *entry = &translation->entries[place & (uint64_t)(translation->capacity - 1)];
        if (!entry->key || entry->key == key)
            return entry - translation->entries;
    }
}

int draftree_translation_open(Translation **translation) {
    *translation = calloc(1, sizeof **translation);
    return *translation ? DRAFTREE_OK : DRAFTREE_NO_MEMORY;
}

void draftree_translation_clear(Translation *translation) {
    free(translation->entries);
    free(translation->ids);
    *translation = (Translation){0};
}

void draftree_translation_close(Translation *translation) {
    if (!translation)
        return;
    draftree_translation_clear(translation);
    free(translation);
}

const TranslationEntry *find_entry(const Translation *translation, int32_t kind, int32_t text, int32_t token) {
    if (!translation->capacity)
        return NULL;
    const uint64_t key = packed(&(TranslationKey){kind, text, token});
    const TranslationEntry *found = &translation->entries[place_of(translation, key)];
    return found->key ? found : NULL;
}

const int32_t *ids_of(const Translation *translation, const TranslationEntry *reading) {
    return translation->ids + reading->first_id;
}

/* Keep half of the places free, so that a search ends. */
static int reserve_places(Translation *translation) {
    if (2 * (translation->count + 1) <= translation->capacity)
        return DRAFTREE_OK;
    const Translation old = *translation;
    Translation grown = old;
    grown.capacity = old.capacity ? 2 * old.capacity : 256;
    grown.entries = calloc((size_t)grown.capacity, sizeof *grown.entries);
    if (!grown.entries)
        return DRAFTREE_NO_MEMORY;
    for (int64_t i = 0; i < old.capacity; i++)
        if (old.entries[i].key)
            grown.entries[place_of(&grown, old.entries[i].key)] = old.entries[i];
    free(old.entries);
    *translation = grown;
    return DRAFTREE_OK;
}

static int reserve_ids(Translation *translation, int32_t count) {
    if (translation->id_count + count <= translation->id_capacity)
        return DRAFTREE_OK;
    const int64_t capacity = 2 * (translation->id_count + count) + 256;
    int32_t *ids = realloc(translation->ids, (size_t)capacity * sizeof *ids);
    if (!ids)
        return DRAFTREE_NO_MEMORY;
    translation->ids = ids;
    translation->id_capacity = capacity;
    return DRAFTREE_OK;
}

int draftree_translation_put(Translation *translation, const TranslationKey *key, int32_t found, int32_t behind,
                             const int32_t *ids, int32_t count) {
    if (key->kind < FIRST_OF_TOKEN || key->kind > READING || key->text < 0 || key->token < 0 || found < -1 ||
        behind < 0 || count < 0 || translation->id_count + count > INT32_MAX)
        return DRAFTREE_BAD_ARGUMENT;
    if (reserve_places(translation) || reserve_ids(translation, count))
        return DRAFTREE_NO_MEMORY;
    TranslationEntry *entry = &translation->entries[place_of(translation, packed(key))];
    if (entry->key)
        return DRAFTREE_OK;
    *entry = (TranslationEntry){packed(key), found, behind, (int32_t)translation->id_count, count};
    if (count)
        memcpy(translation->ids + translation->id_count, ids, (size_t)count * sizeof *ids);
    translation->id_count += count;
    translation->count++;
    return DRAFTREE_OK;
}

/* ---- distributions of the target's tokens */

static int by_token(const void *one, const void *other) {
    const Translated *a = one, *b = other;
    return a->token != b->token ? (a->token > b->token) - (a->token < b->token) : a->rank - b->rank;
}

static int by_value(const void *one, const void *other) {
    const Translated *a = one, *b = other;
    return a->value != b->value ? (a->value < b->value) - (a->value > b->value)
                                : (a->token > b->token) - (a->token < b->token);
}

static void sort(Translated *found, int32_t count, int (*order)(const void *, const void *)) {
    qsort(found, (size_t)count, sizeof *found, order);
}

int32_t add_up(Translated *found, int32_t count) {
    sort(found, count, by_token);
    int32_t sums = 0;
    for (int32_t i = 0; i < count;) {
        const Translated best = found[i];
        double sum = 0;
        for (; i < count && found[i].token == best.token; i++)
            sum += exp(found[i].value);
        const double total = fmax(log(sum + SMOOTHING), best.value);
        found[sums] = best;
        found[sums].share = best.value - total;
        found[sums++].value = fmin(total, 0);
    }
    sort(found, sums, by_value);
    return sums;
}

/* log(sum(exp(values))) */
static double log_sum(const Translated *found, int32_t count) {
    double sum = 0;
    for (int32_t i = 0; i < count; i++)
        sum += exp(found[i].value - found[0].value);
    return found[0].value + log(sum);
}

void normalise(Translated *found, int32_t count) {
    const double total = log_sum(found, count);
    for (int32_t i = 0; i < count; i++)
        found[i].value -= total;
}

/* How many are not below `least`. */
static int32_t down_to(const Translated *found, int32_t count, double least) {
    while (count && found[count - 1].value < least)
        count--;
    return count;
}

int32_t warp(Translated *found, int32_t count, const Warping *warping, const uint64_t *key) {
    for (int32_t i = 0; i < count; i++)
        found[i].value /= (double)warping->temperature;
    if (warping->top_k > 0 && warping->top_k < count)
        count = down_to(found, count, found[warping->top_k - 1].value);
    if (warping->top_p < 1) {
        const double total = log_sum(found, count);
        double mass = 0;
        int32_t last = 0; /* the tokens before it hold less than top_p */
        while (last < count - 1 && (mass += exp(found[last].value - total)) < (double)warping->top_p)
            last++;
        count = down_to(found, count, found[last].value);
    }
    if (warping->min_p > 0)
        count = down_to(found, count, found[0].value + (double)logf(warping->min_p));
    for (int32_t i = 0; i < count && key; i++)
        found[i].value = (found[i].value + gumbel_noise(*key, found[i].token)) * (double)warping->temperature;
    if (key)
        sort(found, count, by_value);
    normalise(found, count);
    return count;
}
