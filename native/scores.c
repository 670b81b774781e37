/* What a pass found at its nodes: argmax, the most probable tokens, log-probabilities, keyed draws. Computed where the
 * logits are, a slot by each thread. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"
#include "noise.h"

enum { BEST_BLOCK = 64 };

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

static const VectorKernels *vector(const ScoresCall *call) { return call->model->tier->vector; }

/* Logits of an entry: all, or those of a draft head's outputs and what the row has learned. */
static int64_t logit_count(const ScoresCall *call, int32_t entry) {
    const Model *model = call->model;
    const int32_t learned = model->draft_head ? model->slots[call->slots[entry]].learned : 0;
    return learned ? output_stride(model) + learned : model->architecture.vocabulary;
}

/* The token of a logit. */
static int32_t token_of(const ScoresCall *call, int32_t entry, int64_t logit) {
    const Model *model = call->model;
    if (!model->draft_head)
        return (int32_t)logit;
    const int64_t learned = logit - output_stride(model);
    return learned < 0 ? model->draft_head->tokens[logit]
                       : model->learned_tokens[model->slots[call->slots[entry]].first + learned];
}

/* ---- edits */

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

/* The logits of an entry, edited in memory of the thread's own where there are edits. */
static const float *edited_logits(const ScoresCall *call, int32_t entry, int thread) {
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

static void score_share(void *argument, int thread, int threads) {
    const ScoresCall *call = argument;
    for (int32_t entry = thread; entry < call->count; entry += threads)
        call->score_entry(call, entry, edited_logits(call, entry, thread), thread);
}

static int check_edits(const Model *model, int32_t count, const Edits *edits) {
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

/* Tokens that are looked at together. */
enum { DRAW_BLOCK = 256 };

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

static int compare_candidates(const void *left, const void *right) {
    const Candidate *a = left, *b = right;
    if (a->logit != b->logit)
        return a->logit < b->logit ? 1 : -1;
    return (a->token > b->token) - (a->token < b->token);
}

/* The largest warped logit of some tokens. */
static float largest(const Draw *draw, int64_t first, int64_t size) {
    return draw->logits[first + vector(draw->call)->argmax(draw->logits + first, size)] / draw->warping->temperature;
}

/* Tokens whose warped logit is at least `threshold`, in the thread's memory until the next call. Most blocks of tokens
 * hold none: their largest one tells. */
static Candidate *collect(const Draw *draw, float threshold, int64_t *count) {
    const int64_t length = draw->length;
    Candidate *candidates = draw->scratch;
    *count = 0;
    for (int64_t block = 0; block < length; block += DRAW_BLOCK) {
        const int64_t size = length - block < DRAW_BLOCK ? length - block : DRAW_BLOCK;
        if (!(largest(draw, block, size) >= threshold))
            continue;
        for (int64_t token = block; token < block + size; token++) {
            const float logit = draw->logits[token] / draw->warping->temperature;
            candidates[*count] = (Candidate){logit, (int32_t)token};
            *count += logit >= threshold;
        }
    }
    return candidates;
}

static float kth_largest(const Draw *draw, int64_t k) {
    /* Wider and wider below the largest, until k tokens are there. */
    for (float width = 4;; width *= 2) {
        int64_t count;
        const float threshold = width < 1e4f ? draw->max_logit - width : -INFINITY;
        Candidate *candidates = collect(draw, threshold, &count);
        if (count >= k || threshold == -INFINITY) {
            qsort(candidates, (size_t)count, sizeof *candidates, compare_candidates);
            return count >= k ? candidates[k - 1].logit : -INFINITY; /* fewer are numbers */
        }
    }
}

/* sum of exp(x - most) over the tokens at or above the threshold. */
static double mass(const Draw *draw) {
    if (draw->threshold > -INFINITY) {
        int64_t count;
        double sum = 0;
        const Candidate *candidates = collect(draw, draw->threshold, &count);
        for (int64_t i = 0; i < count; i++)
            sum += exp((double)candidates[i].logit - draw->max_logit);
        return sum;
    }
    const int64_t length = draw->length;
    float block[DRAW_BLOCK];
    double total = 0;
    for (int64_t at = 0; at < length; at += DRAW_BLOCK) {
        const int64_t size = length - at < DRAW_BLOCK ? length - at : DRAW_BLOCK;
        double sum, weighted;
        for (int64_t i = 0; i < size; i++)
            block[i] = draw->logits[at + i] / draw->warping->temperature;
        vector(draw->call)->exponential_sums(block, size, draw->max_logit, &sum, &weighted);
        total += sum;
    }
    return total;
}

/* Move what is above the pivot to the front and what is below it to the end; returns how many are above, and in `same`
 * how many equal it. */
static int64_t partition(Candidate *candidates, int64_t count, float pivot, int64_t *same) {
    int64_t above = 0, next = 0, end = count;
    while (next < end) {
        const Candidate candidate = candidates[next];
        if (candidate.logit > pivot) {
            candidates[next++] = candidates[above];
            candidates[above++] = candidate;
        } else if (candidate.logit < pivot) {
            candidates[next] = candidates[--end];
            candidates[end] = candidate;
        } else
            next++;
    }
    *same = end - above;
    return above;
}

/* The smallest logit of the fewest largest candidates whose masses reach `wanted`; -INFINITY: all do not. */
static float threshold_of_mass(Candidate *candidates, int64_t count, double wanted, double unit, float most) {
    double above_mass = 0; /* by candidates that are certainly kept */
    while (count) {
        const float pivot = candidates[count / 2].logit;
        int64_t same;
        const int64_t above = partition(candidates, count, pivot, &same);
        double sum = 0;
        for (int64_t i = 0; i < above; i++)
            sum += exp((double)candidates[i].logit - most) / unit;
        if (above_mass + sum >= wanted && above) {
            count = above;
            continue;
        }
        above_mass += sum + (double)same * exp((double)pivot - most) / unit;
        if (above_mass >= wanted)
            return pivot;
        candidates += above + same;
        count -= above + same;
    }
    return -INFINITY;
}

/* The smallest logit of the smallest set that holds `top_p` of the mass: a token stays if those before it hold less. */
static float nucleus_threshold(const Draw *draw) {
    const double total = mass(draw);
    for (float width = 4;; width *= 2) {
        int64_t count;
        const float lowest = width < 1e4f ? draw->max_logit - width : -INFINITY;
        const float threshold = lowest > draw->threshold ? lowest : draw->threshold;
        Candidate *candidates = collect(draw, threshold, &count);
        const float value = threshold_of_mass(candidates, count, draw->warping->top_p, total, draw->max_logit);
        if (value > -INFINITY || threshold == draw->threshold)
            return value > draw->threshold ? value : draw->threshold;
    }
}

/* Noise of at least `wanted` needs a uniform number (52 bits) below this: noise >= r <=> u <= 1 - exp(-exp(-r)). */
static uint64_t uniform_limit(double wanted) {
    if (wanted < -30)
        return UINT64_MAX;
    const double limit = -expm1(-exp(-wanted)) * 0x1p52 * (1 + 1e-9) + 2;
    return limit >= 0x1p53 ? UINT64_MAX : (uint64_t)limit;
}

/* argmax of logit + noise. Only a token whose noise makes up for its logit can win: blocks of tokens are searched for
 * numbers that are small enough, and only those become logarithms. */
static int32_t draw_token(const Draw *draw) {
    const int64_t length = draw->length;
    const float temperature = draw->warping->temperature;
    double best = (double)draw->max_logit + gumbel_noise(draw->key, draw->argmax);
    int32_t winner = draw->argmax, tokens[DRAW_BLOCK];
    for (int64_t block = 0; block < length; block += DRAW_BLOCK) {
        const int64_t size = length - block < DRAW_BLOCK ? length - block : DRAW_BLOCK;
        const float top = largest(draw, block, size);
        if (!(top >= draw->threshold) || top == -INFINITY)
            continue;
        const int count =
            vector(draw->call)->tokens_below(draw->key, block, (int)size, uniform_limit(best - top), tokens);
        for (int i = 0; i < count; i++) {
            const float logit = draw->logits[tokens[i]] / temperature;
            if (!(logit >= draw->threshold))
                continue;
            const double value = (double)logit + gumbel_noise(draw->key, tokens[i]);
            if (value > best || (value == best && tokens[i] < winner)) {
                best = value;
                winner = tokens[i];
            }
        }
    }
    return winner;
}

/* The warping of an entry whose temperature is positive. */
static Draw warped_draw(const ScoresCall *call, int32_t entry, const float *logits, int thread) {
    const Warping *warping = &call->warpings[entry];
    const int64_t length = logit_count(call, entry);
    const int32_t argmax = (int32_t)vector(call)->argmax(logits, length);
    Draw draw = {.call = call,
                 .entry = entry,
                 .logits = logits,
                 .length = length,
                 .warping = warping,
                 .key = call->keys ? call->keys[entry] : 0,
                 .argmax = argmax,
                 .max_logit = logits[argmax] / warping->temperature,
                 .threshold = -INFINITY,
                 .scratch = call->model->work.own[thread].scratch};
    if (warping->top_k > 0 && warping->top_k < length)
        draw.threshold = kth_largest(&draw, warping->top_k);
    if (warping->top_p < 1)
        draw.threshold = nucleus_threshold(&draw);
    if (warping->min_p > 0) { /* p >= min_p p_max <=> x >= x_max + ln(min_p) */
        const float lowest = draw.max_logit + (float)log((double)warping->min_p);
        draw.threshold = lowest > draw.threshold ? lowest : draw.threshold;
    }
    return draw;
}

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

/* Write warped logits to the thread's memory, with the noise of the draw where there is a key. */
static const float *warp_logits(const Draw *draw) {
    const int64_t length = draw->length;
    const float temperature = draw->warping->temperature;
    const int noisy = draw->call->keys != NULL;
    float *warped = draw->scratch;
    for (int64_t block = 0; block < length; block += DRAW_BLOCK) {
        const int size = length - block < DRAW_BLOCK ? (int)(length - block) : DRAW_BLOCK;
        const int any = largest(draw, block, size) >= draw->threshold;
        for (int64_t token = block; token < block + size; token++) {
            const float logit = draw->logits[token] / temperature;
            warped[token] = any && logit >= draw->threshold ? logit : -INFINITY;
        }
        if (!any || !noisy)
            continue;
        int32_t tokens[DRAW_BLOCK];
        for (int i = 0; i < size; i++)
            tokens[i] = token_of(draw->call, draw->entry, block + i);
        vector(draw->call)->add_noise(draw->key, tokens, size, temperature, warped + block);
    }
    return warped;
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
