/* Warped distributions, and draws of tokens from them by keyed noise. */
#include <math.h>
#include <stdlib.h>

#include "noise.h"
#include "scores.h"

/* Tokens that are looked at together. */
enum { DRAW_BLOCK = 256 };

int compare_candidates(const void *left, const void *right) {
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
 * hold none, as their largest one shows. */
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

/* sum of exp(x - max) over the tokens at or above the threshold. */
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
    if (!(wanted >= -30)) /* also where it is no number */
        return UINT64_MAX;
    const double limit = -expm1(-exp(-wanted)) * 0x1p52 * (1 + 1e-9) + 2;
    return limit >= 0x1p53 ? UINT64_MAX : (uint64_t)limit;
}

/* Only a token whose noise makes up for its logit can win: blocks of tokens are searched for
 * numbers that are small enough, and only those become logarithms. */
int32_t draw_token(const Draw *draw) {
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

Draw warped_draw(const ScoresCall *call, int32_t entry, const float *logits, int thread) {
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

const float *warp_logits(const Draw *draw) {
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
