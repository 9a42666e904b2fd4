// Attention backward. Blocks of keys are the outer loop, so that dK and dV of a block stay in cache and
// have one owner; everything is computed transposed, keys by queries:
//
//   S^T = K Q^T, dP^T = V dO^T, P^T = exp(S^T - lse), dS^T = P^T (dP^T - delta),
//   dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T.
//
// A sink is already in lse and out, so delta = rowsum(dO out) is that of the softmax with the sink.
// Units own (batch, key head, every n-th block of keys); the partial dQ of the n splits are added in a
// fixed order, and n depends on the shape alone: the same bits on any number of threads.
#pragma once

constexpr int64_t BLOCK = 64;  // of queries and of keys
constexpr int64_t WANTED_UNITS = 8;

template <class Op>
struct BackwardPlan {
  int64_t Dp, Dvp, Tqp, query_blocks, key_blocks, splits;
  // Per (b, hq, query block): operands, [BLOCK x width] each.
  Op *q_across, *q_down, *d_across, *d_down;
  float *lse2, *delta;  // [B, Hq, Tqp]; lse in log2, +inf for rows that saw nothing
  float *dq;            // [splits, B, Hq, query_blocks][Dp][BLOCK], transposed
  IdRange *query_ranges;  // [B, query_blocks]
  char *scratch;
  int64_t scratch_bytes;

  BackwardPlan(const QknormArgs &a, Arena &arena) {
    Dp = round_up(a.D, width_step<Op>());
    Dvp = round_up(a.Dv, width_step<Op>());
    query_blocks = (a.Tq + BLOCK - 1) / BLOCK;
    key_blocks = (a.Tk + BLOCK - 1) / BLOCK;
    Tqp = query_blocks * BLOCK;
    splits = std::max<int64_t>(1, std::min(key_blocks, (WANTED_UNITS + a.B * a.Hk - 1) / (a.B * a.Hk)));
    const int64_t rows = a.B * a.Hq * Tqp;
    q_across = arena.take<Op>(rows * Dp);
    q_down = arena.take<Op>(rows * Dp);
    d_across = arena.take<Op>(rows * Dvp);
    d_down = arena.take<Op>(rows * Dvp);
    lse2 = arena.take<float>(rows);
    delta = arena.take<float>(rows);
    dq = arena.take<float>(splits * rows * Dp);
    query_ranges = arena.take<IdRange>(a.query_ids ? a.B * query_blocks : 0);
    Arena one{nullptr};
    thread_scratch(one);
    scratch_bytes = round_up(one.used, 4096);
    scratch = arena.take<char>(scratch_bytes * std::max<int64_t>(1, a.threads));
  }

  struct Scratch {
    Op *k, *k_t, *v, *p, *ds, *ds_down;
    float *s, *dp, *dk, *dv, *rows, *raw;
  };
  Scratch thread_scratch(Arena &one) const {
    Scratch s;
    s.k = one.take<Op>(BLOCK * Dp);
    s.k_t = one.take<Op>(BLOCK * Dp);
    s.v = one.take<Op>(BLOCK * Dvp);
    s.p = one.take<Op>(BLOCK * BLOCK);
    s.ds = one.take<Op>(BLOCK * BLOCK);
    s.ds_down = one.take<Op>(BLOCK * BLOCK);
    s.s = one.take<float>(BLOCK * BLOCK);
    s.dp = one.take<float>(BLOCK * BLOCK);
    s.dk = one.take<float>(BLOCK * Dp);
    s.dv = one.take<float>(BLOCK * Dvp);
    s.rows = one.take<float>(BLOCK * std::max(Dp, Dvp));
    s.raw = one.take<float>(BLOCK * std::max(Dp, Dvp));
    return s;
  }
  Scratch of_thread(int64_t thread) const {
    Arena one{scratch + thread * scratch_bytes};
    return thread_scratch(one);
  }
};

