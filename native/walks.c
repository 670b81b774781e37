/* The walks of a chunk: in which order recurrent layers visit its nodes.
 *
 * A walk begins at a state of a row, replays the records of committed tokens, and then goes through the tree depth
 * first: only nodes of this chunk, and those that lead to them. A state that is needed again is kept on a level of its
 * own. The largest subtree below a node comes last and takes the level of its parent, so that a chain needs one level,
 * and a tree of n nodes no more than log2(n) + 2.
 */
#include <string.h>

#include "delta.h"

enum { HEAVY = 1 << 30 }; /* the size of a node that is read in place: it comes last */

/* A row's nodes in this chunk. */
typedef struct {
    const Row *row;
    int32_t first, first_node;     /* the first of them among those of the chunk, and among those of the row */
    int32_t base_root, ahead_root; /* first children of the row's state, and of the one ahead */
    int32_t *sizes;                /* [row's nodes] of the subtrees that are visited; 0: it is not */
    int32_t *child, *last, *next;  /* the first and the last child, and the next sibling; -1: none */
    int32_t *stack, *levels;       /* nodes that wait, and where their parents' states are */
} Tree;

static int32_t record_of(const RowStates *states, int32_t node) {
    return node < states->unrecorded ? -1 : states->first_record + node - states->unrecorded;
}

/* Add up the subtrees of the nodes that are visited. */
static void size_subtrees(const Tree *tree) {
    const Row *row = tree->row;
    memset(tree->sizes, 0, (size_t)row->count * sizeof *tree->sizes);
    for (int32_t node = row->count - 1; node >= row->states.ahead_nodes; node--) {
        const int32_t parent = row->nodes[node].parent;
        if (node < tree->first_node && !tree->sizes[node])
            continue;
        tree->sizes[node] = node < row->states.unrecorded ? HEAVY : tree->sizes[node] + 1;
        if (parent >= row->states.ahead_nodes && tree->sizes[parent] < HEAVY - row->count)
            tree->sizes[parent] += tree->sizes[node];
    }
}

static void add_child(const Tree *tree, int32_t *first, int32_t *last, int32_t node) {
    tree->next[node] = -1;
    if (*first < 0) {
        *first = *last = node;
    } else if (tree->sizes[node] > tree->sizes[*last]) {
        tree->next[*last] = node;
        *last = node;
    } else {
        tree->next[node] = *first;
        *first = node;
    }
}

/* List the children of each node that is visited, the largest subtree last. */
static void list_children(Tree *tree) {
    const Row *row = tree->row;
    int32_t base_last = -1, ahead_last = -1;
    tree->base_root = tree->ahead_root = -1;
    for (int32_t node = row->states.ahead_nodes; node < row->count; node++) {
        const int32_t parent = row->nodes[node].parent;
        tree->child[node] = tree->last[node] = -1;
        if (!tree->sizes[node])
            continue;
        if (parent < 0)
            add_child(tree, &tree->base_root, &base_last, node);
        else if (parent < row->states.ahead_nodes)
            add_child(tree, &tree->ahead_root, &ahead_last, node);
        else
            add_child(tree, &tree->child[parent], &tree->last[parent], node);
    }
}

/* Where the inputs of the token are that comes `back` tokens before the first node of a walk (RECORDED_INPUT in
 * model.h). */
static int32_t input_before(int32_t replayed, int32_t back) {
    return back <= replayed ? RECORDED_INPUT - (replayed - back) : -(back - replayed);
}

static void find_inputs(const Tree *tree, int32_t node, int32_t replayed, int32_t *inputs) {
    const RowStates *states = &tree->row->states;
    for (int32_t tap = TAPS - 1, back = 1; tap >= 0; tap--) {
        if (node < states->ahead_nodes)
            inputs[tap] = input_before(replayed, back++);
        else if (node >= tree->first_node)
            inputs[tap] = tree->first + node - tree->first_node;
        else
            inputs[tap] = RECORDED_INPUT - record_of(states, node);
        if (node >= states->ahead_nodes)
            node = tree->row->nodes[node].parent;
    }
}

/* The node at the end of what is read in place. */
static int ends_in_place(const Tree *tree, int32_t node) {
    const int32_t unrecorded = tree->row->states.unrecorded, count = tree->row->count;
    return node == (unrecorded < count ? unrecorded : count) - 1;
}

static Move *add_move(Walks *walks, Walk *walk) {
    walk->count++;
    return &walks->moves[walks->move_count++];
}

static void replay_records(Walks *walks, Walk *walk) {
    const RowStates *states = &walk->row->states;
    for (int32_t record = 0; record < states->replayed; record++) {
        Move *move = add_move(walks, walk);
        *move = (Move){.node = -1, .record = record};
        for (int32_t tap = 0; tap < TAPS; tap++)
            move->inputs[tap] = input_before(record, TAPS - 1 - tap);
    }
    if (states->replayed)
        walks->moves[walks->move_count - 1].kept = states->fresh ? states->fresh : states->state;
}

