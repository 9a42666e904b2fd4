#define QK_NAMESPACE qk_avx512
#define QK_USE_AVX512
#include "isa.inl"
