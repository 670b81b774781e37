/* Rows as Python calls them, and as passes do: every number of Python's is checked here, once. */
#include <stdlib.h>
#include <string.h>

#include "model.h"

enum {
    PAGE_HEADER = 64,     /* bytes before a page's cells */
    MOST_SPARE = 16,      /* pages that are kept when nobody holds them */
    MOST_CELLS = 1 << 30, /* of a row, whose tree may hold more nodes than its context has positions */
};

/* Bytes of the keys of a head in a page; its values take as many. */
static size_t key_bytes(const Cache *cache) { return PAGE_CELLS * (size_t)cache->head_size * sizeof(uint16_t); }

/* Bytes of the keys and values of a page. */
static size_t page_keys(const Cache *cache) {
    return 2 * key_bytes(cache) * (size_t)cache->layers * (size_t)cache->heads;
}

/* Bytes of what a page holds of a row that keeps so many hidden states. */
static size_t content_bytes(const Cache *cache, int32_t tracked) {
    return page_keys(cache) + (size_t)tracked * (size_t)cache->state_size * sizeof(float) * PAGE_CELLS;
}

static int32_t pages_of(int32_t length) { return (length + PAGE_CELLS - 1) / PAGE_CELLS; }

int64_t token_bytes(const Cache *cache) { return (int64_t)((cache->page_bytes - PAGE_HEADER) / PAGE_CELLS); }

void start_cache(Cache *cache, int layers, int heads, int head_size, int state_size) {
    memset(cache, 0, sizeof *cache);
    cache->layers = layers;
    cache->heads = heads;
    cache->head_size = head_size;
    cache->state_size = state_size;
    track_states(cache, 0);
}

/* What lies before the cells of a page. */
typedef struct {
    size_t bytes;       /* of the page, this included */
    int32_t references; /* rows */
} PageHeader;

static PageHeader *header_of(uint8_t *page) { return (PageHeader *)(void *)(page - PAGE_HEADER); }

static uint8_t *new_page(Cache *cache) {
    uint8_t *page;
    if (cache->spare_count) {
        page = cache->spare[--cache->spare_count];
    } else {
        uint8_t *memory = allocate(cache->page_bytes);
        if (!memory)
            return NULL;
        page = memory + PAGE_HEADER;
        header_of(page)->bytes = cache->page_bytes;
    }
    header_of(page)->references = 1;
    cache->bytes += (int64_t)header_of(page)->bytes;
    return page;
}

static void free_page(uint8_t *page) { release(page - PAGE_HEADER, header_of(page)->bytes); }

static void release_page(Cache *cache, uint8_t *page) {
    const size_t bytes = header_of(page)->bytes;
    if (--header_of(page)->references)
        return;
    cache->bytes -= (int64_t)bytes;
    if (cache->spare && cache->spare_count < MOST_SPARE && bytes == cache->page_bytes)
        cache->spare[cache->spare_count++] = page;
    else
        free_page(page);
}

void track_states(Cache *cache, int32_t tracked) {
    cache->tracked = tracked;
    cache->page_bytes = PAGE_HEADER + content_bytes(cache, tracked);
    while (cache->spare_count)
        free_page(cache->spare[--cache->spare_count]);
}

float *cell_states(const Cache *cache, const Row *row, int32_t cell) {
    float *states = (float *)(void *)(row->pages[cell / PAGE_CELLS] + page_keys(cache));
    return states + (size_t)(cell % PAGE_CELLS) * (size_t)row->tracked * (size_t)cache->state_size;
}

Row *find_row(const Cache *cache, int32_t row) {
    return row >= 0 && row < cache->row_count && cache->rows[row].open ? &cache->rows[row] : NULL;
}

int draftree_open(Model *model, int32_t *row) {
    Cache *cache = &model->cache;
    int32_t number = 0;
    if (!cache->spare && !(cache->spare = calloc(MOST_SPARE, sizeof *cache->spare)))
        return DRAFTREE_NO_MEMORY;
    while (number < cache->row_count && cache->rows[number].open)
        number++;
    if (number == cache->row_count) {
        Row *rows = realloc(cache->rows, (size_t)(number + 1) * sizeof *rows);
        if (!rows)
            return DRAFTREE_NO_MEMORY;
        cache->rows = rows;
        cache->row_count++;
        memset(&rows[number], 0, sizeof *rows);
    }
    cache->rows[number].open = 1;
    cache->rows[number].tracked = cache->tracked;
    *row = number;
    return DRAFTREE_OK;
}

