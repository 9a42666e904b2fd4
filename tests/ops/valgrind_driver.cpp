// Calls the library (argv[1]) forward and backward on a grid of small shapes, with no Python around it:
// every buffer is exactly as large as the call says, every result is looked at. Meant for memcheck, which
// knows no AVX-512, so on AVX2 and one thread.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "args.h"

static uint64_t state = 1;
static uint64_t dice(uint64_t n) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (state >> 33) % n;
}
template <class T>
static T pick(std::initializer_list<T> options) {
  return options.begin()[dice(options.size())];
}

// Freed together at the end of a call.
static std::vector<void *> owned;
template <class T>
static T *fresh(int64_t n) {
  T *p = (T *)malloc(n * sizeof(T));
  owned.push_back(p);
  return p;
}
static float *floats(int64_t n) {
  float *p = fresh<float>(n);
  for (int64_t i = 0; i < n; i++) p[i] = (float)dice(2001) / 1000.0f - 1.0f;
  return p;
}

// Looking at memory that nobody wrote is an error to memcheck. Numbers that are not finite are counted.
static int64_t bad = 0;
static const char *looking_at = "";
static void look(const char *name, const void *p, int64_t n, int64_t dtype) {
  looking_at = name;
  for (int64_t i = 0; i < n; i++) {
    uint32_t exponent, all;
    if (dtype == QK_FP32) {
      uint32_t x;
      memcpy(&x, (const float *)p + i, 4);
      exponent = x >> 23 & 255, all = 255;
    } else {
      const uint16_t x = ((const uint16_t *)p)[i];
      exponent = dtype == QK_BF16 ? x >> 7 & 255 : x >> 10 & 31, all = dtype == QK_BF16 ? 255 : 31;
    }
    if (exponent == all) bad++;
  }
}
// Row values and lse may be -inf: only their being written counts.
static void look_at_written(const char *name, const void *p, int64_t bytes) {
  looking_at = name;
  int64_t sum = 0;
  for (int64_t i = 0; i < bytes; i++) sum += ((const uint8_t *)p)[i];
  if (sum == INT64_MAX - bad) abort();
}

static int64_t size_of(int64_t dtype) { return dtype == QK_FP32 ? 4 : 2; }

// Rows [B, H, T] of `width` numbers with gaps between them; the last row ends with the buffer, which is
// `missing` elements too short.
static const void *rows(int64_t dtype, int64_t B, int64_t H, int64_t T, int64_t width, int64_t stride[3],
                        int64_t missing) {
  const int64_t gap = pick<int64_t>({0, 1, 2, 5});
  if (dice(2)) {  // [B, T, H]
    stride[1] = width + gap, stride[2] = H * stride[1] + gap, stride[0] = T * stride[2];
  } else {
    stride[2] = width + gap, stride[1] = T * stride[2] + gap, stride[0] = H * stride[1];
  }
  const int64_t n = (B - 1) * stride[0] + (H - 1) * stride[1] + (T - 1) * stride[2] + width - missing;
  char *p = fresh<char>(n * size_of(dtype));
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t t = 0; t < T; t++)
        for (int64_t c = 0; c < width; c++) {
          const int64_t i = b * stride[0] + h * stride[1] + t * stride[2] + c;
          if (i >= n) continue;
          if (dtype == QK_FP32) {
            ((float *)p)[i] = (float)dice(2001) / 1000.0f - 1.0f;
          } else if (dtype == QK_BF16) {
            ((uint16_t *)p)[i] = dice(2) << 15 | (122 + dice(6)) << 7 | dice(128);
          } else {
            ((uint16_t *)p)[i] = dice(2) << 15 | (10 + dice(6)) << 10 | dice(1024);
          }
        }
  return p;
}

static void *library;
template <class R, class... Args>
static R call(const char *name, Args... args) {
  auto *function = (R(*)(Args...))dlsym(library, name);
  if (!function) fprintf(stderr, "no %s\n", name), exit(2);
  return function(args...);
}

