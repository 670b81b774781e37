/* What the files of a pass share (part.h). */
#include "part.h"

Activations columns(const Part *part, const float *values, int64_t stride, int count, int quantized) {
    if (quantized)
        part->linear->quantize(values, stride, stride, count, 0, stride / GROUP_SIZE, part->groups);
    return (Activations){count, values, stride, part->groups};
}

void multiply_share(const Part *part, const Activations *x, const Product *products, int count) {
    int64_t tiles = 0, before = 0;
    for (int i = 0; i < count; i++)
        tiles += tiles_of(products[i].matrix->rows);
    const Share own = share(tiles, part->thread, part->threads);
    for (int i = 0; i < count; i++) {
        const PackedMatrix *matrix = products[i].matrix;
        const int64_t size = tiles_of(matrix->rows);
        const int64_t first = own.first > before ? own.first - before : 0;
        const int64_t last = own.last - before < size ? own.last - before : size;
        if (first < last)
            part->linear->multiply(matrix, first, last, x, products[i].y, size * TILE_ROWS);
        before += size;
    }
}

void activate(const Part *part, const Gated *gated, const Activations *x, Share groups) {
    const Architecture *a = part->a;
    const Workspace *work = part->work;
    const int64_t wide = a->feed_forward, begin = gated->column * wide;
    const int64_t first = groups.first * GROUP_SIZE, last = groups.last * GROUP_SIZE;
    part->linear->multiply(gated->gate, first / TILE_ROWS, last / TILE_ROWS, x, work->gate + begin, wide);
    part->linear->multiply(gated->up, first / TILE_ROWS, last / TILE_ROWS, x, work->up + begin, wide);
    for (int i = 0; i < x->count; i++) {
        const int64_t at = begin + i * wide + first;
        if (a->activation == ACTIVATION_SILU)
            part->vector->silu_gate(work->gate + at, work->up + at, last - first, work->activated + at);
        else
            part->vector->gelu_gate(work->gate + at, work->up + at, last - first, work->activated + at);
    }
    if (gated->groups)
        part->linear->quantize(work->activated + begin, wide, wide, x->count, groups.first, groups.last, gated->groups);
}

void embed_node(const Part *part, int i, float *embedding) {
    packed_decode_row(&part->model->embeddings, part->work->nodes[i].token, embedding);
    if (part->a->embedding_scale != 1.0f)
        part->vector->scale(embedding, part->a->embedding_scale, part->a->hidden);
}
