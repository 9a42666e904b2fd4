// Attention forward: keys and values are normalised, rotated and packed once per key head, then every
// block of queries streams over the blocks of keys that it may see.
//
// Per row, in units of log2: m the largest raw logit, l = sum 2^(x), t = sum 2^(x) x with
// x = (logit - m) log2(e). The entropy is ln(l) - ln(2) t / l, which does not cancel at large logits.
#pragma once

template <class Op>
struct ForwardPlan {
  int64_t Dp, Dvp, Tkp, key_blocks, query_blocks;
  Op *keys, *values;   // [B, Hk, key_blocks] blocks: [KEY_BLOCK x Dp] across, [KEY_BLOCK x Dvp] down
  IdRange *key_ranges;  // [B, key_blocks]
  char *scratch;       // per thread
  int64_t scratch_bytes;

  ForwardPlan(const QknormArgs &a, Arena &arena) {
    Dp = round_up(a.D, width_step<Op>());
    Dvp = round_up(a.Dv, 16);
    Tkp = round_up(a.Tk, KEY_BLOCK);
    key_blocks = Tkp / KEY_BLOCK;
    query_blocks = (a.Tq + QUERY_BLOCK - 1) / QUERY_BLOCK;
    keys = arena.take<Op>(a.B * a.Hk * Tkp * Dp);
    values = arena.take<Op>(a.B * a.Hk * Tkp * Dvp);
    key_ranges = arena.take<IdRange>(a.key_ids ? a.B * key_blocks : 0);
    Arena one{nullptr};
    thread_scratch(one);
    scratch_bytes = round_up(one.used, 4096);
    scratch = arena.take<char>(scratch_bytes * std::max<int64_t>(1, a.threads));
  }

  struct Scratch {
    Op *q, *p;
    float *s, *o, *rows, *m, *l, *t;
  };
  Scratch thread_scratch(Arena &one) const {
    Scratch s;
    s.q = one.take<Op>(QUERY_BLOCK * Dp);
    s.p = one.take<Op>(QUERY_BLOCK * KEY_BLOCK);
    s.s = one.take<float>(QUERY_BLOCK * KEY_BLOCK);
    s.o = one.take<float>(QUERY_BLOCK * Dvp);
    s.rows = one.take<float>(std::max(KEY_BLOCK, QUERY_BLOCK) * std::max(Dp, Dvp));
    s.m = one.take<float>(QUERY_BLOCK);
    s.l = one.take<float>(16 * QUERY_BLOCK);  // by lane, added up at the end
    s.t = one.take<float>(16 * QUERY_BLOCK);
    return s;
  }
  Scratch of_thread(int64_t thread) const {
    Arena one{scratch + thread * scratch_bytes};
    return thread_scratch(one);
  }
};

// Rows [lo, lo + n) of q or k at (b, h), normalised and rotated, to fp32 [n_padded][Dp]; the rest zero.
template <class In>
static void load_hats(float *out, const QknormArgs &a, bool is_query, int64_t b, int64_t h, int64_t lo, int64_t n,
                      int64_t padded_rows, int64_t Dp) {
  const int64_t *stride = is_query ? a.q_stride : a.k_stride;
  const In *base = (const In *)(is_query ? a.q : a.k) + b * stride[0] + h * stride[1];
  const float *gains = is_query ? a.q_gain : a.k_gain;
  const int64_t off = is_query ? a.Tk - a.Tq : 0, half = a.R / 2;
  for (int64_t i = 0; i < n; i++) {
    row_to_float(out + i * Dp, base + (lo + i) * stride[2], a.D, Dp);
    const int64_t angle = b * a.rope_stride + (lo + i + off) * half;
    const NormRope spec{gains ? gains + h * a.D : nullptr, (float)a.eps,
                        a.rope ? a.cos + angle : nullptr, a.rope ? a.sin + angle : nullptr,
                        a.D, a.R, a.rope == QK_INTERLEAVED};
    norm_rope<In>(out + i * Dp, spec, Dp);
  }
  memset(out + n * Dp, 0, (padded_rows - n) * Dp * sizeof(float));
}

