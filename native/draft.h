/* What the files of drafting share: a proposal while it grows. draft.c grows trees, draft_models.c scores nodes by
 * passes of models. */
#ifndef DRAFTREE_DRAFT_H
#define DRAFTREE_DRAFT_H

#include "draftree_drafts.h"

/* What may follow scored nodes: node i has counts[i] candidates, from i * width on, the most probable first. */
typedef struct {
    int32_t width;
    int32_t *counts;
    int32_t *tokens;
    double *logprobs;  /* nats, finite, of those behind edits and warping */
    double *entropies; /* [nodes] nats, of whole distributions */
} Candidates;

/* What one part holds of one request's tree. */
typedef struct {
    int32_t waiting; /* tokens that were fed in front of the tree, the root among them: the row's first nodes */
    int32_t count;   /* of cells that are filled in: it has read no later node */
    int32_t *cells;  /* node of the pool -> number among the row's uncommitted nodes; -1: it has not read it */
} Fed;

/* What a part has of a request. */
static inline const DraftSource *source_of(const DraftStep *step, int32_t request, int32_t part) {
    return step->sources + (int64_t)request * step->part_count + part;
}

/* Nodes of one depth that a part scores, in the order of their requests. */
typedef struct {
    int32_t part;
    int32_t depth; /* of roots 0 */
    int32_t count;
    const DraftNode *nodes;
    const uint32_t *const *masks; /* [count] of the tokens that may follow each; NULL: any may, as where it is NULL */
} DraftLayer;

/* What goes into passes and comes out of them, in memory that is kept for the next one. */
typedef struct {
    uint8_t *bytes;
    int64_t capacity;
} PassMemory;
void free_pass_memory(PassMemory *memory);

/* Write the last tokens of an index's text, at most NGRAM_LONGEST; returns how many. */
int32_t ngram_tail(const NgramIndex *index, int32_t *tail);

/* The parts of kind BY_MODEL and BY_DRAFT_HEAD. fed: [request_count] of the part, each with room for all nodes of its
 * pool. What they change is in their rows alone: Python finds the new lengths there (draftree_length), also after an
 * error.
 *
 * Begin a step: drop what a failed one has left behind in the part's rows; nothing is fed yet. */
int begin_models(const DraftStep *step, int32_t part, Fed *fed);

/* Score a layer in one pass, with `found->width` candidates of each node at most. A root comes with the tokens that its
 * row has not read; a head commits them. */
int score_by_models(const DraftStep *step, const DraftLayer *layer, Fed *fed, PassMemory *memory, Candidates *found);

/* Commit what a part has read of a request's accepted path, numbers in the pool. */
int commit_accepted(const DraftStep *step, int32_t part, int32_t request, const Fed *fed, const int32_t *path,
                    int32_t count, PassMemory *memory);

#endif
