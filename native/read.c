#include "read.h"

#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "formats.h"
#include "platform.h"

enum {
    /* What a thread takes at a time: several large pages of packed weights, since two threads that first write to the
     * same one both clear it. */
    PIECE_BYTES = 16 << 20,
    /* What it reads at a time: it stays in the second cache until it is packed. */
    READ_BYTES = 1 << 18,
};

typedef enum { FINE, UNREADABLE, NOT_FINITE } Outcome;

/* Tensors are cut into pieces, numbered through all of them; each thread takes the next. */
typedef struct {
    const Stored *stored;
    const Tensor *tensors;
    int count;
    int (*progress)(double);
    size_t buffer_bytes;
    uint8_t *buffers;  /* [threads][buffer_bytes]; NULL: of what lies in memory */
    int64_t all_bytes; /* of the tensors */
    atomic_llong done_bytes;
    atomic_llong next_piece;
    atomic_int stopped; /* by `progress` */
    atomic_int failed;  /* outcome of the tensor that failed first */
    int failed_tensor;
} Reading;

int fail(char message[256], const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, 256, format, arguments);
    va_end(arguments);
    return DRAFTREE_BAD_FILE;
}

void name_tensor(const Tensor *tensor, char name[TENSOR_NAME]) {
    if (tensor->layer < 0)
        snprintf(name, TENSOR_NAME, "%s", tensor->name);
    else
        snprintf(name, TENSOR_NAME, "%s of layer %d", tensor->name, tensor->layer);
}

/* The file of an offset, which becomes one from its beginning; -1: there is none. */
static int32_t find_file(const Stored *stored, int64_t *offset) {
    for (int32_t i = 0; *offset >= 0 && i < stored->file_count; *offset -= stored->sizes[i++])
        if (*offset < stored->sizes[i])
            return i;
    return -1;
}

int64_t stored_bytes(const Stored *stored, int64_t offset) {
    const int32_t file = find_file(stored, &offset);
    return file < 0 ? 0 : stored->sizes[file] - offset;
}

static size_t row_bytes(const Tensor *tensor) {
    return format_row_bytes(tensor->place->format, tensor->place->columns);
}

/* Rows of a tensor that are read together: whole tiles, about `bytes` of them. */
static int64_t rows_of(const Tensor *tensor, size_t bytes) {
    const int64_t tiles = (int64_t)(bytes / (row_bytes(tensor) * TILE_ROWS));
    return (tiles ? tiles : 1) * TILE_ROWS;
}

static int64_t pieces_of(const Tensor *tensor) {
    const int64_t rows = rows_of(tensor, PIECE_BYTES);
    return (tensor->place->rows + rows - 1) / rows;
}

/* Bytes of what is stored: in memory where they are, of files in a buffer; NULL: they cannot be read. */
static const uint8_t *read_bytes(const Stored *stored, int64_t offset, size_t bytes, uint8_t *buffer) {
    if (!stored->files)
        return stored->memory + offset;
    const int32_t file = find_file(stored, &offset);
    return file < 0 || read_file(stored->files[file], buffer, bytes, offset) ? NULL : buffer;
}

static int all_finite(const float *numbers, int32_t count) {
    int finite = 1;
    for (int32_t i = 0; i < count; i++)
        finite &= isfinite(numbers[i]) != 0;
    return finite;
}

/* A vector, or the rows of few columns of a matrix that is kept as columns. */
static int decode_vector(const TensorPlace *place, const uint8_t *source, int64_t first, int64_t end, float *vector) {
    if (place->rows == 1) {
        format_decode_row(place->format, source, place->columns, vector);
        return all_finite(vector, place->columns);
    }
    int finite = 1;
    float numbers[MOST_COLUMNS];
    for (int64_t row = first; row < end; row++) {
        format_decode_row(place->format,
                          source + (size_t)(row - first) * format_row_bytes(place->format, place->columns),
                          place->columns, numbers);
        finite &= all_finite(numbers, place->columns);
        for (int32_t i = 0; i < place->columns; i++)
            vector[(int64_t)i * place->rows + row] = numbers[i];
    }
    return finite;
}

