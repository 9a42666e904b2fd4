// How rows of q, k and v become the operands of products, and back: conversion, norm, RoPE and packing.
//
// `In` is the element type in memory. `Op` is the operand type of the products, float or uint16_t (bits of bf16).
#pragma once

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

static inline Vec load16(const float *p) { return Vec::load(p); }
static inline Vec load16(const Bf16 *p) { return from_bf16(&p->bits); }
static inline Vec load16(const Fp16 *p) { return from_fp16(&p->bits); }
static inline void store16(float *p, Vec x) { x.store(p); }
static inline void store16(Bf16 *p, Vec x) { to_bf16(&p->bits, x); }
static inline void store16(Fp16 *p, Vec x) { to_fp16(&p->bits, x); }
static inline void store16(uint16_t *p, Vec x) { to_bf16(p, x); }

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
// Widths are rounded up to multiples of this: bf16 products need a K axis of 32, and panels have 16 columns.
template <class Op>
constexpr int64_t width_step() {
  return sizeof(Op) == 2 ? 32 : 16;
}

// Converts one row of n elements to fp32, followed by zeros up to `padded`.
template <class In>
static void row_to_float(float *out, const In *in, int64_t n, int64_t padded) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) load16(in + i).store(out + i);
  if (i < padded) {
    alignas(64) In tail[16] = {};
    for (int64_t j = i; j < n; j++) tail[j - i] = in[j];
    load16(tail).store(out + i);
    for (i += 16; i < padded; i += 16) Vec::set(0.0f).store(out + i);
  }
}

template <class Out>
static void float_to_row(Out *out, const float *in, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store16(out + i, Vec::load(in + i));
  if (i < n) {
    alignas(64) Out tail[16];
    alignas(64) float padded[16] = {};
    for (int64_t j = i; j < n; j++) padded[j - i] = in[j];
    store16(tail, Vec::load(padded));
    for (int64_t j = i; j < n; j++) out[j] = tail[j - i];
  }
}

// The arguments of norm and RoPE for one head at one token.
struct NormRope {
  const float *gain;  // [D] or null
  float eps;
  const float *cos, *sin;  // [R/2] or null
  int64_t D, R;
  bool interleaved;
};

static inline float inverse_rms(const float *x, int64_t D, int64_t padded, float eps) {
  Vec total = Vec::set(0.0f);
  for (int64_t i = 0; i < padded; i += 16) total = fma(Vec::load(x + i), Vec::load(x + i), total);
  return 1.0f / std::sqrt(sum(total) / (float)D + eps);
}

// Rotates x in place by the angle, or by minus the angle if `back` (for gradients).
static void rotate(float *x, const NormRope &n, bool back) {
  const int64_t half = n.R / 2;
  const float sign = back ? -1.0f : 1.0f;
  if (n.interleaved) {
    for (int64_t i = 0; i < half; i++) {
      const float a = x[2 * i], b = x[2 * i + 1], c = n.cos[i], s = sign * n.sin[i];
      x[2 * i] = a * c - b * s;
      x[2 * i + 1] = b * c + a * s;
    }
  } else {
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
      const Vec a = Vec::load(x + i), b = Vec::load(x + half + i);
      const Vec c = Vec::load(n.cos + i), s = Vec::load(n.sin + i) * Vec::set(sign);
      (a * c - b * s).store(x + i);
      (b * c + a * s).store(x + half + i);
    }
    for (; i < half; i++) {
      const float a = x[i], b = x[i + half], c = n.cos[i], s = sign * n.sin[i];
      x[i] = a * c - b * s;
      x[i + half] = b * c + a * s;
    }
  }
}

// Applies norm, gain and rotation in place to x, which is fp32 and padded with zeros, and rounds once to the
// precision of In.
template <class In>
static void norm_rope(float *x, const NormRope &n, int64_t padded) {
  if (n.gain) {
    const float inverse = inverse_rms(x, n.D, padded, n.eps);
    const Vec wide = Vec::set(inverse);
    int64_t i = 0;
    for (; i + 16 <= n.D; i += 16) (Vec::load(x + i) * wide * Vec::load(n.gain + i)).store(x + i);
    for (; i < n.D; i++) x[i] = x[i] * inverse * n.gain[i];
  }
  if (n.cos) rotate(x, n, false);
  if (sizeof(In) == 2 && (n.gain || n.cos)) {
    for (int64_t i = 0; i < padded; i += 16) {
      In rounded[16];
      store16(rounded, Vec::load(x + i));
      load16(rounded).store(x + i);
    }
  }
}

// Turns the gradient dy of a normalised, rotated row into the gradient dx of the raw row x, in place. After dy has
// been rotated back, d_gain += dy u and dx = r (g dy - u mean(u g dy)), with u = x r and r = 1 / rms(x). Both rows
// are fp32 and padded.
static void norm_rope_backward(float *dy, const float *x, const NormRope &n, int64_t padded, float *d_gain) {
  if (n.cos) rotate(dy, n, true);
  if (!n.gain) return;
  const float inverse = inverse_rms(x, n.D, padded, n.eps);
  const Vec wide = Vec::set(inverse);
  Vec dots = Vec::set(0.0f);
  int64_t i = 0;
  for (; i + 16 <= n.D; i += 16) {
    const Vec u = Vec::load(x + i) * wide, d = Vec::load(dy + i), g = d * Vec::load(n.gain + i);
    fma(d, u, Vec::load(d_gain + i)).store(d_gain + i);
    g.store(dy + i);
    dots = fma(g, u, dots);
  }
  float dot = sum(dots);
  for (; i < n.D; i++) {
    const float u = x[i] * inverse;
    d_gain[i] += dy[i] * u;
    dy[i] *= n.gain[i];
    dot += dy[i] * u;
  }
  const float mean = dot / (float)n.D;
  const Vec pull = Vec::set(inverse * mean);
  for (i = 0; i + 16 <= n.D; i += 16)
    (wide * (Vec::load(dy + i) - Vec::load(x + i) * pull)).store(dy + i);
  for (; i < n.D; i++) dy[i] = inverse * (dy[i] - x[i] * inverse * mean);
}

