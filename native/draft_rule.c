/* Which candidates become nodes, and which nodes are verified: those that pay, or the most probable paths. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "growth.h"

/* Candidates that are less likely to be accepted are not drafted. */
static const double LEAST = 0.01;
/* Nodes of so much of the least value stay until the end: steps of the curve may have room for them. */
static const double SPARE = 0.5;

static int descending(const void *one, const void *other) {
    const Ranked *a = one, *b = other;
    if (a->key != b->key)
        return a->key > b->key ? -1 : 1;
    if (a->request != b->request)
        return a->request < b->request ? -1 : 1;
    return (a->at > b->at) - (a->at < b->at);
}

void rank(Ranked *ranked, int64_t count) {
    if (count > 1)
        qsort(ranked, (size_t)count, sizeof *ranked, descending);
}

int32_t most_drafted(const DraftRule *rule, int32_t nodes) {
    if (rule->below) /* more than is verified: what pays in one layer may be outdone in the next */
        return 2 * nodes + rule->width;
    const int32_t depth = rule->depth < nodes ? rule->depth : nodes;
    return nodes * depth - depth * (depth - 1) / 2;
}

static Child *add_child(Draft *draft, int32_t at, int32_t rank, double path, double value) {
    Child *child = (Child *)draft->children.data + draft->child_count++;
    *child = (Child){.at = at, .rank = rank, .path = path, .value = value};
    return child;
}

/* ---- nodes and layers that pay */

/* What one more node must be worth: its seconds at the rate. */
static double least_value(const Draft *draft, const DraftRule *rule) {
    if (draft->paying + 1 >= rule->sizes)
        return INFINITY;
    return rule->rate * (rule->below[draft->paying + 1] - rule->below[draft->paying]);
}

/* A node was drafted. */
static void add_value(Draft *draft, const DraftRule *rule, double value) {
    double *best = draft->best.data;
    int32_t at = draft->best_count++;
    for (; at && best[at - 1] < value; at--)
        best[at] = best[at - 1];
    best[at] = value;
    while (draft->paying < draft->best_count && best[draft->paying] > least_value(draft, rule))
        draft->paying++;
}

static void extend_paying(Draft *draft, const DraftStep *step) {
    const DraftNode *layer = draft->layer.data;
    Child *children = draft->children.data;
    const double least = least_value(draft, step->rule);
    double gains = 0, seconds = 0;
    for (int32_t part = 0; part < step->part_count; part++) {
        int32_t drafts = 0;
        for (int32_t i = 0; i < draft->child_count; i++)
            drafts |= growing_tree(draft, layer[children[i].at].request)->part == part;
        seconds += drafts ? step->parts[part].layer : 0;
    }
    for (int32_t i = 0; i < draft->child_count; i++) {
        const DraftPart *part = step->parts + growing_tree(draft, layer[children[i].at].request)->part;
        const double gain = part->onward * children[i].value - least;
        children[i].extends = gain > 0;
        gains += gain > 0 ? gain : 0;
    }
    if (gains <= step->rule->rate * seconds)
        for (int32_t i = 0; i < draft->child_count; i++)
            children[i].extends = 0;
}

/* If first candidates are right more often than they say, the others share what that leaves. */
static int choose_paying(Draft *draft, const DraftStep *step) {
    const DraftNode *layer = draft->layer.data;
    const Candidates *found = &draft->candidates.view;
    const double spare = SPARE * least_value(draft, step->rule), least = spare > LEAST ? spare : LEAST;
    int64_t candidates = draft->best_count;
    for (int32_t at = 0; at < draft->layer_count; at++)
        candidates += found->counts[at];
    if (reserve(&draft->best, candidates, sizeof(double)))
        return DRAFTREE_NO_MEMORY;
    for (int32_t at = 0; at < draft->layer_count; at++) {
        const GrowingTree *tree = growing_tree(draft, layer[at].request);
        const DraftedNode *parent = node_at(tree, layer[at].node);
        const double *logprobs = found->logprobs + (int64_t)at * found->width;
        if (!found->counts[at])
            continue;
        const double trust = step->parts[tree->part].trust, predicted = exp(logprobs[0]);
        const double first = fmin(1, trust * predicted),
                     rest = predicted < 1 ? fmin(trust, (1 - first) / (1 - predicted)) : 0;
        for (int32_t rank = 0; rank < found->counts[at]; rank++) {
            const double value = parent->value * (rank ? rest * exp(logprobs[rank]) : first);
            if (value > least) {
                add_child(draft, at, rank, parent->path + logprobs[rank], value);
                add_value(draft, step->rule, value);
            }
        }
    }
    if (draft->depth + 1 < step->rule->depth)
        extend_paying(draft, step);
    return DRAFTREE_OK;
}

