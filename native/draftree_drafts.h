/* The C interface (draftree.h) of drafting: n-grams of texts, vocabularies side by side, draft trees. */
#ifndef DRAFTREE_DRAFTS_H
#define DRAFTREE_DRAFTS_H

#include "draftree.h"

#pragma GCC visibility push(default)

/* Where each n-gram of `shortest` tokens stands in a request's texts, of which the last one grows. One thread at a time
 * may use an index. */
enum { NGRAM_LONGEST = 16, NGRAM_MATCHES = 16 };
typedef struct NgramIndex NgramIndex;

/* Where the last tokens of a path stood, the last place first: positions of what follows them there, and how many they
 * are, at most NGRAM_LONGEST. They are valid as long as their index. */
typedef struct {
    int32_t count;
    int32_t positions[NGRAM_MATCHES];
    int32_t lengths[NGRAM_MATCHES];
} NgramMatches;

int draftree_ngram_open(int32_t shortest, NgramIndex **index);
void draftree_ngram_close(NgramIndex *index);

/* Append tokens to the text: all of them, or on an error none. */
int draftree_ngram_extend(NgramIndex *index, const int32_t *tokens, int32_t count);

/* What comes now is another text: no n-gram reaches across. */
int draftree_ngram_end(NgramIndex *index);

/* Matches of the text's own end, which follow it from now on; of another path's last tokens; of a path that goes on
 * with a token, among those of the path before it. */
void draftree_ngram_latest(NgramIndex *index, NgramMatches *matches);
void draftree_ngram_matches(const NgramIndex *index, const int32_t *tail, int32_t count, NgramMatches *matches);
void draftree_ngram_followed(const NgramIndex *index, const NgramMatches *matches, int32_t token,
                             NgramMatches *followed);

/* Probabilities of the next tokens in descending order, at most NGRAM_MATCHES: returns how many. */
int32_t draftree_ngram_probabilities(const NgramIndex *index, const NgramMatches *matches, int32_t *tokens,
                                     double *probabilities);

/* ---- what tokens and texts of one vocabulary are in another: a table that the caller fills. It numbers texts, the
 * empty one is 0. */

typedef struct Translation Translation;

/* What is looked up. FIRST_OF_TOKEN: the target's token that begins what a token of the model's spells; FIRST_OF_TEXT:
 * that which begins a text; READING: the model's tokens of a text with a token of the target's behind it. What a kind
 * does not need is 0. */
enum { FIRST_OF_TOKEN, FIRST_OF_TEXT, READING };
typedef struct {
    int32_t kind, text, token;
} TranslationKey;

int draftree_translation_open(Translation **translation);
void draftree_translation_close(Translation *translation);
void draftree_translation_clear(Translation *translation);

/* Put an entry, unless the key has one. found: the token that begins it, -1: there is none; behind: the text behind
 * that token. Of a READING, ids: [count] the model's tokens; found: the text that was read; behind: the end of it that
 * these leave unread. */
int draftree_translation_put(Translation *translation, const TranslationKey *key, int32_t found, int32_t behind,
                             const int32_t *ids, int32_t count);

/* ---- drafting: the trees of all requests of a step, a pass a layer for all of them
 *
 * A node's number is its index among the nodes that were drafted for its request, layer by layer; -1 is the root, the
 * last token of the request's text. In a finished tree it has another. */

/* What scores nodes: the texts themselves, a model of the target's token ids, a head, a model of other token ids, the
 * caller. */
enum { BY_TEXT, BY_MODEL, BY_DRAFT_HEAD, BY_TRANSLATION, BY_CALLER };

typedef struct {
    int32_t kind;
    int32_t enabled;
    Model *model;             /* BY_MODEL, BY_DRAFT_HEAD, BY_TRANSLATION; else NULL */
    Translation *translation; /* BY_TRANSLATION */
    int32_t outputs;          /* tokens of the target's vocabulary: what a model scores beyond them is left out */
    double trust;             /* how often its candidates are right over how often they should be */
    double onward;            /* how often a first candidate is right below a token that was */
    double layer;             /* seconds of one layer */
} DraftPart;

typedef struct {
    int32_t nodes;       /* of its tree, at most */
    int32_t depth;       /* of its deepest node, at most */
    int32_t constrained; /* tokens below its nodes are ruled out by FindStates */
    int32_t target_row;  /* of a head: where the target's hidden states are; else not looked at */
    int32_t position;    /* tokens of the text: what follows a node of depth d is drawn at position + d */
    uint64_t noise;      /* mixed(seed + GOLDEN) (noise.h) */
    Warping warping;
} DraftRequest;

