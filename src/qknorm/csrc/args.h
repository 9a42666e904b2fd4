// The one structure that crosses from Python (ops/backends/cpu_library.py) to C++. Plain C layout: the
// library needs no header of torch and is not rebuilt for its releases.
//
// B batch, Hq/Hk query/key heads, Tq/Tk tokens, D/Dv key/value width, R rotary width. Strides are in
// elements, for the axes B, H, T; the last axis is contiguous. Null pointers mark what a call lacks.
#pragma once
#include <cstdint>

extern "C" {

enum QknormDtype { QK_FP32 = 0, QK_BF16 = 1, QK_FP16 = 2 };
enum QknormIsa { QK_AVX2 = 0, QK_AVX512 = 1, QK_AVX512_BF16 = 2, QK_AMX = 3 };
enum QknormRope { QK_NO_ROPE = 0, QK_HALF = 1, QK_INTERLEAVED = 2 };

// Rows behind one partial sum of d_gain.
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
  float *lse;                        // [2, B, Hq, Tq]: largest raw score, ln(sum exp(logit - its logit)), sink included
  float *head_stats;                 // [4, Hq]: max logit, sums of entropy, ratio, sink mass; null: no statistics
  int64_t *row_counts;               // [2]: rows counted, those with two keys or more
  float *row_max, *row_log_sum, *row_entropy;  // [B, Hq, Tq], or null: no values of single rows
  int64_t *visible_keys;             // [1 or B, Tq], written for the first head

  const void *d_out;                 // strided like q
  int64_t d_out_stride[3];
  void *dq, *dk, *dv;                // [B, H, T, D or Dv], contiguous
  float *dq_gain, *dk_gain;          // [parts, H, D], partial sums in a fixed order
  float *d_sink;                     // [B, Hq]

  void *workspace;
  int64_t workspace_bytes;
};

// torch_parallel_for of torch's stable C interface: its threads, so that two pools never compete.
typedef int32_t (*QknormParallelFor)(int64_t begin, int64_t end, int64_t grain,
                                     void (*body)(int64_t, int64_t, void *), void *context);
}