/* Bytes of the packed rows of so many learned tokens. */
static size_t learned_bytes(const Cache *cache, int32_t count) {
    return (size_t)tiles_of(count) * cache->learned_tile_bytes;
}

int reserve_learned(const Cache *cache, Row *row, int32_t count) {
    if (count <= row->learned_capacity)
        return DRAFTREE_OK;
    const int32_t capacity = count + count / 2 + 4 * TILE_ROWS;
    uint8_t *tiles = allocate(learned_bytes(cache, capacity));
    if (!tiles)
        return DRAFTREE_NO_MEMORY;
    Learned *learned = realloc(row->learned, (size_t)capacity * sizeof *learned);
    if (!learned) {
        release(tiles, learned_bytes(cache, capacity));
        return DRAFTREE_NO_MEMORY;
    }
    if (row->learned_count)
        memcpy(tiles, row->learned_tiles, learned_bytes(cache, row->learned_count));
    release(row->learned_tiles, learned_bytes(cache, row->learned_capacity));
    row->learned = learned;
    row->learned_tiles = tiles;
    row->learned_capacity = capacity;
    return DRAFTREE_OK;
}

/* The first learned tokens of another row: those of its first `length` tokens. */
static int copy_learned(const Cache *cache, const Row *source, int32_t length, Row *copy) {
    int32_t count = 0;
    while (count < source->learned_count && source->learned[count].length <= length)
        count++;
    if (!count)
        return DRAFTREE_OK;
    int error = reserve_learned(cache, copy, count);
    if (error)
        return error;
    memcpy(copy->learned, source->learned, (size_t)count * sizeof *copy->learned);
    memcpy(copy->learned_tiles, source->learned_tiles, learned_bytes(cache, count));
    copy->learned_count = count;
    return DRAFTREE_OK;
}

static void drop_pages(Cache *cache, Row *row, int32_t from) {
    while (row->page_count > from)
        release_page(cache, row->pages[--row->page_count]);
}

void drop_nodes(Cache *cache, Row *row, int32_t count) {
    row->count = count;
    drop_pages(cache, row, pages_of(row->length + count) + 1); /* the next nodes need one more */
    drop_node_states(&cache->states, &row->states, count);
}

static void close_row(Cache *cache, Row *row) {
    drop_pages(cache, row, 0);
    close_states(&cache->states, &row->states);
    release(row->learned_tiles, learned_bytes(cache, row->learned_capacity));
    free(row->learned);
    free(row->pages);
    free(row->nodes);
    memset(row, 0, sizeof *row);
}

int32_t draftree_length(const Model *model, int32_t row) {
    const Row *found = find_row(&model->cache, row);
    return found ? found->length : DRAFTREE_BAD_ROW;
}

int draftree_close(Model *model, int32_t row) {
    Row *found = find_row(&model->cache, row);
    if (!found)
        return DRAFTREE_BAD_ROW;
    close_row(&model->cache, found);
    return DRAFTREE_OK;
}

void free_cache(Cache *cache) {
    for (int32_t number = 0; number < cache->row_count; number++)
        if (cache->rows[number].open)
            close_row(cache, &cache->rows[number]);
    while (cache->spare_count)
        free_page(cache->spare[--cache->spare_count]);
    free(cache->spare);
    free(cache->rows);
    memset(cache, 0, sizeof *cache);
}

static int reserve_page_list(Row *row, int32_t count) {
    if (count <= row->page_capacity)
        return DRAFTREE_OK;
    int32_t capacity = count + count / 2 + 4;
    uint8_t **pages = realloc(row->pages, (size_t)capacity * sizeof *pages);
    if (!pages)
        return DRAFTREE_NO_MEMORY;
    row->pages = pages;
    row->page_capacity = capacity;
    return DRAFTREE_OK;
}

