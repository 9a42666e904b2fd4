// 2^f on [-0.5, 0.5], relative error 9e-8 before rounding, exact at 0 (so that a one-hot row sums to 1).
#pragma once
#define QK_EXP2_C0 1.0f
#define QK_EXP2_C1 0.6931470036506653f
#define QK_EXP2_C2 0.24022242426872253f
#define QK_EXP2_C3 0.05550733581185341f
#define QK_EXP2_C4 0.009671506471931934f
#define QK_EXP2_C5 0.001326469937339425f
