/* What translation.c does for draft_translated.c. */
#ifndef DRAFTREE_TRANSLATION_H
#define DRAFTREE_TRANSLATION_H

#include "draftree_drafts.h"

/* What was put for a key (draftree_translation_put). It is valid until something is put. */
typedef struct {
    uint64_t key;
    int32_t found, behind;
    int32_t first_id, count;
} TranslationEntry;

/* NULL: nothing was put for this key. */
const TranslationEntry *find_entry(const Translation *translation, int32_t kind, int32_t text, int32_t token);

/* The model's tokens of a reading. */
const int32_t *ids_of(const Translation *translation, const TranslationEntry *reading);

/* A token of the target's, by the model's tokens that stand for it. The most probable one of these is its reading. */
typedef struct {
    double value; /* log-probability */
    double share; /* log-probability of the reading, if the token comes */
    int32_t token;
    int32_t rank;   /* of the reading among the model's tokens */
    int32_t behind; /* text that the reading spells behind the token */
} Translated;

/* Add up log-probabilities of the model's tokens that stand for the same one. Returns how many are left, the most
 * probable first; of equal ones the lower token comes first, here and below. */
int32_t add_up(Translated *found, int32_t count);

/* Divide sorted probabilities by their sum. */
void normalise(Translated *found, int32_t count);

/* Warp a sorted distribution, add the target's noise where there is a key, and normalise; returns how many are left. */
int32_t warp(Translated *found, int32_t count, const Warping *warping, const uint64_t *key);

#endif
