#define QK_NAMESPACE qk_avx512_bf16
#define QK_USE_AVX512
#define QK_USE_BF16
#include "isa.inl"
