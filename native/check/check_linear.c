/* Print a digest of what linear layers compute from the same pseudo-random matrices and activations: a line for each
 * format and instruction set of this CPU, the portable one first; then of what the kernels of recurrent layers do.
 * Equal kernels have equal digests. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../cpu.h"
#include "../states.h"
#include "../vector.h"

enum { MOST_FORMAT = FORMAT_BF16 };

static uint64_t random_state;

static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_number(void) { return (float)(int32_t)random_bits() * 0x1p-31f; }

static void *allocate(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory)
        exit(2);
    return memory;
}

static uint64_t digested(uint64_t digest, const void *data, size_t bytes) { /* FNV-1a */
    for (size_t i = 0; i < bytes; i++)
        digest = (digest ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    return digest;
}

/* Rows of a file: random numbers, or random bytes that lack a bit of `mask`, so that no float16 is infinite. */
static void fill_rows(int format, uint8_t mask, uint8_t *source, size_t bytes) {
    const size_t size = format == FORMAT_F32 ? 4 : format_is_quantized(format) ? 1 : 2;
    for (size_t i = 0; i < bytes; i += size) {
        const float number = random_number();
        const uint16_t half = fp32_to_fp16(number);
        source[i] = (uint8_t)random_bits() & mask;
        if (format == FORMAT_F16)
            memcpy(source + i, &half, 2);
        else if (size > 1) /* the upper half of a float32 is a bfloat16 */
            memcpy(source + i, (const char *)&number + 4 - size, size);
    }
}

static PackedMatrix random_matrix(int format, uint8_t mask, int64_t rows, int64_t columns) {
    const size_t row_bytes = format_row_bytes(format, columns), tile_bytes = packed_tile_bytes(format, columns);
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    uint8_t *source = allocate(row_bytes * (size_t)rows), *packed = allocate(tile_bytes * (size_t)tiles);
    fill_rows(format, mask, source, row_bytes * (size_t)rows);
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t rest = rows - TILE_ROWS * t;
        pack_tile(format, columns, source + (size_t)(TILE_ROWS * t) * row_bytes, row_bytes,
                  rest < TILE_ROWS ? (int)rest : TILE_ROWS, packed + tile_bytes * (size_t)t);
    }
    free(source);
    return (PackedMatrix){format, rows, columns, tile_bytes, packed};
}

/* Activations of ordinary size, some groups zero, tiny or large. */
static float *random_values(int count, int64_t columns) {
    float *values = allocate(sizeof *values * (size_t)count * (size_t)columns);
    for (int64_t i = 0; i < count * columns; i++) {
        const uint32_t kind = (uint32_t)(i / GROUP_SIZE * 2654435761u) >> 28;
        values[i] = random_number() * (kind == 0 ? 0.0f : kind == 1 ? 1e-33f : kind == 2 ? 1e6f : 3.0f);
    }
    return values;
}

/* Activations and outputs in two ranges, as two threads compute them. */
static uint64_t compute(const LinearKernels *kernels, const PackedMatrix *matrix, int count, uint64_t digest) {
    const int64_t inputs = matrix->columns, groups = inputs / GROUP_SIZE;
    const int64_t tiles = (matrix->rows + TILE_ROWS - 1) / TILE_ROWS, y_stride = TILE_ROWS * tiles;
    const size_t group_bytes = activation_bytes(count, inputs), y_bytes = sizeof(float) * (size_t)(count * y_stride);
    float *values = random_values(count, inputs), *y = allocate(y_bytes);
    uint8_t *quantized = allocate(group_bytes);
    const Activations x = {count, values, inputs, quantized};
    kernels->quantize(values, inputs, inputs, count, groups / 3, groups, quantized);
    kernels->quantize(values, inputs, inputs, count, 0, groups / 3, quantized);
    kernels->multiply(matrix, tiles / 2, tiles, &x, y, y_stride);
    kernels->multiply(matrix, 0, tiles / 2, &x, y, y_stride);
    digest = digested(digested(digest, quantized, group_bytes), y, y_bytes);
    free(quantized);
    free(y);
    free(values);
    return digest;
}

static uint64_t compute_all(const LinearKernels *kernels, int format) {
    static const int64_t COLUMNS[] = {32, 544, 768};
    uint64_t digest = 14695981039346656037u;
    random_state = 1;
    for (int c = 0; c < 3; c++)
        for (int64_t rows = 1; format_row_bytes(format, COLUMNS[c]) && rows <= 37; rows += 36) {
            PackedMatrix matrix = random_matrix(format, rows == 1 ? 0xbf : 0xfb, rows, COLUMNS[c]);
            for (int count = 1; count <= 17; count++) /* to one more than are multiplied at a time */
                digest = compute(kernels, &matrix, count, digest);
            digest = compute(kernels, &matrix, 37, digest);
            free((void *)matrix.tiles);
        }
    return digest;
}

/* Two tokens of a delta net behind a random state of 16 columns: one that is kept with its output, and a leaf. */
static uint64_t compute_delta(const VectorKernels *kernels, int size) {
    const int64_t numbers = 16 * size;
    random_state = 1;
    float *inputs = random_values(TAPS, 2 * size), *taps = random_values(TAPS, 2 * size);
    float *keys = allocate(sizeof *keys * 2 * (size_t)size), *state = random_values(1, numbers);
    float *next = allocate(sizeof *next * (size_t)numbers), outputs[32];
    const float *const columns[TAPS] = {inputs, inputs + 2 * size, inputs + 4 * size, inputs + 6 * size};
    kernels->convolve(columns, taps, 2 * size, 2 * size, keys);
    kernels->unit(keys, 1, size);
    kernels->unit(keys + size, 0.25f, size);
    kernels->logistic_gate(taps, inputs, size);
    const DeltaToken token = {keys, keys + size, inputs, 0.9f, 0.3f, size};
    kernels->delta(state, next, &token, 0, outputs);
    kernels->delta(next, state, &token, 0, NULL);
    kernels->delta(state, NULL, &token, 0, outputs + 16);
    uint64_t digest = digested(14695981039346656037u, keys, sizeof *keys * 2 * (size_t)size);
    digest = digested(digested(digest, state, sizeof *state * (size_t)numbers), outputs, sizeof outputs);
    float *const all[] = {inputs, taps, keys, state, next};
    for (int i = 0; i < 5; i++)
        free(all[i]);
    return digest;
}

int main(void) {
    for (int format = 0; format <= MOST_FORMAT; format++)
        for (int t = 0; format_row_bytes(format, 768) && tier_at(t); t++)
            printf("%d %s %016llx\n", format, tier_at(t)->name,
                   (unsigned long long)compute_all(tier_at(t)->linear, format));
    for (int size = 16; size <= 256; size += 240)
        for (int t = 0; tier_at(t); t++)
            printf("delta-%d %s %016llx\n", size, tier_at(t)->name,
                   (unsigned long long)compute_delta(tier_at(t)->vector, size));
    return 0;
}
