/* The weights of a model: where they come from, and what weights.c does with them. */
#ifndef DRAFTREE_WEIGHTS_H
#define DRAFTREE_WEIGHTS_H

#include "model.h"
#include "read.h"

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

/* Every tensor has the shape that the architecture demands, in a format that the engine reads. */
int check_tensors(const Model *model, const LoadSource *source);

/* Lay out the weights' memory, and read them into it. Both return 0 or an error code. */
int read_weights(Model *model, const LoadSource *source);

#endif
