/* What the files of scores share: one call, its edited logits (edits.c), its warped distributions (draws.c). */
#ifndef DRAFTREE_SCORES_H
#define DRAFTREE_SCORES_H

#include "model.h"

/* One call: what is wanted of which slots. Entry i is of slot slots[i]. */
typedef struct ScoresCall ScoresCall;
struct ScoresCall {
    Model *model;
    int32_t count;
    const int32_t *slots;
    const Edits *edits;
    void (*score_entry)(const ScoresCall *call, int32_t entry, const float *logits, int thread);
    int32_t k;
    const int32_t *scored_tokens;
    const uint64_t *keys;
    const Warping *warpings;
    int32_t *tokens;
    float *log_probabilities;
    float *entropies;
};

static inline const VectorKernels *vector(const ScoresCall *call) { return call->model->tier->vector; }

/* Logits of an entry: all, or those of a draft head's outputs and what the row has learned. */
static inline int64_t logit_count(const ScoresCall *call, int32_t entry) {
    const Model *model = call->model;
    const int32_t learned = model->draft_head ? model->slots[call->slots[entry]].learned : 0;
    return learned ? output_stride(model) + learned : model->architecture.vocabulary;
}

/* The token of a logit. */
static inline int32_t token_of(const ScoresCall *call, int32_t entry, int64_t logit) {
    const Model *model = call->model;
    if (!model->draft_head)
        return (int32_t)logit;
    const int64_t learned = logit - output_stride(model);
    return learned < 0 ? model->draft_head->tokens[logit]
                       : model->learned_tokens[model->slots[call->slots[entry]].first + learned];
}

/* The edits fit the model; 0 or an error code. */
int check_edits(const Model *model, int32_t count, const Edits *edits);

/* The logits of an entry, edited in memory of the thread's own where there are edits. */
const float *edited_logits(const ScoresCall *call, int32_t entry, int thread);

/* A token that may be drawn. */
typedef struct {
    float logit; /* divided by the temperature */
    int32_t token;
} Candidate;

/* A warped distribution, and the key of its noise. */
typedef struct {
    const ScoresCall *call;
    int32_t entry;
    const float *logits;
    int64_t length;
    const Warping *warping;
    uint64_t key;
    int32_t argmax;  /* the most probable token */
    float max_logit; /* the largest warped logit */
    float threshold; /* tokens below it are dropped */
    void *scratch;   /* the thread's own (ThreadSpace) */
} Draw;

/* Of qsort: the larger logit first, of equal ones the lower token. */
int compare_candidates(const void *left, const void *right);

/* The warping of an entry whose temperature is positive. */
Draw warped_draw(const ScoresCall *call, int32_t entry, const float *logits, int thread);

/* argmax of logit + noise. */
int32_t draw_token(const Draw *draw);

/* Write warped logits to the thread's memory, with the noise of the draw where there is a key. */
const float *warp_logits(const Draw *draw);

#endif
