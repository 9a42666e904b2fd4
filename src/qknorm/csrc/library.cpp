// The entry points of the library, and the instruction sets that this processor has.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "args.h"

QknormParallelFor qknorm_parallel_for = nullptr;

#define QK_DECLARE(ns)                          \
  namespace ns {                                \
  void run_forward(const QknormArgs &);         \
  int64_t workspace_forward(const QknormArgs &); \
  void run_backward(const QknormArgs &);        \
  int64_t workspace_backward(const QknormArgs &); \
  }
QK_DECLARE(qk_avx2)
QK_DECLARE(qk_avx512)
QK_DECLARE(qk_avx512_bf16)
QK_DECLARE(qk_amx)

#define QK_DISPATCH(isa, call)                          \
  switch (isa) {                                        \
    case QK_AVX2: return qk_avx2::call;                 \
    case QK_AVX512: return qk_avx512::call;             \
    case QK_AVX512_BF16: return qk_avx512_bf16::call;   \
    default: return qk_amx::call;                       \
  }

static bool amx_permitted() {
  // A process must ask Linux for the tile registers (ARCH_REQ_XCOMP_PERM with XFEATURE_XTILEDATA).
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

#pragma GCC visibility push(default)
extern "C" {

int64_t qknorm_args_size() { return sizeof(QknormArgs); }
int64_t qknorm_query_part() { return QK_QUERY_PART; }
int64_t qknorm_key_part() { return QK_KEY_PART; }

void qknorm_use_threads(QknormParallelFor parallel_for) { qknorm_parallel_for = parallel_for; }

// Returns a bit field: bit i says that this processor has instruction set i of QknormIsa.
int32_t qknorm_instruction_sets() {
  __builtin_cpu_init();
  int32_t found = 0;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) found |= 1 << QK_AVX2;
  if (!(found && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")))
    return found;
  found |= 1 << QK_AVX512;
  if (!__builtin_cpu_supports("avx512bf16")) return found;
  found |= 1 << QK_AVX512_BF16;
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && amx_permitted()) found |= 1 << QK_AMX;
  return found;
}

int64_t qknorm_forward_workspace(const QknormArgs *a) { QK_DISPATCH(a->isa, workspace_forward(*a)) }
void qknorm_forward(const QknormArgs *a) { QK_DISPATCH(a->isa, run_forward(*a)) }

int64_t qknorm_backward_workspace(const QknormArgs *a) { QK_DISPATCH(a->isa, workspace_backward(*a)) }
void qknorm_backward(const QknormArgs *a) { QK_DISPATCH(a->isa, run_backward(*a)) }
}
#pragma GCC visibility pop
