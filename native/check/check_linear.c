/* Compare every instruction set of this CPU with the portable kernels, bit for bit, on random matrices; with --time
 * print multiply-adds a cycle of one core instead; weights lie in the cache. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../cpu.h"

static const struct {
    int format;
    const char *name;
    int inputs;    /* of a block of a file */
    int halves[2]; /* where its float16 numbers lie; -1: none */
} FORMATS[] = {
    {FORMAT_Q4_0, "Q4_0", 32, {0, -1}},     {FORMAT_Q4_1, "Q4_1", 32, {0, 2}},
    {FORMAT_Q5_0, "Q5_0", 32, {0, -1}},     {FORMAT_Q5_1, "Q5_1", 32, {0, 2}},
    {FORMAT_Q8_0, "Q8_0", 32, {0, -1}},     {FORMAT_Q2_K, "Q2_K", 256, {80, 82}},
    {FORMAT_Q3_K, "Q3_K", 256, {108, -1}},  {FORMAT_Q4_K, "Q4_K", 256, {0, 2}},
    {FORMAT_Q5_K, "Q5_K", 256, {0, 2}},     {FORMAT_Q6_K, "Q6_K", 256, {208, -1}},
    {FORMAT_IQ4_NL, "IQ4_NL", 32, {0, -1}}, {FORMAT_IQ4_XS, "IQ4_XS", 256, {0, -1}},
    {FORMAT_F32, "F32", 1, {-1, -1}},       {FORMAT_F16, "F16", 1, {0, -1}},
    {FORMAT_BF16, "BF16", 1, {-1, -1}},
};
enum { FORMAT_COUNT = sizeof FORMATS / sizeof *FORMATS };

static uint64_t random_state = 1;

static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_number(void) { return (float)(int32_t)random_bits() * 0x1p-31f; }

static void *allocate(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) {
        fprintf(stderr, "no memory\n");
        exit(2);
    }
    return memory;
}

/* Rows of a file: random codes, scales between -1 and 1. */
static uint8_t *random_rows(int f, int64_t rows, int64_t columns) {
    const size_t row_bytes = format_row_bytes(FORMATS[f].format, columns), bytes = row_bytes * (size_t)rows;
    const size_t blocks = (size_t)(rows * columns / FORMATS[f].inputs), block_bytes = bytes / blocks;
    uint8_t *source = allocate(bytes);
    for (size_t i = 0; i < bytes; i++)
        source[i] = (uint8_t)random_bits();
    for (size_t b = 0; b < blocks; b++) {
        float number = random_number();
        if (FORMATS[f].format == FORMAT_F32)
            memcpy(source + 4 * b, &number, 4);
        if (FORMATS[f].format == FORMAT_BF16)
            memcpy(source + 2 * b, (char *)&number + 2, 2);
        for (int i = 0; i < 2; i++)
            if (FORMATS[f].halves[i] >= 0) {
                uint16_t half = half_from_float(random_number());
                memcpy(source + block_bytes * b + FORMATS[f].halves[i], &half, 2);
            }
    }
    return source;
}

static PackedMatrix random_matrix(int f, int64_t rows, int64_t columns) {
    const int format = FORMATS[f].format;
    const size_t row_bytes = format_row_bytes(format, columns), tile_bytes = packed_tile_bytes(format, columns);
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    uint8_t *source = random_rows(f, rows, columns), *packed = allocate(tile_bytes * (size_t)tiles);
    for (int64_t t = 0; t < tiles; t++) {
        int64_t rest = rows - TILE_ROWS * t;
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
        uint32_t kind = (uint32_t)(i / GROUP_SIZE * 2654435761u) >> 28;
        values[i] = random_number() * (kind == 0 ? 0.0f : kind == 1 ? 1e-33f : kind == 2 ? 1e6f : 3.0f);
    }
    return values;
}

typedef struct {
    size_t group_bytes;
    uint8_t *groups;
    size_t y_count;
    float *y;
} Result;