template <class In>
static void load_values(float *out, const QknormArgs &a, int64_t b, int64_t h, int64_t lo, int64_t n,
                        int64_t padded_rows, int64_t Dvp) {
  const In *base = (const In *)a.v + b * a.v_stride[0] + h * a.v_stride[1];
  for (int64_t i = 0; i < n; i++) row_to_float(out + i * Dvp, base + (lo + i) * a.v_stride[2], a.Dv, Dvp);
  memset(out + n * Dvp, 0, (padded_rows - n) * Dvp * sizeof(float));
}

// One row of scores: hides what the mask hides; returns how many keys are left.
static int64_t mask_row(float *s, int64_t width, int64_t key0, int64_t lo, int64_t hi, const int32_t *key_ids,
                        int64_t known, int32_t query_id) {
  const Vec low = Vec::set((float)(lo - key0)), high = Vec::set((float)(hi - key0));
  int64_t seen = 0;
  alignas(64) int32_t tail[16];
  for (int64_t j = 0; j < width; j += 16) {
    const Vec at = Vec::ramp((float)j);
    Mask keep = less_equal(low, at) & less(at, high);
    if (key_ids) {
      const int32_t *ids = key_ids + key0 + j;
      const int64_t left = known - (key0 + j);
      if (left < 16) {  // past the last key lies memory that is not ours
        for (int64_t i = 0; i < 16; i++) tail[i] = i < left ? ids[i] : -1;
        ids = tail;
      }
      keep = keep & equal_ids(ids, query_id < 0 ? INT32_MIN : query_id);
    }
    choose(keep, Vec::load(s + j), Vec::set(-INFINITY)).store(s + j);
    seen += count(keep);
  }
  return seen;
}

static inline void store_pair(float *p, Vec a, Vec b) {
  a.store(p);
  b.store(p + 16);
}
#if defined(QK_USE_BF16)
static inline void store_pair(uint16_t *p, Vec a, Vec b) { to_bf16_pair(p, a, b); }
#endif

// p = 2^(s to_log2 + origin) of one row, and its sums into l and t, by lane.
template <bool STATS, class Op>
static inline void softmax_row(Op *p, const float *s, int64_t width, float to_log2, float origin, float *l_sum,
                               float *t_sum) {
  const Vec c = Vec::set(to_log2), o = Vec::set(origin), floor = Vec::set(-160.0f);
  Vec l0 = Vec::load(l_sum), l1 = Vec::set(0.0f), t0 = Vec::load(t_sum), t1 = Vec::set(0.0f);
  for (int64_t j = 0; j < width; j += 32) {
    const Vec x0 = fma(Vec::load(s + j), c, o), x1 = fma(Vec::load(s + j + 16), c, o);
    const Vec e0 = exp2(x0), e1 = exp2(x1);
    l0 = l0 + e0;
    l1 = l1 + e1;
    if (STATS) {  // a hidden x is -inf, and 0 * -inf is NaN
      t0 = fma(e0, max(floor, x0), t0);
      t1 = fma(e1, max(floor, x1), t1);
    }
    store_pair(p + j, e0, e1);
  }
  (l0 + l1).store(l_sum);
  if (STATS) (t0 + t1).store(t_sum);
}

