#define QK_NAMESPACE qk_avx2
#include "isa.inl"