static Result compute(const LinearKernels *kernels, const PackedMatrix *matrix, const float *values, int count) {
    const int64_t inputs = matrix->columns, tiles = (matrix->rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t y_stride = TILE_ROWS * tiles, groups = inputs / GROUP_SIZE;
    Result result = {.y_count = (size_t)(count * y_stride)};
    result.y = allocate(sizeof(float) * result.y_count);
    Activations x = {count, values, inputs, NULL};
    if (format_is_quantized(matrix->format)) { /* in two ranges, as two threads do */
        result.group_bytes = activation_bytes(count, inputs);
        result.groups = allocate(result.group_bytes);
        kernels->quantize(values, inputs, inputs, count, groups / 3, groups, result.groups);
        kernels->quantize(values, inputs, inputs, count, 0, groups / 3, result.groups);
        x.groups = result.groups;
    }
    kernels->multiply(matrix, tiles / 2, tiles, &x, result.y, y_stride);
    kernels->multiply(matrix, 0, tiles / 2, &x, result.y, y_stride);
    return result;
}

static void free_result(Result result) {
    free(result.groups);
    free(result.y);
}

/* Whether two results have the same bits; prints the first difference. */
static int same(const Result *expected, const Result *got, const char *what) {
    for (size_t i = 0; i < expected->group_bytes; i++)
        if (expected->groups[i] != got->groups[i]) {
            printf("%s: byte %zu of the activations is %d instead of %d\n", what, i, got->groups[i],
                   expected->groups[i]);
            return 0;
        }
    for (size_t i = 0; i < expected->y_count; i++)
        if (memcmp(expected->y + i, got->y + i, 4) != 0) {
            printf("%s: output %zu is %.9g instead of %.9g\n", what, i, (double)got->y[i], (double)expected->y[i]);
            return 0;
        }
    return 1;
}

/* Failures among all tiers for one matrix and one number of columns. */
static int check_columns(int f, const PackedMatrix *matrix, int count) {
    int failures = 0;
    float *values = random_values(count, matrix->columns);
    Result expected = compute(tier_at(0)->linear, matrix, values, count);
    for (int t = 1; tier_at(t); t++) {
        char what[128];
        snprintf(what, sizeof what, "%s %s [%lld, %lld] x %d", tier_at(t)->name, FORMATS[f].name,
                 (long long)matrix->rows, (long long)matrix->columns, count);
        Result got = compute(tier_at(t)->linear, matrix, values, count);
        failures += !same(&expected, &got, what);
        free_result(got);
    }
    free_result(expected);
    free(values);
    return failures;
}

static int check_format(int f) {
    static const int64_t ROWS[] = {1, 37}, COLUMNS[] = {32, 544, 768};
    int failures = 0;
    for (size_t r = 0; r < sizeof ROWS / sizeof *ROWS; r++)
        for (size_t c = 0; c < sizeof COLUMNS / sizeof *COLUMNS; c++) {
            if (COLUMNS[c] % FORMATS[f].inputs)
                continue;
            PackedMatrix matrix = random_matrix(f, ROWS[r], COLUMNS[c]);
            for (int count = 1; count <= 17; count++) /* to one more than are multiplied at a time */
                failures += check_columns(f, &matrix, count);
            failures += check_columns(f, &matrix, 37);
            free((void *)matrix.tiles);
        }
    return failures;
}

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Cycles a second: a chain of additions takes one cycle each. */
static double clock_rate(void) {
    double best = 1;
    for (int repeat = 0; repeat < 1000; repeat++) {
        uint64_t sum = 0;
        double start = seconds();
        for (int i = 0; i < 10000; i++)
            for (int j = 0; j < 10; j++) {
                sum += 1;
                __asm__ volatile("" : "+r"(sum)); /* so that additions stay one by one */
            }
        double took = seconds() - start;
        best = took < best ? took : best;
    }
    return 1e5 / best;
}

static void time_format(int f, const LinearKernels *kernels, double rate) {
    static const int COUNTS[] = {1, 2, 4, 6, 8, 12, 16, 32};
    enum { ROWS = 256, INPUTS = 1536 };
    PackedMatrix matrix = random_matrix(f, ROWS, INPUTS);
    float *values = random_values(32, INPUTS), *y = allocate(sizeof(float) * 32 * ROWS);
    uint8_t *groups = allocate(activation_bytes(32, INPUTS));
    printf("%-12s %-7s", kernels->name, FORMATS[f].name);
    for (size_t i = 0; i < sizeof COUNTS / sizeof *COUNTS; i++) {
        Activations x = {COUNTS[i], values, INPUTS, groups};
        double best = 1;
        kernels->quantize(values, INPUTS, INPUTS, COUNTS[i], 0, INPUTS / GROUP_SIZE, groups);
        for (double end = seconds() + 0.1, start; (start = seconds()) < end;) {
            kernels->multiply(&matrix, 0, ROWS / TILE_ROWS, &x, y, ROWS);
            double took = seconds() - start;
            best = took < best ? took : best;
        }
        printf(" %6.1f", (double)COUNTS[i] * ROWS * INPUTS / (best * rate));
    }
    printf("\n");
    free((void *)matrix.tiles);
    free(values);
    free(y);
    free(groups);
}

static void time_packing(int f) {
    enum { ROWS = 16, INPUTS = 1536, REPEATS = 200 };
    const size_t row_bytes = format_row_bytes(FORMATS[f].format, INPUTS);
    uint8_t *source = random_rows(f, ROWS, INPUTS), *tile = allocate(packed_tile_bytes(FORMATS[f].format, INPUTS));
    double best = 1;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        double start = seconds();
        pack_tile(FORMATS[f].format, INPUTS, source, row_bytes, ROWS, tile);
        double took = seconds() - start;
        best = took < best ? took : best;
    }
    printf("packing      %-7s %6.0f MB of file a second; %.3f bytes packed a byte of file\n", FORMATS[f].name,
           1e-6 * ROWS * (double)row_bytes / best,
           (double)packed_tile_bytes(FORMATS[f].format, INPUTS) / (ROWS * (double)row_bytes));
    free(source);
    free(tile);
}