// Operands of one block of queries; delta, lse and the sink's gradient.
template <class In, class Op>
static void prepare_queries(const QknormArgs &a, const BackwardPlan<Op> &plan, int64_t unit, int64_t thread) {
  const auto w = plan.of_thread(thread);
  const int64_t qb = unit % plan.query_blocks, bh = unit / plan.query_blocks, b = bh / a.Hq, h = bh % a.Hq;
  const int64_t q0 = qb * BLOCK, n = std::min(BLOCK, a.Tq - q0), Dp = plan.Dp, Dvp = plan.Dvp;
  load_hats<In>(w.rows, a, true, b, h, q0, n, BLOCK, Dp);
  pack_across(plan.q_across + unit * BLOCK * Dp, w.rows, Dp, BLOCK, Dp);
  pack_down(plan.q_down + unit * BLOCK * Dp, w.rows, Dp, BLOCK, Dp);

  const In *d_base = (const In *)a.d_out + b * a.d_out_stride[0] + h * a.d_out_stride[1];
  const In *out = (const In *)a.out + (bh * a.Tq + q0) * a.Dv;
  float *delta = plan.delta + bh * plan.Tqp + q0, *lse2 = plan.lse2 + bh * plan.Tqp + q0;
  const float *lse = a.lse + bh * a.Tq + q0;
  memset(w.rows, 0, BLOCK * Dvp * sizeof(float));
  for (int64_t i = 0; i < BLOCK; i++) {
    delta[i] = 0.0f;
    lse2[i] = INFINITY;
    if (i >= n) continue;
    float *d = w.rows + i * Dvp;
    row_to_float(d, d_base + (q0 + i) * a.d_out_stride[2], a.Dv, Dvp);
    row_to_float(w.raw, out + i * a.Dv, a.Dv, Dvp);
    Vec dot = Vec::set(0.0f);
    for (int64_t c = 0; c < Dvp; c += 16) dot = fma(Vec::load(d + c), Vec::load(w.raw + c), dot);
    delta[i] = sum(dot);
    if (lse[i] != -INFINITY) lse2[i] = lse[i] * 1.44269504088896341f;
  }
  pack_across(plan.d_across + unit * BLOCK * Dvp, w.rows, Dvp, BLOCK, Dvp);
  pack_down(plan.d_down + unit * BLOCK * Dvp, w.rows, Dvp, BLOCK, Dvp);
  if (a.query_ids && h == 0) plan.query_ranges[b * plan.query_blocks + qb] = id_range(a.query_ids + b * a.Tq + q0, n);
}

// A^T of a row-major block: [K][rows].
static void transpose_rows(float *out, const float *in, int64_t ld, int64_t rows, int64_t K) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < K; k++) out[k * rows + r] = in[r * ld + k];
}
static void transpose_rows(uint16_t *out, const float *in, int64_t ld, int64_t rows, int64_t K) {
  alignas(64) uint16_t narrow[512];
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t k = 0; k < K; k += 16) to_bf16(narrow + k, Vec::load(in + r * ld + k));
    for (int64_t k = 0; k < K; k++) out[k * rows + r] = narrow[k];
  }
}

// Two rows of dS^T (keys j, j + 1) into B with K along the keys.
static inline void store_down(float *out, int64_t j, int64_t i, Vec a, Vec b) {
  a.store(out + (i / 16) * 16 * BLOCK + 16 * j);
  b.store(out + (i / 16) * 16 * BLOCK + 16 * (j + 1));
}
#if defined(QK_USE_BF16)
static inline void store_down(uint16_t *out, int64_t j, int64_t i, Vec a, Vec b) {
  // cvtne2ps puts b's lanes above a's; this order puts the two keys of one query side by side.
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v);
  _mm512_storeu_si512(out + (i / 16) * 16 * BLOCK + 16 * j,
                      _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}
#endif

// Which of the 16 queries at `i` may see key `key`.
static inline Mask visible_queries(const Positions &at, int64_t key, int64_t q0, int64_t i, int64_t Tq,
                                   const int32_t *query_ids, int32_t key_id) {
  const Vec query = Vec::ramp((float)i);
  const float first = (float)(at.first_query(key, Tq) - q0), last = (float)(at.last_query(key, Tq) - q0);
  Mask keep = less_equal(Vec::set(first), query) & less(query, Vec::set(last));
  if (query_ids) keep = keep & equal_ids(query_ids + i, key_id < 0 ? INT32_MIN : key_id);
  return keep;
}

// P^T and dS^T of one block pair from its S^T and dP^T.
template <class Op>
static void score_gradients(const QknormArgs &a, const typename BackwardPlan<Op>::Scratch &w, const Positions &at,
                            int64_t b, int64_t k0, int64_t keys, int64_t q0, int64_t queries, const float *lse2,
                            const float *delta, bool partial, bool by_ids) {
  const Vec c = Vec::set(std::fabs((float)a.scale) * 1.44269504088896341f), zero = Vec::set(0.0f);
  alignas(64) int32_t ids[BLOCK];
  if (by_ids)
    for (int64_t i = 0; i < BLOCK; i++) ids[i] = i < queries ? a.query_ids[b * a.Tq + q0 + i] : -1;
  for (int64_t j = 0; j < BLOCK; j += 2) {
    for (int64_t i = 0; i < BLOCK; i += 16) {
      const Vec l = Vec::load(lse2 + i), d = Vec::load(delta + i);
      Vec ds[2];
      for (int64_t r = 0; r < 2; r++) {
        const int64_t at_row = (j + r) * BLOCK + i;
        Vec p = exp2(fma(Vec::load(w.s + at_row), c, zero - l));
        ds[r] = p * (Vec::load(w.dp + at_row) - d);
        if (partial) {
          const bool real = j + r < keys;
          const int64_t key = k0 + j + r;
          Mask keep = visible_queries(at, real ? key : 0, q0, i, a.Tq, by_ids ? ids : nullptr,
                                      by_ids && real ? a.key_ids[b * a.Tk + key] : 0);
          p = real ? choose(keep, p, zero) : zero;
          ds[r] = real ? choose(keep, ds[r], zero) : zero;
        }
        store16(w.p + at_row, p);
        store16(w.ds + at_row, ds[r]);
      }
      store_down(w.ds_down, j, i, ds[0], ds[1]);
    }
  }
}