int draftree_fork(Model *model, int32_t row, int32_t length, int32_t *fork) {
    Cache *cache = &model->cache;
    const Row *source = find_row(cache, row);
    if (!source)
        return DRAFTREE_BAD_ROW;
    if (length < 0 || length > source->length)
        return DRAFTREE_BAD_ARGUMENT;
    int32_t number, pages = pages_of(length);
    int error = draftree_open(model, &number);
    if (error)
        return error;
    Row *copy = &cache->rows[number];
    source = &cache->rows[row]; /* the list of rows may have moved */
    if (reserve_page_list(copy, pages) || copy_learned(cache, source, length, copy) ||
        fork_states(&cache->states, &source->states, length, &copy->states)) {
        close_row(cache, copy);
        return DRAFTREE_NO_MEMORY;
    }
    for (int32_t page = 0; page < pages; page++) {
        copy->pages[page] = source->pages[page];
        header_of(copy->pages[page])->references++;
    }
    copy->page_count = pages;
    copy->length = length;
    copy->tracked = source->tracked;
    *fork = number;
    return DRAFTREE_OK;
}

int reserve_nodes(Cache *cache, Row *row, int32_t count) {
    const int64_t cells = (int64_t)row->length + row->count + count;
    if (cells > MOST_CELLS)
        return DRAFTREE_CONTEXT_FULL;
    if (row->count + count > row->node_capacity) {
        int32_t capacity = row->count + count + 64;
        Node *nodes = realloc(row->nodes, (size_t)capacity * sizeof *nodes);
        if (!nodes)
            return DRAFTREE_NO_MEMORY;
        row->nodes = nodes;
        row->node_capacity = capacity;
    }
    const int32_t pages = (int32_t)((cells + PAGE_CELLS - 1) / PAGE_CELLS);
    if (reserve_page_list(row, pages))
        return DRAFTREE_NO_MEMORY;
    for (int32_t page = (row->length + row->count) / PAGE_CELLS; page < row->page_count; page++) {
        uint8_t *shared = row->pages[page];
        if (header_of(shared)->references == 1)
            continue;
        uint8_t *own = new_page(cache);
        if (!own)
            return DRAFTREE_NO_MEMORY;
        memcpy(own, shared, header_of(shared)->bytes - PAGE_HEADER); /* no later page is smaller */
        release_page(cache, shared);
        row->pages[page] = own;
    }
    while (row->page_count < pages) {
        uint8_t *page = new_page(cache);
        if (!page)
            return DRAFTREE_NO_MEMORY;
        row->pages[row->page_count++] = page;
    }
    return DRAFTREE_OK;
}

void append_node(Row *row, int32_t parent) {
    const int32_t number = row->count++;
    Node *node = &row->nodes[number];
    const Node *above = parent < 0 ? NULL : &row->nodes[parent];
    node->parent = parent;
    node->depth = above ? above->depth + 1 : 0;
    node->run = above ? above->run : 0;
    if (number == parent + 1 && node->run == number)
        node->run = number + 1;
}

int32_t path_cells(const Row *row, int32_t node, int32_t *cells) {
    const int32_t count = row->nodes[node].depth + 1 - row->nodes[node].run;
    for (int32_t i = count - 1; i >= 0; i--) {
        cells[i] = row->length + node;
        node = row->nodes[node].parent;
    }
    return count;
}

KvHeadCache kv_head_cache(const Cache *cache, const Row *row, int layer, int head) {
    const size_t keys = ((size_t)layer * (size_t)cache->heads + (size_t)head) * 2 * key_bytes(cache);
    return (KvHeadCache){
        .pages = row->pages,
        .keys = keys,
        .values = keys + key_bytes(cache),
        .page_count = row->page_count,
        .head_size = cache->head_size,
    };
}

/* Where a cell's numbers begin among the keys of a head (blocks of cells side by side), and among its values. */
static size_t key_place(int32_t cell, size_t size) {
    return (size_t)(cell % PAGE_CELLS / BLOCK_CELLS) * size * BLOCK_CELLS + (size_t)(cell % BLOCK_CELLS);
}

static size_t value_place(int32_t cell, size_t size) { return (size_t)(cell % PAGE_CELLS) * size; }

