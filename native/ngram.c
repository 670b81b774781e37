/* Where each n-gram of a request's texts stands: what followed the last tokens before. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "draft.h"

enum { BREAK = -1, FIRST_TABLE = 64, MOST_LENGTH = 1 << 29 };

/* What a token that no match has weighs, for each different successor. */
static const double UNSEEN = 3.0;

struct NgramIndex {
    int32_t shortest;
    int32_t length;     /* of text, breaks included */
    int32_t capacity;   /* of text and earlier */
    int32_t begin;      /* of the text that grows */
    int32_t *text;      /* BREAK before each text */
    int32_t *earlier;   /* for each token the position behind where the n-gram that it ends stood before; 0: nowhere */
    int32_t *table;     /* by hash: the position behind where an n-gram stood last; 0: free */
    int32_t table_size; /* a power of two, at least twice the entries */
    int32_t entries;
    int32_t followed; /* 1: latest follows the end of the text */
    NgramMatches latest;
};

/* ---- the table of n-grams */

static uint32_t hash_of(const int32_t *ngram, int32_t count) {
    uint32_t hash = 2166136261u;
    for (int32_t i = 0; i < count; i++) {
        hash = (hash ^ (uint32_t)ngram[i]) * 0x9E3779B1u;
        hash ^= hash >> 15;
    }
    return hash;
}

/* The entry of an n-gram, or the free one where it would stand. */
static int32_t *entry_of(const NgramIndex *index, const int32_t *ngram) {
    const size_t bytes = (size_t)index->shortest * sizeof *ngram;
    const uint32_t last = (uint32_t)index->table_size - 1;
    uint32_t at = hash_of(ngram, index->shortest) & last;
    while (index->table[at] && memcmp(index->text + index->table[at] - index->shortest, ngram, bytes) != 0)
        at = (at + 1) & last;
    return index->table + at;
}

static int reserve_table(NgramIndex *index, int32_t count) {
    int32_t size = index->table_size;
    while (size / 2 < index->entries + count)
        size *= 2;
    if (size == index->table_size)
        return DRAFTREE_OK;
    int32_t *old = index->table, *table = calloc((size_t)size, sizeof *table);
    if (!table)
        return DRAFTREE_NO_MEMORY;
    const int32_t old_size = index->table_size;
    index->table = table;
    index->table_size = size;
    for (int32_t i = 0; i < old_size; i++)
        if (old[i])
            *entry_of(index, index->text + old[i] - index->shortest) = old[i];
    free(old);
    return DRAFTREE_OK;
}

static int reserve_text(NgramIndex *index, int32_t count) {
    if (index->length + count <= index->capacity)
        return DRAFTREE_OK;
    const int32_t capacity = 2 * (index->length + count);
    int32_t *text = realloc(index->text, (size_t)capacity * sizeof *text);
    if (!text)
        return DRAFTREE_NO_MEMORY;
    index->text = text;
    int32_t *earlier = realloc(index->earlier, (size_t)capacity * sizeof *earlier);
    if (!earlier)
        return DRAFTREE_NO_MEMORY;
    index->earlier = earlier;
    index->capacity = capacity;
    return DRAFTREE_OK;
}

/* ---- matches */

static void search(const NgramIndex *index, const int32_t *tail, int32_t count, NgramMatches *found) {
    found->count = 0;
    if (count < index->shortest)
        return;
    const int32_t *text = index->text;
    int32_t at = *entry_of(index, tail + count - index->shortest);
    for (; at && found->count < NGRAM_MATCHES; at = index->earlier[at - 1]) {
        if (at == index->length || text[at] == BREAK)
            continue;
        int32_t length = index->shortest;
        while (length < count && text[at - 1 - length] == tail[count - 1 - length])
            length++;
        found->positions[found->count] = at;
        found->lengths[found->count++] = length;
    }
}

static void search_end(NgramIndex *index) {
    const int32_t tokens = index->length - index->begin;
    const int32_t count = tokens < NGRAM_LONGEST ? tokens : NGRAM_LONGEST;
    search(index, index->text + index->length - count, count, &index->latest);
}

/* Append a token, for which there is memory. */
static void append(NgramIndex *index, int32_t token) {
    index->text[index->length] = token;
    int32_t *entry = entry_of(index, index->text + index->length + 1 - index->shortest);
    index->entries += !*entry;
    index->earlier[index->length++] = *entry;
    *entry = index->length;
    if (!index->followed)
        return;
    NgramMatches followed;
    draftree_ngram_followed(index, &index->latest, token, &followed);
    index->latest = followed;
    if (!followed.count)
        search_end(index);
}

