/* Kernels of gated delta nets; vector_kernels.h includes this file. */

/* y = silu of the sum over taps, the oldest input first; taps: [TAPS][stride]. */
static void convolve(const float *const *inputs, const float *taps, int64_t stride, int64_t length, float *y) {
    for (int64_t i = 0; i < length; i += WIDTH) {
        Lanes sum = load(inputs[0] + i) * load(taps + i);
        for (int tap = 1; tap < TAPS; tap++)
            sum = fma_lanes(load(inputs[tap] + i), load(taps + tap * stride + i), sum);
        store(y + i, gated(sum, sum));
    }
}

static void unit(float *x, float length, int64_t count) {
    enum { SMALLEST_SQUARE = 1000000 }; /* one part of so many: what a vector of zeros is divided by */
    scale(x, length / sqrtf(sum_of_squares(x, count) + 1.0f / SMALLEST_SQUARE), count);
}

enum { CHAINS = 4 }; /* sums over keys: input i is in chain i % 4 */

/* The chains of each vector of 16 columns: 0 and 2, 1 and 3, then the two. */
ALWAYS_INLINE Lanes reduce_chains(Lanes (*chains)[CHAINS], int part) {
    return (chains[part][0] + chains[part][2]) + (chains[part][1] + chains[part][3]);
}

ALWAYS_INLINE void clear_chains(Lanes (*chains)[CHAINS]) {
    UNROLL for (int part = 0; part < PARTS; part++) {
        UNROLL for (int chain = 0; chain < CHAINS; chain++)
            chains[part][chain] = splat(0);
    }
}

/* With constant KEEPS and READS: whether the columns behind the token are kept, and whether it has an output. */
ALWAYS_INLINE void update_columns(const int KEEPS, const int READS, const float *from, float *to,
                                  const DeltaToken *token, int64_t column, float *output) {
    Lanes chains[PARTS][CHAINS], change[PARTS], decay = splat(token->decay);
    clear_chains(chains);
    for (int i = 0; i < token->size; i += CHAINS) {
        UNROLL for (int chain = 0; chain < CHAINS; chain++) {
            const Lanes key = splat(token->key[i + chain]);
            UNROLL for (int part = 0; part < PARTS; part++)
                chains[part][chain] = fma_lanes(key, load(from + (i + chain) * 16 + part * WIDTH), chains[part][chain]);
        }
    }
    UNROLL for (int part = 0; part < PARTS; part++) {
        const Lanes recalled = decay * reduce_chains(chains, part);
        change[part] = splat(token->rate) * (load(token->value + column + part * WIDTH) - recalled);
    }
    clear_chains(chains);
    for (int i = 0; i < token->size; i += CHAINS) {
        UNROLL for (int chain = 0; chain < CHAINS; chain++) {
            const Lanes key = splat(token->key[i + chain]), query = READS ? splat(token->query[i + chain]) : key;
            UNROLL for (int part = 0; part < PARTS; part++) {
                const int64_t at = (i + chain) * 16 + part * WIDTH;
                const Lanes next = fma_lanes(key, change[part], decay * load(from + at));
                if (KEEPS)
                    store(to + at, next);
                if (READS)
                    chains[part][chain] = fma_lanes(query, next, chains[part][chain]);
            }
        }
    }
    UNROLL for (int part = 0; READS && part < PARTS; part++)
        store(output + column + part * WIDTH, reduce_chains(chains, part));
}

static NOINLINE void delta(const float *from, float *to, const DeltaToken *token, int64_t column, float *output) {
    if (to && output)
        update_columns(1, 1, from, to, token, column, output);
    else if (to)
        update_columns(1, 0, from, to, token, column, output);
    else
        update_columns(0, 1, from, to, token, column, output);
}
