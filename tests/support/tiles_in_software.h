/* The instructions of AMX that our C code uses, for a processor without them. Compiled in before all else (-include).

   A tile is 16 rows of 64 bytes, of which each thread has eight. Products are added in the order of their inputs; a
   processor adds in another, so last bits differ. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#undef NO_TILES
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define LOAD_TILE_SHAPE(shape) (void)(shape)

typedef float SoftwareRow __attribute__((vector_size(64), aligned(4)));
typedef int32_t SoftwareInts __attribute__((vector_size(64), aligned(4)));
typedef uint32_t SoftwareWords __attribute__((vector_size(64), aligned(4)));
typedef union {
  SoftwareRow floats[16];
  SoftwareInts ints[16];
  SoftwareWords words[16];
  uint8_t bytes[16][64];
} SoftwareTile;
static __thread SoftwareTile software_tiles[8];

static inline void load_software_tile(int tile, const void *from, int64_t stride) {
  for (int row = 0; row < 16; row++) memcpy(software_tiles[tile].bytes[row], (const char *)from + row * stride, 64);
}
static inline void store_software_tile(int tile, void *to, int64_t stride) {
  for (int row = 0; row < 16; row++) memcpy((char *)to + row * stride, software_tiles[tile].bytes[row], 64);
}

/* Word k of a row of the left tile is a pair of inputs; row k of the right one has the same pair of each output. */
static inline void add_pairs(int sum, int left, int right) {
  SoftwareTile *a = software_tiles + left, *b = software_tiles + right;
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++) {
      union { uint32_t bits; float number; } even = {a->words[row][k] << 16}, odd = {a->words[row][k] & 0xffff0000u};
      software_tiles[sum].floats[row] += even.number * (SoftwareRow)(b->words[k] << 16);
      software_tiles[sum].floats[row] += odd.number * (SoftwareRow)(b->words[k] & 0xffff0000u);
    }
}
/* The same with four bytes: those of the left tile have no sign, those of the right one have. */
static inline void add_fours(int sum, int left, int right) {
  SoftwareTile *a = software_tiles + left, *b = software_tiles + right;
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int i = 0; i < 4; i++)
        software_tiles[sum].ints[row] += a->bytes[row][4 * k + i] * ((b->ints[k] << (24 - 8 * i)) >> 24);
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_release
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_zero(tile) memset(software_tiles + (tile), 0, sizeof(SoftwareTile))
#define _tile_loadd(tile, from, stride) load_software_tile(tile, from, stride)
#define _tile_stored(tile, to, stride) store_software_tile(tile, to, stride)
#define _tile_release() (void)0
#define _tile_dpbf16ps(sum, left, right) add_pairs(sum, left, right)
#define _tile_dpbusd(sum, left, right) add_fours(sum, left, right)
