/* What a pass found at its nodes: argmax, the most probable tokens, log-probabilities, keyed draws. Computed where the
 * logits are, a slot by each thread. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "noise.h"
#include "scores.h"

enum { BEST_BLOCK = 64 }; /* tokens that are looked at together */

static void score_share(void *argument, int thread, int threads) {
    const ScoresCall *call = argument;
    for (int32_t entry = thread; entry < call->count; entry += threads)
        call->score_entry(call, entry, edited_logits(call, entry, thread), thread);
}

static int run_call(ScoresCall *call) {
    Model *model = call->model;
    if (call->count < 0)
        return DRAFTREE_BAD_ARGUMENT;
    for (int32_t entry = 0; entry < call->count; entry++)
        if (call->slots[entry] < 0 || call->slots[entry] >= model->slot_count)
            return DRAFTREE_BAD_ARGUMENT;
    int error = check_edits(model, call->count, call->edits);
    if (error)
        return error;
    if (call->count > 1)
        pool_run(model->pool, score_share, call);
    else if (call->count == 1) /* nobody to share it with: no thread is woken */
        call->score_entry(call, 0, edited_logits(call, 0, 0), 0);
    return DRAFTREE_OK;
}

/* ---- argmax, log-probabilities */

static void score_argmax(const ScoresCall *call, int32_t entry, const float *logits, int thread) {
    (void)thread;
    call->tokens[entry] = token_of(call, entry, vector(call)->argmax(logits, logit_count(call, entry)));
}

int draftree_argmax(Model *model, int32_t count, const int32_t *slots, const Edits *edits, int32_t *tokens) {
    ScoresCall call = {
        .model = model, .count = count, .slots = slots, .edits = edits, .score_entry = score_argmax, .tokens = tokens};
    return run_call(&call);
}

/* log of the sum of exp(logits), and the entropy in nats of their softmax. */
typedef struct {
    double log_sum;
    double entropy;
} Normaliser;

static Normaliser normaliser(const ScoresCall *call, int32_t entry, const float *logits) {
    const int64_t count = logit_count(call, entry);
    const float most = logits[vector(call)->argmax(logits, count)];
    double sum, weighted;
    vector(call)->exponential_sums(logits, count, most, &sum, &weighted);
    const double entropy = log(sum) - weighted / sum;
    return (Normaliser){most + log(sum), entropy > 0 ? entropy : 0};
}

static void score_tokens(const ScoresCall *call, int32_t entry, const float *logits, int thread) {
    (void)thread;
    const int32_t scored_tokens = call->scored_tokens[entry];
    const double log_sum = normaliser(call, entry, logits).log_sum;
    int64_t logit = call->model->draft_head ? 0 : scored_tokens;
    while (logit < logit_count(call, entry) && token_of(call, entry, logit) != scored_tokens)
        logit++;
    call->log_probabilities[entry] = logit < logit_count(call, entry) ? (float)(logits[logit] - log_sum) : -INFINITY;
}

int draftree_log_probabilities(Model *model, int32_t count, const int32_t *slots, const int32_t *tokens,
                               float *log_probabilities) {
    for (int32_t entry = 0; entry < count; entry++)
        if (tokens[entry] < 0 || tokens[entry] >= model->tokens)
            return DRAFTREE_BAD_TOKEN;
    ScoresCall call = {.model = model,
                       .count = count,
                       .slots = slots,
                       .score_entry = score_tokens,
                       .scored_tokens = tokens,
                       .log_probabilities = log_probabilities};
    return run_call(&call);
}

int draftree_logits(const Model *model, int32_t slot, int32_t count, float *logits) {
    if (slot < 0 || slot >= model->slot_count || count < model->architecture.vocabulary)
        return DRAFTREE_BAD_ARGUMENT;
    const float *own = model->logits + slot * model->logit_stride;
    const int32_t outputs = model->architecture.vocabulary,
                  learned = model->draft_head ? model->slots[slot].learned : 0;
    if (learned > count - outputs)
        return DRAFTREE_BAD_ARGUMENT;
    memcpy(logits, own, (size_t)outputs * sizeof *logits);
    memcpy(logits + outputs, own + output_stride(model), (size_t)learned * sizeof *logits);
    for (int32_t i = outputs + learned; i < count; i++)
        logits[i] = -INFINITY;
    return DRAFTREE_OK;
}

/* ---- draws */

static int check_warpings(const Warping *warpings, int32_t count) {
    for (int32_t entry = 0; warpings && entry < count; entry++)
        if (!(warpings[entry].temperature >= 0) || !(warpings[entry].top_p > 0) || !(warpings[entry].min_p >= 0))
            return 0;
    return 1;
}

static void score_draw(const ScoresCall *call, int32_t entry, const float *logits, int thread) {
    if (call->warpings[entry].temperature == 0) {
        call->tokens[entry] = (int32_t)vector(call)->argmax(logits, logit_count(call, entry));
        return;
    }
    const Draw draw = warped_draw(call, entry, logits, thread);
    call->tokens[entry] = draw_token(&draw);
}