/* The number of nodes that gains most, and the best nodes of all requests: they share the pass. */
static int verify_paying(Draft *draft, const DraftStep *step) {
    const DraftRule *rule = step->rule;
    int64_t total = 0;
    for (int32_t request = 0; request < step->request_count; request++)
        total += growing_tree(draft, request)->count;
    if (reserve(&draft->ranked, total, sizeof(Ranked)))
        return DRAFTREE_NO_MEMORY;
    Ranked *ranked = draft->ranked.data;
    int32_t *left = draft->left.data;
    total = 0;
    for (int32_t request = 0; request < step->request_count; request++) {
        const GrowingTree *tree = growing_tree(draft, request);
        left[request] = step->requests[request].nodes;
        for (int32_t node = 0; node < tree->count; node++)
            ranked[total++] = (Ranked){node_at(tree, node)->value, request, node};
    }
    rank(ranked, total);
    double expected = rule->tokens, highest = expected / rule->seconds[0];
    int32_t chosen = 0;
    for (int64_t i = 0; i < total; i++) {
        if (!left[ranked[i].request] || chosen + 1 >= rule->sizes)
            continue;
        left[ranked[i].request]--;
        expected += ranked[i].key;
        ranked[chosen++] = ranked[i];
        highest = fmax(highest, expected / rule->seconds[chosen]);
    }
    /* where the rate of the last steps is more than any size can reach, all lose against it, the smallest least */
    const double rate = rule->rate < highest ? rule->rate : highest;
    double most = rule->tokens - rate * rule->seconds[0];
    int32_t size = 0;
    expected = rule->tokens;
    for (int32_t i = 0; i < chosen; i++) {
        expected += ranked[i].key;
        const double gain = expected - rate * rule->seconds[i + 1];
        if (gain > most) {
            most = gain;
            size = i + 1;
        }
    }
    for (int32_t i = 0; i < size; i++)
        node_at(growing_tree(draft, ranked[i].request), ranked[i].at)->verified = 1;
    return DRAFTREE_OK;
}

/* ---- the most probable paths */

/* Only paths above it come in. */
static double least_path(const GrowingTree *tree, int32_t nodes) {
    return tree->best_count == nodes ? *(double *)tree->best.data : -INFINITY;
}

/* Take a path into the heap; returns what the expected number of accepted tokens gains. */
static double enter_path(GrowingTree *tree, int32_t nodes, double path) {
    double *best = tree->best.data;
    int32_t at = 0;
    double gain = exp(path);
    if (tree->best_count < nodes) {
        for (at = tree->best_count++; at && best[(at - 1) / 2] > path; at = (at - 1) / 2)
            best[at] = best[(at - 1) / 2];
    } else {
        gain -= exp(best[0]);
        for (int32_t child; (child = 2 * at + 1) < nodes; at = child) {
            child += child + 1 < nodes && best[child + 1] < best[child];
            if (best[child] >= path)
                break;
            best[at] = best[child];
        }
    }
    best[at] = path;
    return gain;
}

static int choose_probable(Draft *draft, const DraftStep *step) {
    const DraftNode *layer = draft->layer.data;
    const Candidates *found = &draft->candidates.view;
    for (int32_t at = 0; at < draft->layer_count; at++) {
        GrowingTree *tree = growing_tree(draft, layer[at].request);
        const int32_t nodes = step->requests[layer[at].request].nodes;
        if (reserve(&tree->best, nodes, sizeof(double)))
            return DRAFTREE_NO_MEMORY;
        const double above = node_at(tree, layer[at].node)->path, least = least_path(tree, nodes);
        const double *logprobs = found->logprobs + (int64_t)at * found->width;
        for (int32_t rank = 0; rank < found->counts[at] && above + logprobs[rank] > least; rank++)
            add_child(draft, at, rank, above + logprobs[rank], 0);
    }
    if (reserve(&draft->ranked, draft->child_count, sizeof(Ranked)))
        return DRAFTREE_NO_MEMORY;
    Ranked *ranked = draft->ranked.data;
    Child *children = draft->children.data;
    double *gains = draft->gains.data;
    memset(gains, 0, (size_t)step->request_count * sizeof *gains);
    for (int32_t i = 0; i < draft->child_count; i++)
        ranked[i] = (Ranked){children[i].path, 0, i};
    rank(ranked, draft->child_count); /* of equal paths the earlier one stays */
    for (int32_t i = 0; i < draft->child_count; i++) {
        Child *child = children + ranked[i].at;
        const int32_t request = layer[child->at].request, nodes = step->requests[request].nodes;
        if (child->path > least_path(growing_tree(draft, request), nodes)) {
            gains[request] += enter_path(growing_tree(draft, request), nodes, child->path);
            child->taken = 1;
        }
    }
    int32_t count = 0;
    for (int32_t i = 0; i < draft->child_count; i++) {
        const int32_t request = layer[children[i].at].request;
        /* children of the least probable node are no more probable */
        children[i].extends =
            draft->depth + 1 < step->rule->depth && gains[request] > step->rule->threshold &&
            children[i].path > least_path(growing_tree(draft, request), step->requests[request].nodes);
        if (children[i].taken)
            children[count++] = children[i];
    }
    draft->child_count = count;
    return DRAFTREE_OK;
}

static int verify_probable(Draft *draft, const DraftStep *step) {
    for (int32_t request = 0; request < step->request_count; request++) {
        const GrowingTree *tree = growing_tree(draft, request);
        if (reserve(&draft->ranked, tree->count, sizeof(Ranked)))
            return DRAFTREE_NO_MEMORY;
        Ranked *ranked = draft->ranked.data;
        for (int32_t node = 0; node < tree->count; node++)
            ranked[node] = (Ranked){node_at(tree, node)->path, request, node};
        if (tree->count > step->requests[request].nodes)
            rank(ranked, tree->count);
        for (int32_t i = 0; i < tree->count && i < step->requests[request].nodes; i++)
            node_at(tree, ranked[i].at)->verified = 1;
    }
    return DRAFTREE_OK;
}

/* ---- either */

int choose_children(Draft *draft, const DraftStep *step) {
    int64_t candidates = 0;
    for (int32_t at = 0; at < draft->layer_count; at++)
        candidates += draft->candidates.view.counts[at];
    draft->child_count = 0;
    if (candidates > INT32_MAX || reserve(&draft->children, candidates, sizeof(Child)))
        return DRAFTREE_NO_MEMORY;
    return step->rule->below ? choose_paying(draft, step) : choose_probable(draft, step);
}

int choose_verified(Draft *draft, const DraftStep *step) {
    return step->rule->below ? verify_paying(draft, step) : verify_probable(draft, step);
}
