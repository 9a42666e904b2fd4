// The structure by which Python (ops/backends/cpu_library.py) passes arguments to C++. It is plain C, so the
// library needs no header of torch and no new build for a new release of torch.
//
// B batch, Hq/Hk query/key heads, Tq/Tk query/key tokens, D/Dv key/value width, R rotary width. Strides are in
// elements, for the axes B, H and T; the last axis is contiguous. A pointer is null if the call lacks its tensor.
#pragma once
#include <cstdint>

extern "C" {

enum QknormDtype { QK_FP32 = 0, QK_BF16 = 1, QK_FP16 = 2 };
enum QknormIsa { QK_AVX2 = 0, QK_AVX512 = 1, QK_AVX512_BF16 = 2, QK_AMX = 3 };
enum QknormRope { QK_NO_ROPE = 0, QK_HALF = 1, QK_INTERLEAVED = 2 };

// The number of rows in one partial sum of the gradients of the gains.
constexpr int64_t QK_QUERY_PART = 128, QK_KEY_PART = 256;

struct QknormArgs {
  int64_t B, Hq, Hk, Tq, Tk, D, Dv, R;
  int64_t dtype, isa, rope, causal, window;  // window 0: none
  int64_t threads;
  double scale, eps;

  const void *q, *k, *v;
  int64_t q_stride[3], k_stride[3], v_stride[3];
  const float *q_gain, *k_gain;      // [Hq, D], [Hk, D]
  const float *cos, *sin;            // [1 or B, Tk, R/2], contiguous
  int64_t rope_stride;               // of B: 0 or Tk * R/2
  const int32_t *query_ids, *key_ids;  // [B, Tq], [B, Tk]; a pair is visible if equal and not negative
  const float *sink;                 // [Hq]

  void *out;                         // [B, Hq, Tq, Dv], contiguous
  float *lse;                        // [2, B, Hq, Tq]: m, the largest score sign(scale) q.k (0 if no key is visible),
                                     // and ln(sum exp(logit - |scale| m)) with the sink (-inf if no key is visible)
  float *head_stats;                 // [4, Hq]: max logit, sums of entropy, of entropy ratio and of sink mass; null
                                     // if the call returns no statistics
  int64_t *row_counts;               // [2]: number of rows that count, and of those with two keys or more
  float *row_max, *row_log_sum, *row_entropy;  // [B, Hq, Tq]; null if the values of each row are not wanted
  int64_t *visible_keys;             // [1 or B, Tq]: number of visible keys of each row; written if row_max is not null

  const void *d_out;                 // [B, Hq, Tq, Dv], strides as for q
  int64_t d_out_stride[3];
  void *dq, *dk, *dv;                // [B, H, T, D or Dv], contiguous
  float *dq_gain, *dk_gain;          // [parts, H, D], partial sums in a fixed order
  float *d_sink;                     // [B, Hq]

  void *workspace;
  int64_t workspace_bytes;
};

// torch_parallel_for of torch's stable C interface. It lends the library torch's threads, so no second pool of
// threads competes with them.
typedef int32_t (*QknormParallelFor)(int64_t begin, int64_t end, int64_t grain,
                                     void (*body)(int64_t, int64_t, void *), void *context);
}