int draftree_draw(Model *model, int32_t count, const int32_t *slots, const uint64_t *keys, const Warping *warpings,
                  const Edits *edits, int32_t *tokens) {
    if (model->draft_head || !check_warpings(warpings, count))
        return DRAFTREE_BAD_ARGUMENT;
    ScoresCall call = {.model = model,
                       .count = count,
                       .slots = slots,
                       .edits = edits,
                       .score_entry = score_draw,
                       .keys = keys,
                       .warpings = warpings,
                       .tokens = tokens};
    return run_call(&call);
}

/* ---- the most probable tokens */

/* Put a token among the k best, the best first; of equal logits the lower token. Tokens come in ascending order. */
static void insert_best(float *values, int32_t *tokens, int32_t k, float value, int32_t token) {
    int32_t place = k - 1;
    while (place > 0 && values[place - 1] < value) {
        values[place] = values[place - 1];
        tokens[place] = tokens[place - 1];
        place--;
    }
    values[place] = value;
    tokens[place] = token;
}

/* The k best tokens and their logits; those of -INFINITY come last. */
static void find_best(const ScoresCall *call, const float *logits, int64_t length, int32_t k, float *values,
                      int32_t *tokens) {
    for (int32_t i = 0; i < k; i++) {
        values[i] = -INFINITY;
        tokens[i] = i; /* stays where logits are no numbers */
    }
    for (int64_t block = 0; block < length; block += BEST_BLOCK) {
        const int64_t size = length - block < BEST_BLOCK ? length - block : BEST_BLOCK;
        const int64_t best = block + vector(call)->argmax(logits + block, size);
        if (!(logits[best] > values[k - 1]))
            continue;
        for (int64_t token = block; token < block + size; token++)
            if (logits[token] > values[k - 1])
                insert_best(values, tokens, k, logits[token], (int32_t)token);
    }
    int32_t possible = 0;
    while (possible < k && values[possible] > -INFINITY)
        possible++;
    for (int32_t token = 0; token < length && possible < k; token++)
        if (logits[token] == -INFINITY)
            tokens[possible++] = token;
}

/* The k best logits with exact noise: they are among a few more that are best with noise that is about right. */
static void find_noisy_best(const Draw *draw, const float *warped, int32_t k, float *values, int32_t *tokens) {
    enum { MORE = 8 };
    const float temperature = draw->warping->temperature;
    const int64_t length = draw->length;
    const int32_t some = k + MORE < length ? k + MORE : (int32_t)length;
    float about[MOST_TOP + MORE];
    int32_t which[MOST_TOP + MORE];
    Candidate candidates[MOST_TOP + MORE];
    find_best(draw->call, warped, length, some, about, which);
    for (int32_t i = 0; i < some; i++) {
        const float noise = (float)gumbel_noise(draw->key, token_of(draw->call, draw->entry, which[i]));
        const float exact = (draw->logits[which[i]] / temperature + noise) * temperature;
        candidates[i] = (Candidate){about[i] > -INFINITY ? exact : -INFINITY, which[i]};
    }
    qsort(candidates, (size_t)some, sizeof *candidates, compare_candidates);
    for (int32_t i = 0; i < k; i++) {
        values[i] = candidates[i].logit;
        tokens[i] = candidates[i].token;
    }
}

static void score_top(const ScoresCall *call, int32_t entry, const float *logits, int thread) {
    const int32_t k = call->k;
    float *values = call->log_probabilities + (int64_t)entry * k;
    int32_t *tokens = call->tokens + (int64_t)entry * k;
    const int warped = call->warpings && call->warpings[entry].temperature > 0;
    if (warped) {
        const Draw draw = warped_draw(call, entry, logits, thread);
        logits = warp_logits(&draw);
        if (call->keys)
            find_noisy_best(&draw, logits, k, values, tokens);
    }
    if (!warped || !call->keys)
        find_best(call, logits, logit_count(call, entry), k, values, tokens);
    const Normaliser found = normaliser(call, entry, logits);
    for (int32_t i = 0; i < k; i++) {
        values[i] = fminf((float)(values[i] - found.log_sum), 0); /* the sum is of noise that is about right */
        tokens[i] = token_of(call, entry, tokens[i]);
    }
    call->entropies[entry] = (float)found.entropy;
}

int draftree_top(Model *model, int32_t count, const int32_t *slots, int32_t k, const Edits *edits,
                 const Warping *warpings, const uint64_t *keys, int32_t *tokens, float *log_probabilities,
                 float *entropies) {
    if (!check_warpings(warpings, count) || k < 1 || k > MOST_TOP || k > model->architecture.vocabulary)
        return DRAFTREE_BAD_ARGUMENT;
    ScoresCall call = {.model = model,
                       .count = count,
                       .slots = slots,
                       .edits = edits,
                       .score_entry = score_top,
                       .k = k,
                       .warpings = warpings,
                       .keys = keys,
                       .tokens = tokens,
                       .log_probabilities = log_probabilities,
                       .entropies = entropies};
    return run_call(&call);
}