/* Copy the keys and values of a cell, all layers and heads, and its states to an earlier cell of the row. */
static void move_cell(const Cache *cache, const Row *row, int32_t from, int32_t to) {
    const size_t heads = (size_t)cache->layers * (size_t)cache->heads, size = (size_t)cache->head_size;
    memcpy(cell_states(cache, row, to), cell_states(cache, row, from),
           (size_t)row->tracked * (size_t)cache->state_size * sizeof(float));
    for (size_t head = 0; head < heads; head++) {
        const size_t place = head * 2 * PAGE_CELLS * size;
        const uint16_t *old = (const uint16_t *)(const void *)row->pages[from / PAGE_CELLS] + place;
        uint16_t *new = (uint16_t *)(void *)row->pages[to / PAGE_CELLS] + place;
        for (size_t i = 0; i < size; i++)
            new[key_place(to, size) + i * BLOCK_CELLS] = old[key_place(from, size) + i * BLOCK_CELLS];
        memcpy(new + PAGE_CELLS * size + value_place(to, size), old + PAGE_CELLS * size + value_place(from, size),
               size * sizeof *new);
    }
}

/* Nodes ascend, and a parent comes before its child: so moving them down in order overwrites none that still moves. */
static void move_nodes(const Cache *cache, const Row *row, const int32_t *keep, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        if (keep[i] != i)
            move_cell(cache, row, row->length + keep[i], row->length + i);
}

static int is_path(const Row *row, const int32_t *path, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        if (path[i] < 0 || path[i] >= row->count || row->nodes[path[i]].parent != (i ? path[i - 1] : -1))
            return 0;
    return 1;
}

static void cut_row(Cache *cache, Row *row, int32_t length) {
    row->length = length;
    while (row->learned_count && row->learned[row->learned_count - 1].length > length)
        row->learned_count--;
    drop_nodes(cache, row, 0);
}

int draftree_cut(Model *model, int32_t row, int32_t length) {
    Row *found = find_row(&model->cache, row);
    if (!found)
        return DRAFTREE_BAD_ROW;
    if (length < 0 || length > found->length)
        return DRAFTREE_BAD_ARGUMENT;
    cut_states(&model->cache.states, &found->states, length);
    cut_row(&model->cache, found, length);
    return DRAFTREE_OK;
}

int draftree_commit(Model *model, int32_t row, const int32_t *path, int32_t count) {
    Row *found = find_row(&model->cache, row);
    if (!found)
        return DRAFTREE_BAD_ROW;
    if (count < 0 || !is_path(found, path, count))
        return DRAFTREE_BAD_TREE;
    move_nodes(&model->cache, found, path, count);
    keep_states(&model->cache.states, &found->states, found->length, path, count, count);
    cut_row(&model->cache, found, found->length + count);
    return DRAFTREE_OK;
}

/* The number that a kept node has from now on; -1: the trunk's end; -2: it is not kept. */
static int32_t number_among(const int32_t *keep, int32_t count, int32_t trunk, int32_t node) {
    if (node < 0)
        return trunk ? -2 : -1;
    for (int32_t i = trunk ? trunk - 1 : 0; i < count; i++)
        if (keep[i] == node)
            return i - trunk;
    return -2;
}

int draftree_prune(Model *model, int32_t number, const int32_t *keep, int32_t count, int32_t trunk) {
    Row *row = find_row(&model->cache, number);
    if (!row)
        return DRAFTREE_BAD_ROW;
    if (count < 0 || trunk < 0 || trunk > count || !is_path(row, keep, trunk))
        return DRAFTREE_BAD_TREE;
    for (int32_t i = 0; i < count; i++)
        if (keep[i] < 0 || keep[i] >= row->count || (i && keep[i] <= keep[i - 1]))
            return DRAFTREE_BAD_TREE;
    for (int32_t i = trunk; i < count; i++)
        if (number_among(keep, count, trunk, row->nodes[keep[i]].parent) == -2)
            return DRAFTREE_BAD_TREE;
    move_nodes(&model->cache, row, keep, count);
    keep_states(&model->cache.states, &row->states, row->length, keep, count, trunk);
    row->length += trunk;
    row->count = 0;
    /* A new parent's number is below its child's old one: nodes not yet read are not overwritten. */
    for (int32_t i = trunk; i < count; i++)
        append_node(row, number_among(keep, count, trunk, row->nodes[keep[i]].parent));
    return DRAFTREE_OK;
}
