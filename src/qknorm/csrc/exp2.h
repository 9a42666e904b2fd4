// Coefficients of a polynomial for 2^f on [0, 1). Its relative error is 8e-8 before rounding. It is exact at 0, so
// the weights of a one-hot row sum to exactly 1.
#pragma once
#define QK_EXP2_C0 1.0f
#define QK_EXP2_C1 0.6931512951850891f
#define QK_EXP2_C2 0.24016445875167847f
#define QK_EXP2_C3 0.055799905210733414f
#define QK_EXP2_C4 0.009017041884362698f
#define QK_EXP2_C5 0.001867124461568892f
