/* A vector of floats. In products and norms of the token step, lane i belongs to row i of a block; elsewhere
   its lanes are neighbours in one row, or in attention by tiles the queries of a row.

       activations   [features][LANES] floats; in bf16 their values are rounded to bf16
       packed        what products read: in fp32 the same, in bf16 [features / 2][LANES] pairs of bf16 (not the packed
                     weights of packed.py, which are in oneDNN's layout)

   IN_BF16 chooses the type of weights and activations. Rounding is to nearest, ties to even, as PyTorch rounds.
   WIDEST takes the widest vectors in bf16 too, which is quicker where a function has no products. */

#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if defined(IN_BF16) && defined(__AMX_BF16__) && defined(__AMX_TILE__) && !defined(NO_TILES)
#define USES_TILES 1 /* AMX */
#else
#define USES_TILES 0
#endif
#if USES_TILES || ((defined(WIDEST) || !defined(IN_BF16)) && defined(__AVX512F__))
#define LANES 16
#else
#define LANES 8
#endif
#define BYTES (4 * LANES)
#define CACHE_LINE 64
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(BYTES), aligned(BYTES)));
typedef float unaligned __attribute__((vector_size(BYTES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(BYTES), aligned(BYTES), may_alias));
typedef int32_t integers __attribute__((vector_size(BYTES), aligned(BYTES)));

#ifdef IN_BF16
typedef uint16_t value;
#else
typedef float value;
#endif

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE lanes load(const float *from) { return (lanes) * (const unaligned *)from; }
INLINE void store(float *to, lanes x) { *(unaligned *)to = (unaligned)x; }

INLINE lanes chosen(integers where, lanes yes, lanes no) {
  return (lanes)((where & (integers)yes) | (~where & (integers)no));
}

#ifdef IN_BF16
INLINE float wide(value v) {
  union { uint32_t bits; float number; } both = {(uint32_t)v << 16};
  return both.number;
}
INLINE words rounded_bits(lanes x) {
  words bits = (words)x;
  return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
}
INLINE lanes rounded(lanes x) { return (lanes)rounded_bits(x); }
typedef uint16_t narrow_lanes __attribute__((vector_size(2 * LANES), aligned(2)));
INLINE lanes load_values(const value *from) {
#ifdef __x86_64__ /* GCC 12 takes six instructions for __builtin_convertvector. */
#if LANES == 16
  words bits = (words)_mm512_cvtepu16_epi32((__m256i) * (const narrow_lanes *)from);
#else
  words bits = (words)_mm256_cvtepu16_epi32((__m128i) * (const narrow_lanes *)from);
#endif
#else
  words bits = __builtin_convertvector(*(const narrow_lanes *)from, words);
#endif
  return (lanes)(bits << 16);
}
INLINE value narrow(float x) {
  union { float number; uint32_t bits; } both = {x};
  return (both.bits + 0x7fff + ((both.bits >> 16) & 1)) >> 16;
}
/* Where the pair or the number of feature k begins in packed activations, in floats. */
INLINE int64_t packed_offset(int64_t k) { return k / 2 * LANES; }
INLINE void pack(float *to, int64_t k, lanes even, lanes odd) {
  *(words *)(to + packed_offset(k)) = (rounded_bits(even) >> 16) | rounded_bits(odd);
}
INLINE value *packed_place(float *to, int64_t k, int64_t lane) {
  return (value *)to + (k / 2 * LANES + lane) * 2 + k % 2;
}
#else
INLINE float wide(value v) { return v; }
INLINE lanes rounded(lanes x) { return x; }
INLINE lanes load_values(const value *from) { return load(from); }
INLINE value narrow(float x) { return x; }
INLINE int64_t packed_offset(int64_t k) { return k * LANES; }
INLINE void pack(float *to, int64_t k, lanes even, lanes odd) {
  *(lanes *)(to + packed_offset(k)) = even;
  *(lanes *)(to + packed_offset(k + 1)) = odd;
}
INLINE value *packed_place(float *to, int64_t k, int64_t lane) { return to + packed_offset(k) + lane; }
#endif

/* e^x within two units in the last place; 0 below -87, near the smallest floats. */
INLINE lanes exp_of(lanes x) {
#if defined(__x86_64__) && LANES == 16 /* GCC 12 makes three instructions of each choice. */
  __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  x = (lanes)_mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_maskz_mov_ps(there, (__m512)x));
#else
  integers vanishes = x < -87.0f;
  lanes zero = {0};
  x = chosen(vanishes, zero, x);
  x = chosen(x > 88.0f, zero + 88.0f, x);
#endif
  /* 1.5 * 2^23: adding it rounds to a whole number, which is then in the lowest bits. */
  lanes shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f;
  lanes rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  lanes sum = 1.0f / 720 + rest * (1.0f / 5040);
  sum = 1.0f / 24 + rest * (1.0f / 120 + rest * sum);
  sum = 1.0f + rest * (1.0f + rest * (0.5f + rest * (1.0f / 6 + rest * sum)));
  lanes found = (lanes)((integers)sum + (((integers)shifted - 0x4b400000) << 23));
#if defined(__x86_64__) && LANES == 16
  return (lanes)_mm512_maskz_mov_ps(there, (__m512)found);
#else
  return chosen(vanishes, zero, found);
#endif
}

/* Halves the number of vectors: x[i] gets half of the lanes of x[i] and of x[i + half], each the sum of two. */
#define HALVE(half, ...)                                             \
  for (int i = 0; i < half; i++) {                                   \
    static const integers near = {__VA_ARGS__};                      \
    lanes a = x[i], b = x[i + half];                                 \
    x[i] = __builtin_shuffle(a, b, near) + __builtin_shuffle(a, b, near + half); \
  }
/* Lane i is the sum of all lanes of x[i], which is overwritten. */
INLINE lanes totals(lanes *x) {
#if LANES == 16
  HALVE(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
  HALVE(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
  HALVE(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
  HALVE(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#else
  HALVE(4, 0, 1, 2, 3, 8, 9, 10, 11)
  HALVE(2, 0, 1, 8, 9, 4, 5, 12, 13)
  HALVE(1, 0, 8, 2, 10, 4, 12, 6, 14)
#endif
  return x[0];
}

INLINE float total(lanes x) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += x[i];
  return sum;
}

INLINE float largest(lanes x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}

/* The part of `count` things that this thread does, and a wait until all have done theirs. */
typedef struct { int64_t number, all; } Thread;
#define OWN_SHARE(count, first, last) \
  int64_t first = (count) * thread.number / thread.all, last = (count) * (thread.number + 1) / thread.all
#define WAIT_FOR_ALL _Pragma("omp barrier")