template <class In, class Op>
static void forward_block(const QknormArgs &a, const ForwardPlan<Op> &plan, int64_t b, int64_t hq, int64_t qb,
                          int64_t thread) {
  const auto w = plan.of_thread(thread);
  const int64_t Dp = plan.Dp, Dvp = plan.Dvp, hk = hq / (a.Hq / a.Hk);
  const int64_t q0 = qb * QUERY_BLOCK, n = std::min(QUERY_BLOCK, a.Tq - q0), rows = round_up(n, 16);
  const Positions at = positions(a);
  const float scale = std::fabs((float)a.scale), to_log2 = scale * 1.44269504088896341f;
  const bool stats = a.row_max != nullptr;
  const int32_t *query_ids = a.query_ids ? a.query_ids + b * a.Tq + q0 : nullptr;
  const IdRange ids = query_ids ? id_range(query_ids, n) : IdRange{};
  int64_t visible[QUERY_BLOCK] = {};

  load_hats<In>(w.rows, a, true, b, hq, q0, n, rows, Dp);
  if (a.scale < 0)
    for (int64_t i = 0; i < rows * Dp; i++) w.rows[i] = -w.rows[i];
  pack_rows(w.q, w.rows, Dp, rows, Dp);
  for (int64_t i = 0; i < rows; i++) w.m[i] = -INFINITY;
  memset(w.l, 0, 16 * rows * sizeof(float));
  memset(w.t, 0, 16 * rows * sizeof(float));
  memset(w.o, 0, rows * Dvp * sizeof(float));

  const int64_t lowest = at.lo(q0), highest = at.hi(q0 + n - 1);
  for (int64_t kb = lowest / KEY_BLOCK; kb * KEY_BLOCK < highest; kb++) {
    const int64_t key0 = kb * KEY_BLOCK, key1 = std::min(key0 + KEY_BLOCK, a.Tk);
    const int64_t width = round_up(std::min(key1, highest) - key0, 32);
    bool by_ids = false;
    if (query_ids) {
      const IdRange &range = plan.key_ranges[b * plan.key_blocks + kb];
      if (!ids.meets(range)) continue;
      by_ids = !ids.uniform_with(range);
    }
    const bool partial = by_ids || at.lo(q0 + n - 1) > key0 || at.hi(q0) < key0 + width || key1 < key0 + width;
    const int64_t block = (b * a.Hk + hk) * plan.key_blocks + kb;
    gemm(w.s, KEY_BLOCK, w.q, Dp, plan.keys + block * KEY_BLOCK * Dp, rows, width, Dp, false);

    for (int64_t i = 0; i < n; i++) {
      float *s = w.s + i * KEY_BLOCK;
      if (partial)
        visible[i] += mask_row(s, width, key0, at.lo(q0 + i), at.hi(q0 + i), by_ids ? a.key_ids + b * a.Tk : nullptr,
                               a.Tk, by_ids ? query_ids[i] : 0);
      else
        visible[i] += width;
      Vec top = Vec::load(s), top2 = Vec::load(s + 16);
      for (int64_t j = 32; j < width; j += 32) {
        top = max(top, Vec::load(s + j));
        top2 = max(top2, Vec::load(s + j + 16));
      }
      top = max(top, top2);
      const float m_old = w.m[i];
      float m = m_old;
      if (any(less(Vec::set(m_old), top))) {
        w.m[i] = m = largest(top);
        if (m_old != -INFINITY) {
          const float shift = (m_old - m) * to_log2, shrink = std::exp2(shift);
          const Vec l = Vec::load(w.l + 16 * i), t = Vec::load(w.t + 16 * i);
          (Vec::set(shrink) * fma(l, Vec::set(shift), t)).store(w.t + 16 * i);
          (Vec::set(shrink) * l).store(w.l + 16 * i);
          float *o = w.o + i * Dvp;
          for (int64_t c = 0; c < Dvp; c += 16) (Vec::load(o + c) * Vec::set(shrink)).store(o + c);
        }
      }
      const float origin = m == -INFINITY ? 0.0f : -m * to_log2;
      Op *p = w.p + i * KEY_BLOCK;
      if (stats)
        softmax_row<true>(p, s, width, to_log2, origin, w.l + 16 * i, w.t + 16 * i);
      else
        softmax_row<false>(p, s, width, to_log2, origin, w.l + 16 * i, w.t + 16 * i);
    }
    for (int64_t i = n; i < rows; i++) memset((void *)(w.p + i * KEY_BLOCK), 0, width * sizeof(Op));
    gemm(w.o, Dvp, w.p, KEY_BLOCK, plan.values + block * KEY_BLOCK * Dvp, rows, Dvp, width, true, 16 * KEY_BLOCK);
  }

  In *out = (In *)a.out + ((b * a.Hq + hq) * a.Tq + q0) * a.Dv;
  const int64_t row0 = (b * a.Hq + hq) * a.Tq + q0;
  for (int64_t i = 0; i < n; i++) {
    const float l = sum(Vec::load(w.l + 16 * i)), t = sum(Vec::load(w.t + 16 * i));
    const bool seen = visible[i] > 0;
    // A row of NaN never raises the maximum above -inf: say NaN, not "saw nothing".
    const float top = !seen ? -INFINITY : std::isnan(l) ? NAN : w.m[i] * scale, log_sum = std::log(l);
    float lse = seen ? top + log_sum : -INFINITY, keep = seen ? 1.0f / l : 0.0f;
    if (a.sink) {
      const float sink = a.sink[hq], high = std::max(lse, sink);
      const float total = high == -INFINITY ? high : high + std::log(std::exp(lse - high) + std::exp(sink - high));
      keep = seen ? keep * std::exp(lse - total) : 0.0f;
      lse = std::isnan(lse) ? lse : total;
    }
    a.lse[row0 + i] = lse;
    if (stats) {
      a.row_max[row0 + i] = top;
      a.row_log_sum[row0 + i] = seen ? log_sum : -INFINITY;
      a.row_entropy[row0 + i] = seen ? std::max(0.0f, log_sum - 0.693147180559945309f * t / l) : 0.0f;
      if (std::isnan(l)) a.row_entropy[row0 + i] = NAN;
      if (hq == 0 && (b == 0 || a.key_ids)) a.visible_keys[(a.key_ids ? b * a.Tq : 0) + q0 + i] = visible[i];
    }
    float *o = w.o + i * Dvp;
    for (int64_t c = 0; c < Dvp; c += 16)
      (seen ? Vec::load(o + c) * Vec::set(keep) : Vec::set(0.0f)).store(o + c);
    float_to_row(out + i * a.Dv, o, a.Dv);
  }
}

