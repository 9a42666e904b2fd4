// The code that depends on the instruction set. It is compiled once for each set, by a file that defines
// QK_NAMESPACE and the QK_USE_ macros and is compiled with matching flags.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "args.h"
#include "exp2.h"

extern QknormParallelFor qknorm_parallel_for;

namespace QK_NAMESPACE {
#include "vec.h"
#include "gemm.h"
#include "rows.h"
#include "plan.h"
#include "online.h"
#include "forward.h"
#include "decode.h"
#include "backward.h"

// The operand type for bf16 inputs. Without bf16 products in the instruction set, bf16 is multiplied as fp32, as
// fp16 always is, after q_hat and k_hat have been rounded once to their dtype.
#if defined(QK_USE_BF16)
using Bf16Op = uint16_t;
#else
using Bf16Op = float;
#endif

template <class In, class Op>
static void choose_forward(const QknormArgs &a) {
  DecodePlan<Op>::fits(a) ? decode<In, Op>(a) : forward<In, Op>(a);
}
template <class Op>
static int64_t choose_workspace(const QknormArgs &a) {
  return DecodePlan<Op>::fits(a) ? decode_workspace<Op>(a) : forward_workspace<Op>(a);
}

void run_forward(const QknormArgs &a) {
  if (a.dtype == QK_FP32) choose_forward<float, float>(a);
  else if (a.dtype == QK_BF16) choose_forward<Bf16, Bf16Op>(a);
  else choose_forward<Fp16, float>(a);
}
int64_t workspace_forward(const QknormArgs &a) {
  return a.dtype == QK_BF16 ? choose_workspace<Bf16Op>(a) : choose_workspace<float>(a);
}
void run_backward(const QknormArgs &a) {
  if (a.dtype == QK_FP32) backward<float, float>(a);
  else if (a.dtype == QK_BF16) backward<Bf16, Bf16Op>(a);
  else backward<Fp16, float>(a);
}
int64_t workspace_backward(const QknormArgs &a) {
  return a.dtype == QK_BF16 ? backward_workspace<Bf16Op>(a) : backward_workspace<float>(a);
}
}  // namespace QK_NAMESPACE
