/* What tests/models/native/draft_walk.py calls of drafting by ctypes, beside the interface. */
#include "../draft.h"

__attribute__((visibility("default"))) const struct {
    int (*begin_models)(const DraftStep *step, int32_t part, Fed *fed);
    int (*score_by_models)(const DraftStep *step, const DraftLayer *layer, Fed *fed, PassMemory *memory,
                           Candidates *found);
    int (*commit_accepted)(const DraftStep *step, int32_t part, int32_t request, const Fed *fed, const int32_t *path,
                           int32_t count, PassMemory *memory);
    void (*free_pass_memory)(PassMemory *memory);
} drafting = {begin_models, score_by_models, commit_accepted, free_pass_memory};