template <class In, class Op>
static void pack_keys(const QknormArgs &a, const ForwardPlan<Op> &plan, int64_t unit, int64_t thread) {
  const auto w = plan.of_thread(thread);
  const int64_t kb = unit % plan.key_blocks, bh = unit / plan.key_blocks, b = bh / a.Hk, h = bh % a.Hk;
  const int64_t lo = kb * KEY_BLOCK, n = std::min(KEY_BLOCK, a.Tk - lo);
  load_hats<In>(w.rows, a, false, b, h, lo, n, KEY_BLOCK, plan.Dp);
  pack_across(plan.keys + unit * KEY_BLOCK * plan.Dp, w.rows, plan.Dp, KEY_BLOCK, plan.Dp);
  load_values<In>(w.rows, a, b, h, lo, n, KEY_BLOCK, plan.Dvp);
  pack_down(plan.values + unit * KEY_BLOCK * plan.Dvp, w.rows, plan.Dvp, KEY_BLOCK, plan.Dvp);
  if (a.key_ids && h == 0) plan.key_ranges[b * plan.key_blocks + kb] = id_range(a.key_ids + b * a.Tk + lo, n);
}

template <class In, class Op>
static void forward(const QknormArgs &a) {
  Arena arena{(char *)a.workspace};
  const ForwardPlan<Op> plan(a, arena);
  for_units(a.B * a.Hk * plan.key_blocks, a.threads,
            [&](int64_t unit, int64_t thread) { pack_keys<In, Op>(a, plan, unit, thread); });
  const int64_t heads = a.B * a.Hq;
  // Last blocks first: under a causal mask they see the most.
  for_units(heads * plan.query_blocks, a.threads, [&](int64_t unit, int64_t thread) {
    const int64_t qb = plan.query_blocks - 1 - unit / heads, bh = unit % heads;
    forward_block<In, Op>(a, plan, bh / a.Hq, bh % a.Hq, qb, thread);
  });
}

template <class Op>
static int64_t forward_workspace(const QknormArgs &a) {
  Arena arena{nullptr};
  const ForwardPlan<Op> plan(a, arena);
  return arena.used + 64;
}