// Transposes words of 32 bits: out[k * ld_out + r] = in[r * ld_in + k]. rows and K are multiples of 8.
static void transpose_words(float *out, int64_t ld_out, const float *in, int64_t ld_in, int64_t rows, int64_t K) {
  for (int64_t r = 0; r < rows; r += 8)
    for (int64_t k = 0; k < K; k += 8) {
      const float *x = in + r * ld_in + k;
      float *y = out + k * ld_out + r;
      __m256 a[8], b[8];
      for (int64_t i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(x + i * ld_in);
      for (int64_t i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
      }
      for (int64_t i = 0; i < 8; i += 4)
        for (int64_t j = 0; j < 2; j++) {
          a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
          a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
        }
      for (int64_t i = 0; i < 4; i++) {
        _mm256_storeu_ps(y + i * ld_out, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(y + (i + 4) * ld_out, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
      }
    }
}

// Packs fp32 rows [rows][ld] into an operand B whose K axis runs along a row: each panel has 16 rows.
static void pack_across(float *out, const float *in, int64_t ld, int64_t rows, int64_t K) {
  for (int64_t r = 0; r < rows; r += 16) transpose_words(out + r * K, 16, in + r * ld, ld, 16, K);
}
static void pack_across(uint16_t *out, const float *in, int64_t ld, int64_t rows, int64_t K) {
  alignas(64) uint16_t narrow[16][256];
  for (int64_t r = 0; r < rows; r += 16) {
    for (int64_t i = 0; i < 16; i++)
      for (int64_t k = 0; k < K; k += 16) to_bf16(narrow[i] + k, Vec::load(in + (r + i) * ld + k));
    // Two bf16 neighbours along K form one word.
    transpose_words((float *)(out + r * K), 16, (const float *)narrow, 128, 16, K / 2);
  }
}

// Packs the same rows into an operand B whose K axis counts the rows: each panel has 16 columns.
static void pack_down(float *out, const float *in, int64_t ld, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; c += 16, out += 16 * rows)
    for (int64_t r = 0; r < rows; r++) Vec::load(in + r * ld + c).store(out + 16 * r);
}
#if defined(QK_USE_BF16)
// Interleaves two rows into pairs along K: a0 b0 a1 b1 ... The lower half of `both` is a, the upper half is b.
static inline __m512i interleave(__m512i both) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}
static inline void store_side_by_side(uint16_t *out, Vec a, Vec b) {
  _mm512_storeu_si512(out, interleave((__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)));
}
static void pack_down(uint16_t *out, const float *in, int64_t ld, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; c += 16, out += 16 * rows)
    for (int64_t r = 0; r < rows; r += 2)
      store_side_by_side(out + 16 * r, Vec::load(in + r * ld + c), Vec::load(in + (r + 1) * ld + c));
}
#endif

// Packs rows directly from memory, without conversion to fp32. Returns false if types or strides do not allow it.
template <class Op, class In>
static bool copy_across(Op *, const In *, int64_t, int64_t, int64_t) {
  return false;
}
template <class Op, class In>
static bool copy_down(Op *, const In *, int64_t, int64_t, int64_t) {
  return false;
}
#if defined(QK_USE_BF16)
static bool copy_across(uint16_t *out, const Bf16 *in, int64_t ld, int64_t rows, int64_t K) {
  if (ld % 2) return false;  // rows are read as 32-bit words, so they must begin at an even element
  for (int64_t r = 0; r < rows; r += 16)
    transpose_words((float *)(out + r * K), 16, (const float *)(in + r * ld), ld / 2, 16, K / 2);
  return true;
}
static bool copy_down(uint16_t *out, const Bf16 *in, int64_t ld, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; c += 16, out += 16 * rows)
    for (int64_t r = 0; r < rows; r += 2) {
      const __m256i a = _mm256_loadu_si256((const __m256i *)(in + r * ld + c));
      const __m256i b = _mm256_loadu_si256((const __m256i *)(in + (r + 1) * ld + c));
      _mm512_storeu_si512(out + 16 * r, interleave(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1)));
    }
  return true;
}
#endif

// Packs rows into a row-major operand A.
static void pack_rows(float *out, const float *in, int64_t ld, int64_t rows, int64_t K) {
  for (int64_t r = 0; r < rows; r++) memcpy(out + r * K, in + r * ld, K * sizeof(float));
}
static void pack_rows(uint16_t *out, const float *in, int64_t ld, int64_t rows, int64_t K) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < K; k += 16) to_bf16(out + r * K + k, Vec::load(in + r * ld + k));
}
