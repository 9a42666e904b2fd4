// Products of blocks, C[M x N] = A[M x K] B[K x N], added to C if `add`, with fp32 accumulation. M and N are
// multiples of 16.
//
// A is row-major with leading dimension lda. B is packed in panels of 16 columns:
//   fp32: panel[K][16];
//   bf16: panel[K/2][16][2], with pairs of rows of B interleaved, as vdpbf16ps and the AMX tiles require. K is a
//   multiple of 32, padded with zeros.
// The panels begin `panel` elements apart, or 16 K if `panel` is 0.
#pragma once

// Computes MR rows by NP panels, whose sums stay in registers.
template <int MR, int NP>
static inline void gemm_rows_fp32(float *C, int64_t ldc, const float *A, int64_t lda, const float *B, int64_t panel,
                                  int64_t K, bool add) {
  Vec c[MR][NP];
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NP; j++) c[i][j] = add ? Vec::load(C + i * ldc + 16 * j) : Vec::set(0.0f);
  for (int64_t k = 0; k < K; k++) {
    Vec b[NP];
    for (int j = 0; j < NP; j++) b[j] = Vec::load(B + j * panel + 16 * k);
    for (int i = 0; i < MR; i++) {
      Vec a = Vec::set(A[i * lda + k]);
      for (int j = 0; j < NP; j++) c[i][j] = fma(a, b[j], c[i][j]);
    }
  }
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NP; j++) c[i][j].store(C + i * ldc + 16 * j);
}

static void gemm(float *C, int64_t ldc, const float *A, int64_t lda, const float *B, int64_t M, int64_t N, int64_t K,
                 bool add, int64_t panel = 0) {
  panel = panel ? panel : 16 * K;
  const int64_t panels = N / 16;
#if defined(QK_USE_AVX512)
  for (int64_t p = 0; p < panels;) {
    const int64_t n = std::min<int64_t>(4, panels - p), step = n > 2 ? 4 : 8;
    for (int64_t i = 0; i < M; i += step) {
      float *c = C + i * ldc + 16 * p;
      const float *a = A + i * lda, *b = B + p * panel;
      switch (n) {
        case 1: gemm_rows_fp32<8, 1>(c, ldc, a, lda, b, panel, K, add); break;
        case 2: gemm_rows_fp32<8, 2>(c, ldc, a, lda, b, panel, K, add); break;
        case 3: gemm_rows_fp32<4, 3>(c, ldc, a, lda, b, panel, K, add); break;
        default: gemm_rows_fp32<4, 4>(c, ldc, a, lda, b, panel, K, add); break;
      }
    }
    p += n;
  }
#else  // of sixteen registers, 8 hold the sums, 2 the panel, and 1 or 2 the broadcast element of A
  for (int64_t p = 0; p < panels; p++)
    for (int64_t i = 0; i < M; i += 4)
      gemm_rows_fp32<4, 1>(C + i * ldc + 16 * p, ldc, A + i * lda, lda, B + p * panel, panel, K, add);
#endif
}

#if defined(QK_USE_AMX)

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static inline void begin_tiles() {
  alignas(64) static const TileConfig config;
  _tile_loadconfig(&config);
}
static inline void end_tiles() { _tile_release(); }

// Tiles 0 to 3 hold a 32 x 32 block of C, tiles 4 and 5 rows of A, tiles 6 and 7 panels of B.
static void gemm(float *C, int64_t ldc, const uint16_t *A, int64_t lda, const uint16_t *B, int64_t M, int64_t N,
                 int64_t K, bool add, int64_t panel = 0) {
  panel = panel ? panel : 16 * K;
  const int64_t cs = ldc * 4, as = lda * 2;
  for (int64_t j = 0; j < N; j += 32) {
    const bool wide = j + 32 <= N;
    const uint16_t *b0 = B + (j / 16) * panel, *b1 = b0 + panel;
    for (int64_t i = 0; i < M; i += 32) {
      const bool tall = i + 32 <= M;
      float *c0 = C + i * ldc + j, *c1 = c0 + 16 * ldc;
      const uint16_t *a0 = A + i * lda, *a1 = a0 + 16 * lda;
      if (add) {
        _tile_loadd(0, c0, cs);
        if (wide) _tile_loadd(1, c0 + 16, cs);
        if (tall) _tile_loadd(2, c1, cs);
        if (wide && tall) _tile_loadd(3, c1 + 16, cs);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t k = 0; k < K; k += 32) {
        _tile_loadd(4, a0 + k, as);
        _tile_loadd(6, b0 + 16 * k, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (wide) {
          _tile_loadd(7, b1 + 16 * k, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (tall) {
          _tile_loadd(5, a1 + k, as);
          _tile_dpbf16ps(2, 5, 6);
          if (wide) _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, c0, cs);
      if (wide) _tile_stored(1, c0 + 16, cs);
      if (tall) _tile_stored(2, c1, cs);
      if (wide && tall) _tile_stored(3, c1 + 16, cs);
    }
  }
}

#else

static inline void begin_tiles() {}
static inline void end_tiles() {}

#if defined(QK_USE_BF16)
template <int NP>
static inline void gemm_rows_bf16(float *C, int64_t ldc, const uint16_t *A, int64_t lda, const uint16_t *B,
                                  int64_t panel, int64_t K, bool add) {
  constexpr int MR = 4;
  __m512 c[MR][NP];
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NP; j++) c[i][j] = add ? _mm512_loadu_ps(C + i * ldc + 16 * j) : _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 2) {
    __m512bh b[NP];
    for (int j = 0; j < NP; j++) b[j] = (__m512bh)_mm512_loadu_si512(B + j * panel + 16 * k);
    for (int i = 0; i < MR; i++) {
      int32_t pair;
      memcpy(&pair, A + i * lda + k, 4);
      __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
      for (int j = 0; j < NP; j++) c[i][j] = _mm512_dpbf16_ps(c[i][j], a, b[j]);
    }
  }
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NP; j++) _mm512_storeu_ps(C + i * ldc + 16 * j, c[i][j]);
}

static void gemm(float *C, int64_t ldc, const uint16_t *A, int64_t lda, const uint16_t *B, int64_t M, int64_t N,
                 int64_t K, bool add, int64_t panel = 0) {
  panel = panel ? panel : 16 * K;
  const int64_t panels = N / 16;
  for (int64_t p = 0; p < panels;) {
    const int64_t n = panels - p >= 4 ? 4 : panels - p;
    for (int64_t i = 0; i < M; i += 4) {
      float *c = C + i * ldc + 16 * p;
      const uint16_t *a = A + i * lda, *b = B + p * panel;
      switch (n) {
        case 1: gemm_rows_bf16<1>(c, ldc, a, lda, b, panel, K, add); break;
        case 2: gemm_rows_bf16<2>(c, ldc, a, lda, b, panel, K, add); break;
        case 3: gemm_rows_bf16<3>(c, ldc, a, lda, b, panel, K, add); break;
        default: gemm_rows_bf16<4>(c, ldc, a, lda, b, panel, K, add); break;
      }
    }
    p += n;
  }
}
#endif
#endif
