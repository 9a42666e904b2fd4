#define QK_NAMESPACE qk_amx
#define QK_USE_AVX512
#define QK_USE_BF16
#define QK_USE_AMX
#include "isa.inl"
