/* The values of NF4 codes (shared/model/layers/nf4.py) in bf16, made just before they are multiplied.

       W[o, i] = round(levels[q[o, i]] scales[o, i / SCALED]),   the same bits as in the dense base

   So a quarter of the bytes is read, in the order in which the cached base has them. */

#define SCALED 64 /* inputs with one scale; `in` is a multiple of it */
#define LEVELS 16

typedef struct {
  const uint8_t *codes; /* [out][in / 2], the earlier of two in the high half */
  const float *scales;  /* [out][in / SCALED] */
  const float *levels;  /* [LEVELS] */
} Codes;

INLINE int64_t code_bytes(int64_t inputs) { return inputs / 2; }
INLINE Codes from_output(Codes w, int64_t output, int64_t in) {
  return (Codes){w.codes + output * code_bytes(in), w.scales + output * (in / SCALED), w.levels};
}

#ifdef IN_BF16
/* SCALED values of one output. */
#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define OF_BYTE(i) 0x01010101u * (i)
#define OF_FOUR(i) OF_BYTE(i), OF_BYTE(i + 1), OF_BYTE(i + 2), OF_BYTE(i + 3)
#define OF_BYTES(i) OF_FOUR(i), OF_FOUR(i + 4), OF_FOUR(i + 8), OF_FOUR(i + 12)
INLINE void scaled_values(const float *levels, float scale, const uint8_t *codes, value *to) {
  typedef uint32_t words512 __attribute__((vector_size(64)));
  __m512 exact = _mm512_mul_ps(_mm512_loadu_ps(levels), _mm512_set1_ps(scale));
  __m512i values = (__m512i)_mm512_cvtne2ps_pbh(exact, exact);
  __m512i all = _mm512_broadcast_i64x4(*(const __m256i_u *)codes);
  for (int half = 0; half < 2; half++) {
    /* Two words for each byte, of which the first takes the high half. A lookup sees the lowest five bits, and the
       fifth does not matter: the second half of the table is the same as the first. */
    words512 places = half ? (words512){OF_BYTES(16)} : (words512){OF_BYTES(0)};
    __m512i found = _mm512_permutexvar_epi8((__m512i)places, all);
    found = _mm512_srlv_epi16(found, _mm512_set1_epi32(4));
    _mm512_storeu_si512(to + half * SCALED / 2, _mm512_permutexvar_epi16(found, values));
  }
}
#else
INLINE void scaled_values(const float *levels, float scale, const uint8_t *codes, value *to) {
  value values[LEVELS];
  for (int i = 0; i < LEVELS; i++) values[i] = narrow(levels[i] * scale);
  for (int i = 0; i < SCALED / 2; i++) {
    to[2 * i] = values[codes[i] >> 4];
    to[2 * i + 1] = values[codes[i] & 15];
  }
}
#endif
#endif