/* Some rows of a tensor; 1: all are numbers. */
static int convert(const Tensor *tensor, const uint8_t *source, int64_t first, int64_t end) {
    const TensorPlace *place = tensor->place;
    if (tensor->vector)
        return decode_vector(place, source, first, end, tensor->vector);
    const size_t bytes = row_bytes(tensor), tile_bytes = packed_tile_bytes(place->format, place->columns);
    int finite = 1;
    for (int64_t row = first; row < end; row += TILE_ROWS)
        finite &= pack_tile(place->format, place->columns, source + (size_t)(row - first) * bytes, bytes,
                            end - row < TILE_ROWS ? (int)(end - row) : TILE_ROWS,
                            tensor->tiles + (size_t)(row / TILE_ROWS) * tile_bytes);
    return finite;
}

static Outcome read_piece(Reading *reading, const Tensor *tensor, int64_t piece, uint8_t *buffer) {
    const size_t bytes = row_bytes(tensor);
    const int64_t rows = rows_of(tensor, PIECE_BYTES), step = rows_of(tensor, READ_BYTES), left = tensor->place->rows;
    const int64_t begin = piece * rows, end = begin + rows < left ? begin + rows : left;
    for (int64_t row = begin; row < end; row += step) {
        const int64_t last = row + step < end ? row + step : end;
        const int64_t offset = tensor->place->offset + row * (int64_t)bytes;
        const uint8_t *source = read_bytes(reading->stored, offset, (size_t)(last - row) * bytes, buffer);
        if (!source)
            return UNREADABLE;
        if (!convert(tensor, source, row, last))
            return NOT_FINITE;
    }
    atomic_fetch_add(&reading->done_bytes, (end - begin) * (int64_t)bytes);
    return FINE;
}

static void read_pieces(void *argument, int thread, int threads) {
    (void)threads; /* each takes the next pieces */
    Reading *reading = argument;
    uint8_t *buffer = reading->buffers ? reading->buffers + (size_t)thread * reading->buffer_bytes : NULL;
    int64_t before = 0; /* pieces of the tensors before */
    for (int tensor = 0; !atomic_load(&reading->failed) && !atomic_load(&reading->stopped);) {
        const int64_t piece = atomic_fetch_add(&reading->next_piece, 1);
        while (tensor < reading->count && piece - before >= pieces_of(&reading->tensors[tensor]))
            before += pieces_of(&reading->tensors[tensor++]);
        if (tensor == reading->count)
            return;
        const Outcome outcome = read_piece(reading, &reading->tensors[tensor], piece - before, buffer);
        int none = FINE;
        if (outcome != FINE && atomic_compare_exchange_strong(&reading->failed, &none, (int)outcome))
            reading->failed_tensor = tensor;
        if (thread == 0 && reading->progress &&
            !reading->progress((double)atomic_load(&reading->done_bytes) / (double)reading->all_bytes))
            atomic_store(&reading->stopped, 1);
    }
}

/* Add up the tensors' bytes, and what the largest piece of them takes that is read at a time. */
static void size_reading(Reading *reading) {
    for (int i = 0; i < reading->count; i++) {
        const Tensor *tensor = &reading->tensors[i];
        const int64_t rows = tensor->place->rows, together = rows_of(tensor, READ_BYTES);
        const size_t bytes = (size_t)(together < rows ? together : rows) * row_bytes(tensor);
        reading->all_bytes += rows * (int64_t)row_bytes(tensor);
        if (bytes > reading->buffer_bytes)
            reading->buffer_bytes = bytes;
    }
    reading->buffer_bytes = (reading->buffer_bytes + 63) / 64 * 64;
}

static int end_reading(const Reading *reading, char message[256]) {
    if (reading->failed) {
        char name[TENSOR_NAME];
        name_tensor(&reading->tensors[reading->failed_tensor], name);
        const char *wrong = reading->failed == NOT_FINITE ? "has weights that are NaN or infinite" : "cannot be read";
        return fail(message, "the %s %s", name, wrong);
    }
    return reading->stopped ? fail(message, "loading was stopped") : DRAFTREE_OK;
}

int read_tensors(const Stored *stored, const Tensor *tensors, int count, Pool *pool, int (*progress)(double),
                 char message[256]) {
    Reading reading = {.stored = stored, .tensors = tensors, .count = count, .progress = progress};
    size_reading(&reading);
    const size_t bytes = (size_t)pool_threads(pool) * reading.buffer_bytes;
    if (stored->files && !(reading.buffers = allocate(bytes)))
        return DRAFTREE_NO_MEMORY;
    pool_run(pool, read_pieces, &reading);
    release(reading.buffers, bytes);
    return end_reading(&reading, message);
}