static void one_call(int64_t missing) {
  struct Tokens {
    int64_t Tq, Tk;
  };
  QknormArgs a;
  memset(&a, 0, sizeof a);
  a.B = pick<int64_t>({1, 2}), a.Hk = pick<int64_t>({1, 1, 2, 4}), a.Hq = a.Hk * pick<int64_t>({1, 2, 3});
  const Tokens tokens =
      pick<Tokens>({{1, 1}, {5, 5}, {33, 33}, {40, 70}, {63, 65}, {130, 130}, {17, 9}, {3, 300}, {129, 257},
                    {1, 33}, {2, 64}, {5, 70}, {16, 129}, {1, 1100}, {16, 1025}});
  a.Tq = tokens.Tq, a.Tk = tokens.Tk;
  if (a.Tk > 200) a.B = a.Hk = 1, a.Hq = pick<int64_t>({1, 2});
  a.D = pick<int64_t>({8, 16, 17, 32, 40, 64, 72, 80}), a.Dv = pick<int64_t>({1, 5, 16, 24, 32, 64, 70, 80});
  a.dtype = pick<int64_t>({QK_FP32, QK_BF16, QK_FP16});
  a.isa = QK_AVX2;
  a.threads = pick<int64_t>({1, 3});
  if (dice(4) == 0) a.B = 8, a.Hk = 1, a.Hq = 2, a.threads = 1, a.Tq = a.Tk = pick<int64_t>({7, 40});
  a.causal = dice(2), a.window = pick<int64_t>({0, 0, 1, 9, 70});
  a.scale = pick<double>({0.25, 1.0, -0.5}), a.eps = 1e-6;
  a.q = rows(a.dtype, a.B, a.Hq, a.Tq, a.D, a.q_stride, 0);
  a.k = rows(a.dtype, a.B, a.Hk, a.Tk, a.D, a.k_stride, missing);
  a.v = rows(a.dtype, a.B, a.Hk, a.Tk, a.Dv, a.v_stride, 0);
  a.d_out = rows(a.dtype, a.B, a.Hq, a.Tq, a.Dv, a.d_out_stride, 0);
  if (dice(2)) a.q_gain = floats(a.Hq * a.D);
  if (dice(2)) a.k_gain = floats(a.Hk * a.D);
  if (dice(2) && a.Tq <= a.Tk) {
    a.rope = pick<int64_t>({QK_HALF, QK_INTERLEAVED});
    a.R = pick<int64_t>({2, 6, a.D / 2 * 2});
    const int64_t tables = dice(2) ? a.B : 1, size = a.Tk * (a.R / 2);
    a.cos = floats(tables * size), a.sin = floats(tables * size);
    a.rope_stride = tables > 1 ? size : 0;
  }
  if (dice(2)) {
    int32_t *key_ids = fresh<int32_t>(a.B * a.Tk), *query_ids = fresh<int32_t>(a.B * a.Tq);
    const int64_t length = 1 + dice(a.Tk), padding = dice(3) ? 0 : dice(a.Tk);
    for (int64_t b = 0; b < a.B; b++) {
      for (int64_t j = 0; j < a.Tk; j++) key_ids[b * a.Tk + j] = j < padding ? -1 : (int32_t)((j + b) / length);
      for (int64_t i = 0; i < a.Tq; i++)
        query_ids[b * a.Tq + i] = a.Tq <= a.Tk ? key_ids[b * a.Tk + i + a.Tk - a.Tq] : 0;
    }
    a.key_ids = key_ids, a.query_ids = query_ids;
  }
  if (dice(2)) a.sink = floats(a.Hq);

  const int64_t q_rows = a.B * a.Hq * a.Tq, k_rows = a.B * a.Hk * a.Tk, size = size_of(a.dtype);
  a.out = fresh<char>(q_rows * a.Dv * size);
  a.lse = fresh<float>(2 * q_rows);
  const int64_t stats = dice(3), counted = a.key_ids ? a.B : 1;
  if (stats) a.head_stats = fresh<float>(4 * a.Hq), a.row_counts = fresh<int64_t>(2);
  if (stats == 2) {
    a.row_max = fresh<float>(q_rows), a.row_log_sum = fresh<float>(q_rows), a.row_entropy = fresh<float>(q_rows);
    a.visible_keys = fresh<int64_t>(counted * a.Tq);
  }
  a.workspace_bytes = call<int64_t>("qknorm_forward_workspace", (const QknormArgs *)&a);
  a.workspace = fresh<char>(a.workspace_bytes);
  call<void>("qknorm_forward", (const QknormArgs *)&a);
  look("out", a.out, q_rows * a.Dv, a.dtype);
  look_at_written("lse", a.lse, 2 * q_rows * 4);
  if (stats) {
    look_at_written("head_stats", a.head_stats, 16 * a.Hq);
    look_at_written("row_counts", a.row_counts, 16);
  }
  if (stats == 2) {
    look_at_written("row_max", a.row_max, q_rows * 4);
    look_at_written("row_log_sum", a.row_log_sum, q_rows * 4);
    look_at_written("row_entropy", a.row_entropy, q_rows * 4);
    look_at_written("visible_keys", a.visible_keys, counted * a.Tq * 8);
  }

  a.dq = fresh<char>(q_rows * a.D * size), a.dk = fresh<char>(k_rows * a.D * size);
  a.dv = fresh<char>(k_rows * a.Dv * size);
  const int64_t q_parts = a.B * ((a.Tq + QK_QUERY_PART - 1) / QK_QUERY_PART) * a.Hq * a.D;
  const int64_t k_parts = a.B * ((a.Tk + QK_KEY_PART - 1) / QK_KEY_PART) * a.Hk * a.D;
  if (a.q_gain) a.dq_gain = fresh<float>(q_parts);
  if (a.k_gain) a.dk_gain = fresh<float>(k_parts);
  if (a.sink) a.d_sink = fresh<float>(a.B * a.Hq);
  a.workspace_bytes = call<int64_t>("qknorm_backward_workspace", (const QknormArgs *)&a);
  a.workspace = fresh<char>(a.workspace_bytes);
  call<void>("qknorm_backward", (const QknormArgs *)&a);
  look("dq", a.dq, q_rows * a.D, a.dtype);
  look("dk", a.dk, k_rows * a.D, a.dtype);
  look("dv", a.dv, k_rows * a.Dv, a.dtype);
  if (a.q_gain) look("dq_gain", a.dq_gain, q_parts, QK_FP32);
  if (a.k_gain) look("dk_gain", a.dk_gain, k_parts, QK_FP32);
  if (a.sink) look("d_sink", a.d_sink, a.B * a.Hq, QK_FP32);
  if (bad) {
    fprintf(stderr, "%s is not finite: B %ld Hq %ld Hk %ld Tq %ld Tk %ld D %ld Dv %ld R %ld dtype %ld\n", looking_at,
            a.B, a.Hq, a.Hk, a.Tq, a.Tk, a.D, a.Dv, a.R, a.dtype);
    exit(3);
  }
  for (void *p : owned) free(p);
  owned.clear();
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  library = dlopen(argv[1], RTLD_NOW);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
  if (call<int64_t>("qknorm_args_size") != sizeof(QknormArgs)) return fprintf(stderr, "other args.h\n"), 2;
  const bool planted = !strcmp(argv[2], "planted");
  const int64_t calls = planted ? 1 : 200;
  for (int64_t i = 0; i < calls; i++) one_call(planted);
  dlclose(library);
  printf("%ld calls, forward and backward\n", (long)calls);
}