static int32_t push_children(const Tree *tree, int32_t first, int32_t level, int32_t waiting) {
    const int32_t from = waiting;
    for (int32_t node = first; node >= 0; node = tree->next[node], waiting++)
        tree->stack[waiting] = node;
    for (int32_t low = from, high = waiting - 1; low < high; low++, high--) {
        const int32_t node = tree->stack[low];
        tree->stack[low] = tree->stack[high];
        tree->stack[high] = node;
    }
    for (int32_t i = from; i < waiting; i++)
        tree->levels[i] = level;
    return waiting;
}

static void visit_nodes(const Tree *tree, int32_t root, Walks *walks, Walk *walk) {
    const RowStates *states = &tree->row->states;
    const int32_t replayed = walk->count; /* so far */
    for (int32_t waiting = push_children(tree, root, 0, 0); waiting;) {
        const int32_t node = tree->stack[--waiting], from = tree->levels[waiting];
        Move *move = add_move(walks, walk);
        *move = (Move){.node = node < tree->first_node ? -1 : tree->first + node - tree->first_node,
                       .record = record_of(states, node),
                       .from = from,
                       .to = from + (tree->next[node] >= 0)};
        find_inputs(tree, node, replayed, move->inputs);
        if (node < states->unrecorded && ends_in_place(tree, node))
            move->kept = states->ahead;
        else if (tree->child[node] < 0)
            move->to = -1;
        walks->levels = move->to >= walks->levels ? move->to + 1 : walks->levels;
        waiting = push_children(tree, tree->child[node], move->to, waiting);
    }
}

static void add_walk(const Tree *tree, int32_t root, State *from, int replays, Walks *walks) {
    if (root < 0)
        return;
    Walk *walk = &walks->walks[walks->count++];
    *walk = (Walk){.row = tree->row, .from = from, .first = walks->move_count};
    if (replays)
        replay_records(walks, walk);
    visit_nodes(tree, root, walks, walk);
    walks->most_moves = walk->count > walks->most_moves ? walk->count : walks->most_moves;
}

/* The nodes of one row, from the chunk's node `first` on. */
static void plan_row(Model *model, int32_t first, int32_t *scratch) {
    const PassNode *node = &model->work.nodes[first];
    const int32_t count = node->row->count;
    Tree tree = {.row = node->row, .first = first, .first_node = node->cell - node->row->length};
    int32_t **const lists[] = {&tree.sizes, &tree.child, &tree.last, &tree.next, &tree.stack, &tree.levels};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++, scratch += count)
        *lists[i] = scratch;
    size_subtrees(&tree);
    list_children(&tree);
    add_walk(&tree, tree.base_root, node->row->states.state, 1, &model->work.walks);
    add_walk(&tree, tree.ahead_root, node->row->states.ahead, 0, &model->work.walks);
}

static int is_first_of_row(const Workspace *work, int32_t i) {
    return !i || work->nodes[i].row != work->nodes[i - 1].row;
}

/* Room for the plans of all rows, and for what each thread computes on a walk. */
static int reserve_plans(Model *model) {
    Workspace *work = &model->work;
    int64_t moves = 0, most = 0;
    for (int32_t i = 0; i < work->count; i++) {
        const Row *row = work->nodes[i].row;
        if (!is_first_of_row(work, i))
            continue;
        moves += row->count + row->states.replayed;
        most = row->count > most ? row->count : most;
    }
    Walks *walks = &work->walks;
    Move *list = enlarged(walks->moves, &walks->move_capacity, moves, sizeof *list);
    walks->moves = list ? list : walks->moves;
    int32_t *lists = enlarged(walks->lists, &walks->list_capacity, 6 * most, sizeof *lists);
    walks->lists = lists ? lists : walks->lists;
    return list && lists ? DRAFTREE_OK : DRAFTREE_NO_MEMORY;
}

static int reserve_scratch(Model *model) {
    Walks *walks = &model->work.walks;
    const Architecture *a = &model->architecture;
    const int64_t of_move = 2 * (int64_t)a->delta_key_size + a->delta_value_size + 2;
    const int64_t of_level = (int64_t)a->delta_key_size * 16;
    walks->scratch_stride = (walks->most_moves * of_move + walks->levels * of_level + 31) / 16 * 16;
    float *scratch = enlarged(walks->scratch, &walks->scratch_capacity,
                              walks->scratch_stride * pool_threads(model->pool), sizeof *scratch);
    if (!scratch)
        return DRAFTREE_NO_MEMORY;
    walks->scratch = scratch;
    return DRAFTREE_OK;
}

int prepare_walks(Model *model) {
    Workspace *work = &model->work;
    if (!model->cache.states.layers)
        return DRAFTREE_OK;
    int error = reserve_plans(model);
    if (error)
        return error;
    work->walks.count = work->walks.move_count = work->walks.most_moves = 0;
    work->walks.levels = 1;
    for (int32_t i = 0; i < work->count; i++)
        if (is_first_of_row(work, i))
            plan_row(model, i, work->walks.lists);
    return reserve_scratch(model);
}