// From the gradient of a block of hats, [n][Dp] in w.rows, to that of the raw rows, and d_gain [D].
template <class In>
static void finish_rows(const QknormArgs &a, float *rows, float *raw, bool is_query, int64_t b, int64_t h, int64_t lo,
                        int64_t n, int64_t Dp, float factor, In *out, float *d_gain) {
  const int64_t *stride = is_query ? a.q_stride : a.k_stride;
  const In *base = (const In *)(is_query ? a.q : a.k) + b * stride[0] + h * stride[1];
  const float *gains = is_query ? a.q_gain : a.k_gain;
  const int64_t off = is_query ? a.Tk - a.Tq : 0, half = a.R / 2;
  for (int64_t i = 0; i < n; i++) {
    float *dy = rows + i * Dp;
    for (int64_t c = 0; c < Dp; c += 16) (Vec::load(dy + c) * Vec::set(factor)).store(dy + c);
    row_to_float(raw, base + (lo + i) * stride[2], a.D, Dp);
    const int64_t angle = b * a.rope_stride + (lo + i + off) * half;
    const NormRope spec{gains ? gains + h * a.D : nullptr, (float)a.eps,
                        a.rope ? a.cos + angle : nullptr, a.rope ? a.sin + angle : nullptr,
                        a.D, a.R, a.rope == QK_INTERLEAVED};
    norm_rope_backward(dy, raw, spec, Dp, d_gain);
    float_to_row(out + i * a.D, dy, a.D);
  }
}

// dK and dV of one block of keys, over all queries of the group that see it.
template <class In, class Op>
static void backward_keys(const QknormArgs &a, const BackwardPlan<Op> &plan, int64_t b, int64_t hk, int64_t kb,
                          int64_t split, int64_t thread) {
  const auto w = plan.of_thread(thread);
  const int64_t Dp = plan.Dp, Dvp = plan.Dvp, G = a.Hq / a.Hk, k0 = kb * BLOCK, n = std::min(BLOCK, a.Tk - k0);
  const Positions at = positions(a);
  const IdRange ids = a.key_ids ? id_range(a.key_ids + b * a.Tk + k0, n) : IdRange{};
  load_hats<In>(w.rows, a, false, b, hk, k0, n, BLOCK, Dp);
  if (a.scale < 0)
    for (int64_t i = 0; i < BLOCK * Dp; i++) w.rows[i] = -w.rows[i];
  pack_rows(w.k, w.rows, Dp, BLOCK, Dp);
  transpose_rows(w.k_t, w.rows, Dp, BLOCK, Dp);
  load_values<In>(w.rows, a, b, hk, k0, n, BLOCK, Dvp);
  pack_rows(w.v, w.rows, Dvp, BLOCK, Dvp);
  memset(w.dk, 0, BLOCK * Dp * sizeof(float));
  memset(w.dv, 0, BLOCK * Dvp * sizeof(float));

  const int64_t first = at.first_query(k0, a.Tq), last = at.last_query(k0 + n - 1, a.Tq);
  for (int64_t hq = hk * G; hq < (hk + 1) * G; hq++) {
    for (int64_t qb = first / BLOCK; qb * BLOCK < last; qb++) {
      const int64_t q0 = qb * BLOCK, queries = std::min(BLOCK, a.Tq - q0);
      bool by_ids = false;
      if (a.key_ids) {
        const IdRange &range = plan.query_ranges[b * plan.query_blocks + qb];
        if (!ids.meets(range)) continue;
        by_ids = !ids.uniform_with(range);
      }
      const bool partial = by_ids || n < BLOCK || at.first_query(k0 + n - 1, a.Tq) > q0 ||
                           at.last_query(k0, a.Tq) < q0 + queries;
      const int64_t bh = b * a.Hq + hq, block = bh * plan.query_blocks + qb;
      gemm(w.s, BLOCK, w.k, Dp, plan.q_across + block * BLOCK * Dp, BLOCK, BLOCK, Dp, false);
      gemm(w.dp, BLOCK, w.v, Dvp, plan.d_across + block * BLOCK * Dvp, BLOCK, BLOCK, Dvp, false);
      score_gradients<Op>(a, w, at, b, k0, n, q0, queries, plan.lse2 + bh * plan.Tqp + q0,
                          plan.delta + bh * plan.Tqp + q0, partial, by_ids);
      gemm(w.dv, Dvp, w.p, BLOCK, plan.d_down + block * BLOCK * Dvp, BLOCK, Dvp, BLOCK, true);
      gemm(w.dk, Dp, w.ds, BLOCK, plan.q_down + block * BLOCK * Dp, BLOCK, Dp, BLOCK, true);
      float *dq = plan.dq + ((split * a.B * a.Hq + bh) * plan.query_blocks + qb) * BLOCK * Dp;
      gemm(dq, BLOCK, w.k_t, BLOCK, w.ds_down, Dp, BLOCK, BLOCK, true);
    }
  }

  const int64_t row0 = (b * a.Hk + hk) * a.Tk + k0;
  float *d_gain = a.dk_gain ? a.dk_gain + ((b * plan.key_blocks + kb) * a.Hk + hk) * a.D : nullptr;
  if (d_gain) memset(d_gain, 0, a.D * sizeof(float));
  finish_rows<In>(a, w.dk, w.raw, false, b, hk, k0, n, Dp, (float)a.scale, (In *)a.dk + row0 * a.D, d_gain);
  for (int64_t i = 0; i < n; i++) float_to_row((In *)a.dv + (row0 + i) * a.Dv, w.dv + i * Dvp, a.Dv);
}

