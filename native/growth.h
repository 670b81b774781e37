/* What the files that grow trees share: proposals while they grow. */
#ifndef DRAFTREE_GROWTH_H
#define DRAFTREE_GROWTH_H

#include "buffer.h"
#include "draft.h"
#include "translation.h"

/* A node that was drafted, or a root. */
typedef struct {
    int32_t token, parent, depth;
    int32_t first;    /* its first candidate; -1: it has none, or was not scored */
    int32_t verified; /* it is verified */
    int32_t number;   /* in the finished tree */
    double path;      /* log-probability */
    double value;     /* how probable it is that it is accepted */
    double entropy;   /* of the distribution that it is from */
    double logprob;   /* of its first candidate */
} DraftedNode;

/* What has been drafted for one request. */
typedef struct {
    int32_t part;  /* that drafts it; -1: none has candidates */
    int32_t most;  /* nodes to draft */
    int32_t count; /* nodes so far */
    int32_t best_count;
    Buffer nodes;   /* DraftedNode: the root, then the nodes */
    Buffer matches; /* NgramMatches of them, where texts draft */
    Buffer best;    /* double: a heap of the most probable paths, the least of them first */
} GrowingTree;

/* A candidate that becomes a node. */
typedef struct {
    int32_t at, rank; /* of its parent in the layer; among the parent's candidates */
    int32_t extends;  /* it may get children in turn */
    int32_t taken;
    double path, value;
} Child;

typedef struct {
    double key;
    int32_t request, at;
} Ranked;

/* Candidates of many nodes, in memory of their own. */
typedef struct {
    Candidates view;
    Buffer counts, tokens, logprobs, entropies;
} CandidateBuffers;

/* How far a model of other token ids has read up to a node. */
typedef struct {
    int32_t number;   /* of its last token up to there in its row; -1: the last committed one */
    int32_t depth;    /* its uncommitted tokens up to there; -1: the node was not scored */
    int32_t own;      /* of these, those of the node itself */
    int32_t left;     /* the text behind these, not read yet */
    int32_t expected; /* text that is expected next, so that no pass was made; 0: there was one */
    double share;     /* log-probability of that */
    int32_t first_continuation, continuation_count;
} ReadNode;

/* What is expected behind a candidate. */
typedef struct {
    int32_t token, text;
    double share;
} Continuation;

/* What such a model has read of a request's tree. */
typedef struct {
    int32_t count, continuation_count;
    Buffer nodes;         /* [1 + count] ReadNode: the root, then the nodes */
    Buffer continuations; /* [continuation_count] Continuation */
} ReadTree;

/* What goes into its passes and comes out of them. */
typedef struct {
    Buffer rows, counts, tokens, parents, wanted; /* of the pass */
    Buffer places;                                /* [nodes of the layer] slot of each, -1: no pass was made for it */
    Buffer slots, found, logprobs, entropies;     /* of the scores */
    Buffer missing;                               /* TranslationKey */
} TranslationMemory;

struct Draft {
    int32_t requests, parts; /* of the proposal whose outcomes are still to come; 0: there is none */
    int32_t depth;           /* of the layer whose nodes are scored, the roots' is 0 */
    int32_t layer_count, batch_count, child_count;
    int32_t best_count, paying; /* entries of `best`, and how many of them pay */
    Buffer trees;               /* [requests] GrowingTree */
    Buffer fed, cells;          /* [parts][requests] Fed, and Buffer of their cells */
    PassMemory pass_memory;
    Buffer read_trees; /* [parts][requests] ReadTree */
    TranslationMemory translation_memory;
    Buffer layer;           /* [layer_count] DraftNode */
    Buffer masks, forced;   /* [layer_count] const uint32_t *, int32_t */
    Buffer batch, batch_at; /* [batch_count] DraftNode of the layer that a part scores, and where they are there */
    Buffer batch_masks;
    Buffer children; /* [child_count] Child */
    Buffer best;     /* [best_count] double: the values of all drafted nodes, in descending order */
    Buffer ranked;   /* Ranked */
    Buffer numbers;  /* int32_t */
    Buffer left;     /* [requests] int32_t: nodes that still fit */
    Buffer gains;    /* [requests] double: expected tokens that the layer adds */
    Buffer output;   /* columns of finished trees */
    CandidateBuffers candidates, batch_candidates; /* of the layer, and of what is batch */
};

static inline GrowingTree *growing_tree(const Draft *draft, int32_t request) {
    return (GrowingTree *)draft->trees.data + request;
}

/* A node of a request; -1: the root. */
static inline DraftedNode *node_at(const GrowingTree *tree, int32_t node) {
    return (DraftedNode *)tree->nodes.data + 1 + node;
}

/* It scores by passes of a model that reads the target's tokens. */
static inline int by_pass(const DraftPart *part) { return part->kind == BY_MODEL || part->kind == BY_DRAFT_HEAD; }

static inline Fed *fed_of(const Draft *draft, int32_t part, int32_t request) {
    return (Fed *)draft->fed.data + (int64_t)part * draft->requests + request;
}

/* The parts of kind BY_TRANSLATION (draft_translated.c), as begin_models, score_by_models and commit_accepted; and the
 * end of what they keep. */
int begin_translation(Draft *draft, const DraftStep *step, int32_t part);
int score_by_translation(Draft *draft, const DraftStep *step, const DraftLayer *layer, const Candidates *found);
int commit_translated(Draft *draft, const DraftStep *step, int32_t part, int32_t request, const int32_t *path,
                      int32_t count);
void free_translations(Draft *draft);

/* How far such a part has read up to a node: tokens, and the text that is left; not written if the node was not scored.
 */
void find_end(const Draft *draft, int32_t part, int32_t request, int32_t node, int32_t *depth, int32_t *left);

/* Score the layer's nodes, `width` candidates of each at most: 0 or an error code. */
int score_layer(Draft *draft, const DraftStep *step, int32_t width, DraftWork *work);

/* Sort in descending order; of equal keys those of the earlier request, and entry, come first. */
void rank(Ranked *ranked, int64_t count);

/* How many nodes to draft for a tree of so many. */
int32_t most_drafted(const DraftRule *rule, int32_t nodes);

/* Choose the layer's children: 0 or an error code. */
int choose_children(Draft *draft, const DraftStep *step);

/* Choose the nodes that are verified. */
int choose_verified(Draft *draft, const DraftStep *step);

#endif
