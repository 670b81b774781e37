/* Weight formats of GGUF files, and the layout that passes read them in.
 *
 * A file holds a matrix row by row, in blocks of 32 or 256 inputs. A pass wants 16 outputs beside one another: so every
 * matrix is packed once, at load, into tiles of 16 output rows (layout.h draws them). One layout serves all
 * instruction sets.
 */
#ifndef DRAFTREE_FORMATS_H
#define DRAFTREE_FORMATS_H

#include <stddef.h>
#include <stdint.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum {
    TILE_ROWS = 16,  /* outputs that are computed side by side */
    GROUP_SIZE = 32, /* inputs that share one scale of the activations */
};

/* Numbers as in GGUF files (ggml_type). */
typedef enum {
    FORMAT_F32 = 0,
    FORMAT_F16 = 1,
    FORMAT_Q4_0 = 2,
    FORMAT_Q4_1 = 3,
    FORMAT_Q5_0 = 6,
    FORMAT_Q5_1 = 7,
    FORMAT_Q8_0 = 8,
    FORMAT_Q2_K = 10,
    FORMAT_Q3_K = 11,
    FORMAT_Q4_K = 12,
    FORMAT_Q5_K = 13,
    FORMAT_Q6_K = 14,
    FORMAT_IQ4_NL = 20,
    FORMAT_IQ4_XS = 23,
    FORMAT_BF16 = 30,
} WeightFormat;

/* Bytes of one row of `columns` inputs in a file; 0 if the format is unknown or cannot have so many columns. */
size_t format_row_bytes(int format, int64_t columns);

/* A number of a float format as float32. */
float format_decode_number(int format, const uint8_t *source);

/* One row of a file as float32: what the weights are, computed in the order of ggml's own dequantization. */
void format_decode_row(int format, const uint8_t *source, int64_t columns, float *values);

/* A matrix as passes read it: ceil(rows / 16) tiles. Rows past the last are zero. */
typedef struct {
    int format;
    int64_t rows;    /* outputs */
    int64_t columns; /* inputs */
    size_t tile_bytes;
    const uint8_t *tiles;
} PackedMatrix;

/* Tiles of so many rows. */
ALWAYS_INLINE int64_t tiles_of(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

/* Bytes of a tile; a multiple of 64. */
size_t packed_tile_bytes(int format, int64_t columns);

/* Pack up to 16 rows of a file, `row_bytes` apart, into one tile; 1: all numbers, or scales of blocks, are finite. */
int pack_tile(int format, int64_t columns, const uint8_t *source, size_t row_bytes, int rows, uint8_t *tile);

/* A row of a packed matrix as float32: what format_decode_row gives for that of the file, to the bit. */
void packed_decode_row(const PackedMatrix *matrix, int64_t row, float *values);

/* Copy a row of a packed matrix into row `row` of a tile of the same format and columns. */
void packed_copy_row(const PackedMatrix *matrix, int64_t from, int row, uint8_t *tile);

/* float16 <-> float32, exact and round-to-nearest-even, without instructions for it. */
float fp16_to_fp32(uint16_t half);
uint16_t fp32_to_fp16(float value);

#endif