/* What a part has of a request. */
typedef struct {
    int32_t limit;     /* of the depth to which it drafts; 0: not at all */
    NgramIndex *index; /* BY_TEXT: has read the text */
    int32_t row;       /* BY_MODEL, BY_DRAFT_HEAD, BY_TRANSLATION */
    int32_t unread_count;
    const int32_t *unread; /* the end of the text: what the row has not committed or more, the last token at least;
                            * BY_TRANSLATION: the model's own tokens of what it has not read, maybe none */
    int32_t read;          /* BY_TRANSLATION: how many of these are committed: all, or none */
    int32_t left;          /* BY_TRANSLATION: the text behind them */
} DraftSource;

typedef struct {
    int32_t request, node, parent, token;
} DraftNode;

/* The rule: a node stays while its path's probability exceeds what it costs.
 * nodes and layers that pay (AutoTree): below, seconds: [sizes] of verifying 0, 1, .. nodes in all, and the largest
 * convex curve nowhere above; rate: tokens a second that a step must yield; tokens: those of a step without nodes.
 * Where below is NULL, each request's most probable `nodes` paths, and layers that gain more than `threshold` tokens
 * (OptTree). */
typedef struct {
    int32_t width; /* candidates of a node, at most */
    int32_t depth; /* of any tree, at most */
    int32_t sizes;
    const double *below, *seconds;
    double rate, tokens, threshold;
} DraftRule;

/* Called by draftree_draft; not 0: stop, and return that. Score nodes by a part of kind BY_CALLER: counts, entropies:
 * [count]; tokens, logprobs: [count][width]. */
typedef int (*ScoreNodes)(int32_t part, int32_t count, const DraftNode *nodes, int32_t width, int32_t *counts,
                          int32_t *tokens, double *logprobs, double *entropies);
/* What a constraint allows below nodes of requests that have one, each after its parent: [count] masks as in Edits,
 * NULL: any token; and tokens that must come next, -1: none is known. Masks stay valid until draftree_draft returns. */
typedef int (*FindStates)(int32_t count, const DraftNode *nodes, const uint32_t **masks, int32_t *forced);

/* Put the entries of these keys into a part's translation. */
typedef int (*FindTranslations)(int32_t part, int32_t count, const TranslationKey *keys);

typedef struct {
    int32_t part_count, request_count;
    int32_t coupled; /* a model's candidates are those of the target's noise, else of the warped distribution alone */
    const DraftRule *rule;
    const DraftPart *parts;             /* [part_count], in the order in which they are tried */
    const DraftRequest *requests;       /* [request_count] */
    const DraftSource *sources;         /* [request_count][part_count] */
    ScoreNodes score;                   /* may be NULL without a part BY_CALLER */
    FindStates find_states;             /* may be NULL where nothing is constrained */
    FindTranslations find_translations; /* may be NULL without a part BY_TRANSLATION */
} DraftStep;

/* A finished tree. */
typedef struct {
    int32_t count, part;
    const int32_t *columns; /* [8][count] tokens, parents, depths; float: path log-probabilities, entropies; int32_t:
                             * the numbers that nodes had while they grew; BY_TRANSLATION: how many of the model's
                             * tokens are read up to the node, -1: it was not scored, and the text behind them */
} DraftTree;

/* What a part took of a step. */
typedef struct {
    int64_t nanoseconds; /* of scoring */
    int32_t passes;      /* of its model */
} DraftWork;

/* What became of a tree: the accepted path, as numbers of the finished tree, and the tokens of the target, of which the
 * k-th follows the path's first k nodes. */
typedef struct {
    int32_t path_count, token_count;
    const int32_t *path, *tokens;
} DraftOutcome;

/* A node's first candidate against the target's token. */
typedef struct {
    int32_t part, right;
    double logprob;
} DraftTrial;

typedef struct Draft Draft; /* the memory that proposals grow in, one after the other */

int draftree_draft_open(Draft **draft);
void draftree_draft_close(Draft *draft);

/* Grow a tree for each request. trees: [request_count], valid until the next call with this Draft; work: [part_count];
 * layers: for which candidates were sought. Of a call that fails nothing is kept, but rows may hold nodes until the
 * next one, and heads have read texts. */
int draftree_draft(Draft *draft, const DraftStep *step, DraftTree *trees, DraftWork *work, int32_t *layers);

/* Commit what the rows of models have read of accepted paths, and find the trials of what draftree_draft has proposed
 * for the same step, what was not verified included. outcomes: [request_count]; trials: as many as the outcomes have
 * tokens. A second call, or one after a draft that failed, is an error. One that fails has committed some paths or
 * none. */
int draftree_accept(Draft *draft, const DraftStep *step, const DraftOutcome *outcomes, DraftTrial *trials,
                    int32_t *trial_count);

#pragma GCC visibility pop

#endif
