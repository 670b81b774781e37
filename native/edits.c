/* Edits of logits: changes of tokens, masks. */
#include <math.h>
#include <string.h>

#include "scores.h"

static void change_logits(const Edits *edits, int32_t entry, float *logits) {
    for (int32_t i = edits->change_starts[entry]; i < edits->change_starts[entry + 1]; i++) {
        float *logit = logits + edits->tokens[i];
        *logit = (*logit > 0 ? *logit * edits->positive[i] : *logit * edits->negative[i]) + edits->addend[i];
    }
}

static void mask_logits(const uint32_t *mask, int64_t tokens, float *logits) {
    uint32_t any = 0;
    for (int64_t word = 0; word < (tokens + 31) / 32; word++) {
        const int64_t left = tokens - word * 32;
        any |= left >= 32 ? mask[word] : mask[word] & ((1u << left) - 1);
    }
    if (!any)
        return;
    for (int64_t word = 0; word < (tokens + 31) / 32; word++) {
        const int64_t end = tokens < (word + 1) * 32 ? tokens : (word + 1) * 32;
        if (mask[word] == UINT32_MAX)
            continue;
        for (int64_t token = word * 32; token < end; token++)
            if (!(mask[word] >> (token % 32) & 1))
                logits[token] = -INFINITY;
    }
}

static int allows(const uint32_t *mask, int32_t token) { return mask[token / 32] >> (token % 32) & 1; }

/* Mask a draft head's logits; a mask that allows none of its tokens is left out. */
static void mask_outputs(const ScoresCall *call, int32_t entry, const uint32_t *mask, float *logits) {
    const int64_t count = logit_count(call, entry);
    int any = 0;
    for (int64_t i = 0; i < count && !any; i++)
        any = logits[i] > -INFINITY && allows(mask, token_of(call, entry, i));
    for (int64_t i = 0; i < count && any; i++)
        if (!allows(mask, token_of(call, entry, i)))
            logits[i] = -INFINITY;
}

const float *edited_logits(const ScoresCall *call, int32_t entry, int thread) {
    const Model *model = call->model;
    const Edits *edits = call->edits;
    const float *raw = model->logits + call->slots[entry] * model->logit_stride;
    const int32_t mask = edits && edits->mask_of ? edits->mask_of[entry] : -1;
    const int changed = edits && edits->change_starts && edits->change_starts[entry + 1] > edits->change_starts[entry];
    if (mask < 0 && !changed)
        return raw;
    float *logits = model->work.own[thread].edited;
    memcpy(logits, raw, (size_t)logit_count(call, entry) * sizeof *logits);
    if (changed)
        change_logits(edits, entry, logits);
    if (mask < 0)
        return logits;
    const uint32_t *bits = edits->masks + mask * ((model->tokens + 31) / 32);
    if (model->draft_head)
        mask_outputs(call, entry, bits, logits);
    else
        mask_logits(bits, model->tokens, logits);
    return logits;
}

int check_edits(const Model *model, int32_t count, const Edits *edits) {
    if (!edits || !edits->change_starts)
        return DRAFTREE_OK;
    if (model->draft_head)
        return DRAFTREE_BAD_ARGUMENT;
    for (int32_t entry = 0; entry < count; entry++)
        if (edits->change_starts[entry] < 0 || edits->change_starts[entry] > edits->change_starts[entry + 1])
            return DRAFTREE_BAD_ARGUMENT;
    for (int32_t i = edits->change_starts[0]; count && i < edits->change_starts[count]; i++)
        if (edits->tokens[i] < 0 || edits->tokens[i] >= model->architecture.vocabulary)
            return DRAFTREE_BAD_TOKEN;
    return DRAFTREE_OK;
}