// dQ of one block of queries: the splits added up, turned back, through norm and RoPE.
template <class In, class Op>
static void finish_queries(const QknormArgs &a, const BackwardPlan<Op> &plan, int64_t unit, int64_t thread) {
  const auto w = plan.of_thread(thread);
  const int64_t qb = unit % plan.query_blocks, bh = unit / plan.query_blocks, b = bh / a.Hq, h = bh % a.Hq;
  const int64_t q0 = qb * BLOCK, n = std::min(BLOCK, a.Tq - q0), Dp = plan.Dp;
  float *first = plan.dq + unit * BLOCK * Dp;
  for (int64_t s = 1; s < plan.splits; s++) {
    const float *other = first + s * a.B * a.Hq * plan.Tqp * Dp;
    for (int64_t i = 0; i < BLOCK * Dp; i += 16) (Vec::load(first + i) + Vec::load(other + i)).store(first + i);
  }
  transpose_rows(w.rows, first, BLOCK, Dp, BLOCK);
  float *d_gain = a.dq_gain ? a.dq_gain + ((b * plan.query_blocks + qb) * a.Hq + h) * a.D : nullptr;
  if (d_gain) memset(d_gain, 0, a.D * sizeof(float));
  // w.k_t held -K where the scale is negative: dQ carries the sign already.
  finish_rows<In>(a, w.rows, w.raw, true, b, h, q0, n, Dp, std::fabs((float)a.scale),
                  (In *)a.dq + (bh * a.Tq + q0) * a.D, d_gain);
}

template <class Op>
static void sink_gradient(const QknormArgs &a, const BackwardPlan<Op> &plan, int64_t bh) {
  const float sink = a.sink[bh % a.Hq];
  double total = 0.0;
  for (int64_t i = 0; i < a.Tq; i++) {
    const float lse = a.lse[bh * a.Tq + i];
    if (lse != -INFINITY) total -= (double)std::exp(sink - lse) * plan.delta[bh * plan.Tqp + i];
  }
  a.d_sink[bh] = (float)total;
}

template <class In, class Op>
static void backward(const QknormArgs &a) {
  Arena arena{(char *)a.workspace};
  const BackwardPlan<Op> plan(a, arena);
  const int64_t heads = a.B * a.Hq, query_units = heads * plan.query_blocks;
  for_units(query_units, a.threads,
            [&](int64_t unit, int64_t thread) { prepare_queries<In, Op>(a, plan, unit, thread); });
  if (a.sink && a.d_sink)
    for (int64_t bh = 0; bh < heads; bh++) sink_gradient(a, plan, bh);
  memset(plan.dq, 0, plan.splits * query_units * BLOCK * plan.Dp * sizeof(float));
  for_units(a.B * a.Hk * plan.splits, a.threads, [&](int64_t unit, int64_t thread) {
    const int64_t split = unit % plan.splits, bh = unit / plan.splits;
    for (int64_t kb = split; kb < plan.key_blocks; kb += plan.splits)
      backward_keys<In, Op>(a, plan, bh / a.Hk, bh % a.Hk, kb, split, thread);
  });
  for_units(query_units, a.threads,
            [&](int64_t unit, int64_t thread) { finish_queries<In, Op>(a, plan, unit, thread); });
}

template <class Op>
static int64_t backward_workspace(const QknormArgs &a) {
  Arena arena{nullptr};
  const BackwardPlan<Op> plan(a, arena);
  return arena.used + 64;
}