/* check_linear [--time] [--tier NAME] [--format NAME] */
int main(int count, char **arguments) {
    const char *tier_name = NULL, *format_name = NULL;
    int timing = 0, failures = 0;
    for (int i = 1; i < count; i++)
        if (strcmp(arguments[i], "--time") == 0)
            timing = 1;
        else if (strcmp(arguments[i], "--tier") == 0 && i + 1 < count)
            tier_name = arguments[++i];
        else if (strcmp(arguments[i], "--format") == 0 && i + 1 < count)
            format_name = arguments[++i];
        else
            return fprintf(stderr, "usage: check_linear [--time] [--tier NAME] [--format NAME]\n"), 2;
    const double rate = timing ? clock_rate() : 0;
    if (timing)
        printf("%.2f GHz; multiply-adds a cycle for 1, 2, 4, 6, 8, 12, 16, 32 columns\n", 1e-9 * rate);
    for (int f = 0; f < FORMAT_COUNT; f++) {
        if (format_name && strcmp(format_name, FORMATS[f].name) != 0)
            continue;
        if (!timing)
            failures += check_format(f);
        else
            time_packing(f);
        for (int t = timing ? 0 : 99; tier_at(t); t++)
            if (!tier_name || strcmp(tier_name, tier_at(t)->name) == 0)
                time_format(f, tier_at(t)->linear, rate);
    }
    for (int t = 0; tier_at(t) && !timing; t++)
        printf("%s ", tier_at(t)->name);
    if (!timing)
        printf(failures ? "%d failures\n" : "equal\n", failures);
    return failures != 0;
}
