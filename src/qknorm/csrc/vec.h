// A vector of sixteen fp32 lanes: one AVX-512 register or two AVX2 registers. This file is included once for each
// instruction set, inside its namespace.
#pragma once

struct Mask;

#if defined(QK_USE_AVX512)

struct Mask {
  __mmask16 m;
};
struct Vec {
  __m512 v;
  static Vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
  static Vec set(float x) { return {_mm512_set1_ps(x)}; }
  static Vec ramp(float first) {
    return {_mm512_add_ps(_mm512_set1_ps(first), _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))};
  }
  void store(float *p) const { _mm512_storeu_ps(p, v); }
};
static inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The result is b if either argument is NaN.
static inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
static inline float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
static inline Mask less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
static inline Mask less_equal(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
static inline Mask equal_ids(const int32_t *p, int32_t id) {
  return {_mm512_cmpeq_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(id))};
}
static inline Mask operator&(Mask a, Mask b) { return {(__mmask16)(a.m & b.m)}; }
static inline Vec choose(Mask m, Vec a, Vec b) { return {_mm512_mask_blend_ps(m.m, b.v, a.v)}; }
static inline int count(Mask m) { return __builtin_popcount(m.m); }
static inline bool any(Mask m) { return m.m != 0; }
// 2^x with a relative error of 2e-7. The result is NaN for NaN, and 0 for -inf, whose fraction vreduce gives as 0.
static inline Vec exp2(Vec x) {
  Vec f{_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  Vec p = Vec::set(QK_EXP2_C5);
  p = fma(p, f, Vec::set(QK_EXP2_C4));
  p = fma(p, f, Vec::set(QK_EXP2_C3));
  p = fma(p, f, Vec::set(QK_EXP2_C2));
  p = fma(p, f, Vec::set(QK_EXP2_C1));
  p = fma(p, f, Vec::set(QK_EXP2_C0));
  return {_mm512_scalef_ps(p.v, x.v)};  // multiplies by 2^floor(x)
}
static inline Vec from_bf16(const uint16_t *p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16))};
}
static inline Vec from_fp16(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
static inline void to_fp16(uint16_t *p, Vec a) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#if defined(QK_USE_BF16)
static inline void to_bf16_pair(uint16_t *p, Vec a, Vec b) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
}
static inline void to_bf16(uint16_t *p, Vec a) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
#else
static inline void to_bf16(uint16_t *p, Vec a) {
  // Rounds to nearest even. A NaN keeps its upper bits and becomes quiet.
  __m512i u = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_or_si512(u, _mm512_set1_epi32(0x400000)));
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

#else  // AVX2

struct Mask {
  __m256 lo, hi;
};
struct Vec {
  __m256 lo, hi;
  static Vec load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vec set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vec ramp(float first) {
    __m256 a = _mm256_add_ps(_mm256_set1_ps(first), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7));
    return {a, _mm256_add_ps(a, _mm256_set1_ps(8))};
  }
  void store(float *p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
};
static inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
static inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline float sum(Vec a) {
  __m256 s = _mm256_add_ps(a.lo, a.hi);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline float largest(Vec a) {
  __m256 s = _mm256_max_ps(a.lo, a.hi);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline Mask less(Vec a, Vec b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)}; }
static inline Mask less_equal(Vec a, Vec b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)}; }
static inline Mask equal_ids(const int32_t *p, int32_t id) {
  __m256i x = _mm256_set1_epi32(id);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_loadu_si256((const __m256i *)p), x)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_loadu_si256((const __m256i *)(p + 8)), x))};
}
static inline Mask operator&(Mask a, Mask b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
static inline Vec choose(Mask m, Vec a, Vec b) { return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)}; }
static inline int count(Mask m) {
  return __builtin_popcount(_mm256_movemask_ps(m.lo)) + __builtin_popcount(_mm256_movemask_ps(m.hi));
}
static inline bool any(Mask m) { return (_mm256_movemask_ps(m.lo) | _mm256_movemask_ps(m.hi)) != 0; }
static inline __m256 exp2_half(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-160.0f), x);
  __m256 r = _mm256_floor_ps(x);
  __m256 f = _mm256_sub_ps(x, r);
  __m256 p = _mm256_set1_ps(QK_EXP2_C5);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(QK_EXP2_C4));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(QK_EXP2_C3));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(QK_EXP2_C2));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(QK_EXP2_C1));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(QK_EXP2_C0));
  // Adding r to the exponent bits would wrap around below 2^-126, so such results are set to 0. A NaN compares as
  // false and is kept.
  __m256 tiny = _mm256_cmp_ps(r, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
  __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(r), 23);
  __m256 y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e));
  y = _mm256_blendv_ps(y, p, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_andnot_ps(tiny, y);
}
static inline Vec exp2(Vec x) { return {exp2_half(x.lo), exp2_half(x.hi)}; }
static inline __m256 half_from_bf16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
static inline Vec from_bf16(const uint16_t *p) { return {half_from_bf16(p), half_from_bf16(p + 8)}; }
static inline Vec from_fp16(const uint16_t *p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
static inline void to_fp16(uint16_t *p, Vec a) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline __m128i half_to_bf16(__m256 a) {
  __m256i u = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  rounded = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan));
  rounded = _mm256_srli_epi32(rounded, 16);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
  return _mm256_castsi256_si128(packed);
}
static inline void to_bf16(uint16_t *p, Vec a) {
  _mm_storeu_si128((__m128i *)p, half_to_bf16(a.lo));
  _mm_storeu_si128((__m128i *)(p + 8), half_to_bf16(a.hi));
}
#endif