/* ---- the interface */

int draftree_ngram_open(int32_t shortest, NgramIndex **opened) {
    *opened = NULL;
    if (shortest < 1 || shortest > NGRAM_LONGEST)
        return DRAFTREE_BAD_ARGUMENT;
    NgramIndex *index = calloc(1, sizeof *index);
    if (!index)
        return DRAFTREE_NO_MEMORY;
    index->shortest = shortest;
    index->table_size = FIRST_TABLE;
    index->table = calloc(FIRST_TABLE, sizeof *index->table);
    if (!index->table || reserve_text(index, shortest)) {
        draftree_ngram_close(index);
        return DRAFTREE_NO_MEMORY;
    }
    for (; index->length < shortest; index->length++) {
        index->text[index->length] = BREAK;
        index->earlier[index->length] = 0;
    }
    index->begin = shortest;
    *opened = index;
    return DRAFTREE_OK;
}

void draftree_ngram_close(NgramIndex *index) {
    if (!index)
        return;
    free(index->text);
    free(index->earlier);
    free(index->table);
    free(index);
}

int draftree_ngram_extend(NgramIndex *index, const int32_t *tokens, int32_t count) {
    if (count < 0)
        return DRAFTREE_BAD_ARGUMENT;
    for (int32_t i = 0; i < count; i++)
        if (tokens[i] < 0)
            return DRAFTREE_BAD_TOKEN;
    if (count > MOST_LENGTH - index->length || reserve_text(index, count) || reserve_table(index, count))
        return DRAFTREE_NO_MEMORY;
    for (int32_t i = 0; i < count; i++)
        append(index, tokens[i]);
    return DRAFTREE_OK;
}

int draftree_ngram_end(NgramIndex *index) {
    if (index->length == MOST_LENGTH || reserve_text(index, 1))
        return DRAFTREE_NO_MEMORY;
    index->text[index->length] = BREAK;
    index->earlier[index->length++] = 0;
    index->begin = index->length;
    index->followed = 0;
    return DRAFTREE_OK;
}

void draftree_ngram_latest(NgramIndex *index, NgramMatches *matches) {
    if (!index->followed)
        search_end(index);
    index->followed = 1;
    *matches = index->latest;
}

void draftree_ngram_matches(const NgramIndex *index, const int32_t *tail, int32_t count, NgramMatches *matches) {
    const int32_t skipped = count > NGRAM_LONGEST ? count - NGRAM_LONGEST : 0;
    search(index, tail + skipped, count - skipped, matches);
}

void draftree_ngram_followed(const NgramIndex *index, const NgramMatches *matches, int32_t token,
                             NgramMatches *followed) {
    int32_t count = 0;
    for (int32_t i = 0; i < matches->count; i++) {
        const int32_t at = matches->positions[i], length = matches->lengths[i];
        if (index->text[at] != token || at + 1 >= index->length || index->text[at + 1] == BREAK)
            continue;
        followed->positions[count] = at + 1;
        followed->lengths[count++] = length < NGRAM_LONGEST ? length + 1 : NGRAM_LONGEST;
    }
    followed->count = count;
}

int32_t draftree_ngram_probabilities(const NgramIndex *index, const NgramMatches *matches, int32_t *tokens,
                                     double *probabilities) {
    int32_t count = 0;
    double total = 0;
    for (int32_t i = 0; i < matches->count; i++) {
        const int32_t token = index->text[matches->positions[i]];
        int32_t k = 0;
        while (k < count && tokens[k] != token)
            k++;
        if (k == count) {
            tokens[count] = token;
            probabilities[count++] = 0;
        }
        probabilities[k] += pow(matches->lengths[i], 1.5);
    }
    for (int32_t i = 0; i < count; i++)
        total += probabilities[i];
    for (int32_t i = 1; i < count; i++) { /* stable: of equal ones the earlier match comes first */
        const int32_t token = tokens[i];
        const double votes = probabilities[i];
        int32_t k = i;
        for (; k && probabilities[k - 1] < votes; k--) {
            tokens[k] = tokens[k - 1];
            probabilities[k] = probabilities[k - 1];
        }
        tokens[k] = token;
        probabilities[k] = votes;
    }
    for (int32_t i = 0; i < count; i++)
        probabilities[i] /= total + UNSEEN * count;
    return count;
}

int32_t ngram_tail(const NgramIndex *index, int32_t *tail) {
    const int32_t tokens = index->length - index->begin, count = tokens < NGRAM_LONGEST ? tokens : NGRAM_LONGEST;
    memcpy(tail, index->text + index->length - count, (size_t)count * sizeof *tail);
    return count;
}
