// The backward pass of attention. The outer loop runs over blocks of keys, so dK and dV of a block stay in cache
// and one thread writes them. All products are computed transposed, with keys as rows and queries as columns:
//
//   S^T = K Q^T, dP^T = V dO^T, P^T = exp(S^T - lse), dS^T = P^T (dP^T - delta),
//   dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T.
//
// lse and out include the sink, so delta = rowsum(dO out) belongs to the softmax with the sink.
// One pass over the queries handles KEYS keys, in steps of STEP keys, so the partial dQ of a block of queries is
// read and written once for all of them. The passes of a (batch, key head) are divided into n splits, and a split
// is a unit of work. The partial dQ of the n splits are added in a fixed order, and n depends on the shape alone, so
// the result has the same bits on any number of threads.
#pragma once

constexpr int64_t QUERIES = QK_QUERY_PART, KEYS = QK_KEY_PART, STEP = 64;
constexpr int64_t WANTED_UNITS = 4;

template <class Op>
struct BackwardPlan {
  int64_t Dp, Dvp, Tqp, query_blocks, passes, splits;
  // The packed operands of each (b, hq, query block), [QUERIES x width].
  Op *q_across, *q_down, *d_across, *d_down;
  float *top, *total2, *delta;  // [B, Hq, Tqp]; the largest raw score, the log2 of the sum relative to it, and delta
  float *dq;            // [splits, B, Hq, query_blocks][Dp][QUERIES], transposed
  uint8_t *dq_begun;    // [splits, B, Hq, query_blocks]: 1 if a partial dQ has been written; 0 if it must not be read
  IdRange *query_ranges;  // [B, query_blocks]
  char *scratch;
  int64_t scratch_bytes;

  BackwardPlan(const QknormArgs &a, Arena &arena) {
    Dp = round_up(a.D, width_step<Op>());
    Dvp = round_up(a.Dv, width_step<Op>());
    query_blocks = (a.Tq + QUERIES - 1) / QUERIES;
    passes = (a.Tk + KEYS - 1) / KEYS;
    Tqp = query_blocks * QUERIES;
    splits = std::max<int64_t>(1, std::min(passes, (WANTED_UNITS + a.B * a.Hk - 1) / (a.B * a.Hk)));
    const int64_t rows = a.B * a.Hq * Tqp;
    q_across = arena.take<Op>(rows * Dp);
    q_down = arena.take<Op>(rows * Dp);
    d_across = arena.take<Op>(rows * Dvp);
    d_down = arena.take<Op>(rows * Dvp);
    top = arena.take<float>(rows);
    total2 = arena.take<float>(rows);
    delta = arena.take<float>(rows);
    dq = arena.take<float>(splits * rows * Dp);
    dq_begun = arena.take<uint8_t>(splits * a.B * a.Hq * query_blocks);
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
    s.k = one.take<Op>(KEYS * Dp);
    s.k_t = one.take<Op>(KEYS * Dp);
    s.v = one.take<Op>(KEYS * Dvp);
    s.p = one.take<Op>(STEP * QUERIES);
    s.ds = one.take<Op>(STEP * QUERIES);
    s.ds_down = one.take<Op>(KEYS * QUERIES);
    s.s = one.take<float>(STEP * QUERIES);
    s.dp = one.take<float>(STEP * QUERIES);
    s.dk = one.take<float>(KEYS * Dp);
    s.dv = one.take<float>(KEYS * Dvp);
    s.rows = one.take<float>(std::max(KEYS, QUERIES) * std::max(Dp, Dvp));
    s.raw = one.take<float>(std::max(Dp, Dvp));
    return s;
  }
  Scratch of_thread(int64_t thread) const {
    Arena one{scratch + thread * scratch_bytes};
    return thread_scratch(one);
  }
};

// Prepares one block of queries: the packed operands, delta, and both parts of lse.
template <class In, class Op>
static void prepare_queries(const QknormArgs &a, const BackwardPlan<Op> &plan, int64_t unit, int64_t thread) {
  const auto w = plan.of_thread(thread);
  const int64_t qb = unit % plan.query_blocks, bh = unit / plan.query_blocks, b = bh / a.Hq, h = bh % a.Hq;
  const int64_t q0 = qb * QUERIES, n = std::min(QUERIES, a.Tq - q0), Dp = plan.Dp, Dvp = plan.Dvp;
  load_hats<In>(w.rows, a, true, b, h, q0, n, QUERIES, Dp);
  pack_across(plan.q_across + unit * QUERIES * Dp, w.rows, Dp, QUERIES, Dp);
  pack_down(plan.q_down + unit * QUERIES * Dp, w.rows, Dp, QUERIES, Dp);

  const In *d_base = (const In *)a.d_out + b * a.d_out_stride[0] + h * a.d_out_stride[1];
  const In *out = (const In *)a.out + (bh * a.Tq + q0) * a.Dv;
  const int64_t row0 = bh * plan.Tqp + q0;
  float *delta = plan.delta + row0, *top = plan.top + row0, *total2 = plan.total2 + row0;
  const float *tops = a.lse + bh * a.Tq + q0, *log_total = tops + a.B * a.Hq * a.Tq;
  memset(w.rows, 0, QUERIES * Dvp * sizeof(float));
  for (int64_t i = 0; i < QUERIES; i++) {
    delta[i] = 0.0f;
    top[i] = 0.0f;
    total2[i] = INFINITY;  // gives weights of 0 to rows that see no key
    if (i >= n) continue;
    float *d = w.rows + i * Dvp;
    row_to_float(d, d_base + (q0 + i) * a.d_out_stride[2], a.Dv, Dvp);
    row_to_float(w.raw, out + i * a.Dv, a.Dv, Dvp);
    Vec dot = Vec::set(0.0f);
    for (int64_t c = 0; c < Dvp; c += 16) dot = fma(Vec::load(d + c), Vec::load(w.raw + c), dot);
    delta[i] = sum(dot);
    if (log_total[i] == -INFINITY) continue;
    top[i] = tops[i];
    total2[i] = log_total[i] * 1.44269504088896341f;
  }
  pack_across(plan.d_across + unit * QUERIES * Dvp, w.rows, Dvp, QUERIES, Dvp);
  pack_down(plan.d_down + unit * QUERIES * Dvp, w.rows, Dvp, QUERIES, Dvp);
}

// Transposes a row-major block [rows][K] to [K][rows].
static void transpose_rows(float *out, const float *in, int64_t ld, int64_t rows, int64_t K) {
  transpose_words(out, rows, in, ld, rows, K);
}
static void transpose_rows(uint16_t *out, const float *in, int64_t ld, int64_t rows, int64_t K) {
  alignas(64) uint16_t narrow[512];
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t k = 0; k < K; k += 16) to_bf16(narrow + k, Vec::load(in + r * ld + k));
    for (int64_t k = 0; k < K; k++) out[k * rows + r] = narrow[k];
  }
}

// Stores two rows of dS^T (keys j and j + 1 of a pass) into the operand B whose K axis is the keys.
static inline void store_down(float *out, int64_t j, int64_t i, Vec a, Vec b) {
  a.store(out + (i / 16) * 16 * KEYS + 16 * j);
  b.store(out + (i / 16) * 16 * KEYS + 16 * (j + 1));
}
#if defined(QK_USE_BF16)
static inline void store_down(uint16_t *out, int64_t j, int64_t i, Vec a, Vec b) {
  store_side_by_side(out + (i / 16) * 16 * KEYS + 16 * j, a, b);
}
#endif

// One step of keys against one block of queries.
struct Tile {
  int64_t b, j0, k0, keys, q0, i0, i1;  // j0, k0: first key in the pass, in the sequence; the queries are q0 + [i0, i1)
  bool partial, by_ids;
};

// Returns which of the 16 queries from `i` on may see the key `key`.
static inline Mask visible_queries(const Positions &at, int64_t key, int64_t q0, int64_t i, int64_t Tq,
                                   const int32_t *query_ids, int32_t key_id) {
  const Vec query = Vec::ramp((float)i);
  const float first = (float)(at.first_query(key, Tq) - q0), last = (float)(at.last_query(key, Tq) - q0);
  Mask keep = less_equal(Vec::set(first), query) & less(query, Vec::set(last));
  if (query_ids) keep = keep & equal_ids(query_ids + i, key_id < 0 ? INT32_MIN : key_id);
  return keep;
}

// Computes P^T and dS^T of a tile from its S^T and dP^T.
template <bool PARTIAL, class Op>
static void score_gradients(const QknormArgs &a, const typename BackwardPlan<Op>::Scratch &w, const Positions &at,
                            const Tile &tile, const float *top, const float *total2, const float *delta) {
  const Vec c = Vec::set(std::fabs((float)a.scale) * 1.44269504088896341f), zero = Vec::set(0.0f);
  alignas(64) int32_t ids[QUERIES];
  if (PARTIAL && tile.by_ids)
    for (int64_t i = tile.i0; i < tile.i1; i++)
      ids[i] = tile.q0 + i < a.Tq ? a.query_ids[tile.b * a.Tq + tile.q0 + i] : -1;
  for (int64_t j = 0; j < STEP; j += 2) {
    for (int64_t i = tile.i0; i < tile.i1; i += 32) {
      Vec p[2][2], ds[2][2];
      for (int64_t r = 0; r < 2; r++)
        for (int64_t h = 0; h < 2; h++) {
          const int64_t x = (j + r) * QUERIES + i + 16 * h;
          const Vec below = (Vec::load(w.s + x) - Vec::load(top + i + 16 * h)) * c;
          p[r][h] = exp2(below - Vec::load(total2 + i + 16 * h));
          ds[r][h] = p[r][h] * (Vec::load(w.dp + x) - Vec::load(delta + i + 16 * h));
          if (PARTIAL) {
            const bool real = j + r < tile.keys;
            const int64_t key = tile.k0 + j + r;
            Mask keep = visible_queries(at, real ? key : 0, tile.q0, i + 16 * h, a.Tq, tile.by_ids ? ids : nullptr,
                                        tile.by_ids && real ? a.key_ids[tile.b * a.Tk + key] : 0);
            p[r][h] = real ? choose(keep, p[r][h], zero) : zero;
            ds[r][h] = real ? choose(keep, ds[r][h], zero) : zero;
          }
        }
      for (int64_t r = 0; r < 2; r++) {
        store_pair(w.p + (j + r) * QUERIES + i, p[r][0], p[r][1]);
        store_pair(w.ds + (j + r) * QUERIES + i, ds[r][0], ds[r][1]);
      }
      for (int64_t h = 0; h < 2; h++) store_down(w.ds_down, tile.j0 + j, i + 16 * h, ds[0][h], ds[1][h]);
    }
  }
}

// Writes zeros for the queries [lo, hi) of the step at j0, in the operand B whose K axis is the keys.
template <class Op>
static void clear_down(Op *out, int64_t j0, int64_t lo, int64_t hi) {
  for (int64_t i = lo; i < hi; i += 16) memset((void *)(out + i * KEYS + 16 * j0), 0, 16 * STEP * sizeof(Op));
}

// Turns the gradients of n normalised, rotated rows, [n][Dp] in `rows`, into those of the raw rows, and adds to
// d_gain [D].
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

// Computes dK and dV of the keys of one pass, summed over all queries of the query heads of the group.
template <class In, class Op>
static void backward_keys(const QknormArgs &a, const BackwardPlan<Op> &plan, int64_t b, int64_t hk, int64_t pass,
                          int64_t split, int64_t thread) {
  const auto w = plan.of_thread(thread);
  const int64_t Dp = plan.Dp, Dvp = plan.Dvp, G = a.Hq / a.Hk, pass0 = pass * KEYS, n = std::min(KEYS, a.Tk - pass0);
  const int64_t rows = round_up(n, STEP);
  const Positions at = positions(a);
  IdRange ids[KEYS / STEP];
  for (int64_t j = 0; a.key_ids && j < n; j += STEP)
    ids[j / STEP] = id_range(a.key_ids + b * a.Tk + pass0 + j, std::min(STEP, n - j));
  load_hats<In>(w.rows, a, false, b, hk, pass0, n, rows, Dp);
  if (a.scale < 0)
    for (int64_t i = 0; i < rows * Dp; i++) w.rows[i] = -w.rows[i];
  pack_rows(w.k, w.rows, Dp, rows, Dp);
  transpose_rows(w.k_t, w.rows, Dp, rows, Dp);
  load_values<In>(w.rows, a, b, hk, pass0, n, rows, Dvp);
  pack_rows(w.v, w.rows, Dvp, rows, Dvp);
  memset(w.dk, 0, rows * Dp * sizeof(float));
  memset(w.dv, 0, rows * Dvp * sizeof(float));

  const int64_t first = at.first_query(pass0, a.Tq), last = at.last_query(pass0 + n - 1, a.Tq);
  for (int64_t hq = hk * G; hq < (hk + 1) * G; hq++) {
    for (int64_t qb = first / QUERIES; qb * QUERIES < last; qb++) {
      const int64_t q0 = qb * QUERIES, bh = b * a.Hq + hq, block = bh * plan.query_blocks + qb;
      int64_t begin = -1, end = 0;  // the range of keys of this pass that contribute to dQ
      for (int64_t j0 = 0; j0 < n; j0 += STEP) {
        Tile tile{b, j0, pass0 + j0, std::min(STEP, n - j0), q0, 0, QUERIES, false, false};
        const int64_t k_last = tile.k0 + tile.keys - 1;
        tile.i0 = std::max<int64_t>(0, at.first_query(tile.k0, a.Tq) - q0) / 32 * 32;
        tile.i1 = std::min(QUERIES, round_up(std::max<int64_t>(0, at.last_query(k_last, a.Tq) - q0), 32));
        if (a.key_ids && tile.i0 < tile.i1) {
          const IdRange &range = plan.query_ranges[b * plan.query_blocks + qb];
          if (!ids[j0 / STEP].meets(range)) tile.i1 = tile.i0;
          tile.by_ids = !ids[j0 / STEP].uniform_with(range);
        }
        if (tile.i0 >= tile.i1) {
          clear_down(w.ds_down, j0, 0, QUERIES);
          continue;
        }
        if (begin < 0) begin = j0;
        end = j0 + STEP;
        tile.partial = tile.by_ids || tile.keys < STEP || at.first_query(k_last, a.Tq) > q0 + tile.i0 ||
                       at.last_query(tile.k0, a.Tq) < std::min(a.Tq, q0 + tile.i1);
        const int64_t N = tile.i1 - tile.i0, first_panel = block * QUERIES + tile.i0;
        gemm(w.s + tile.i0, QUERIES, w.k + j0 * Dp, Dp, plan.q_across + first_panel * Dp, STEP, N, Dp, false);
        gemm(w.dp + tile.i0, QUERIES, w.v + j0 * Dvp, Dvp, plan.d_across + first_panel * Dvp, STEP, N, Dvp, false);
        const int64_t row0 = bh * plan.Tqp + q0;
        if (tile.partial)
          score_gradients<true, Op>(a, w, at, tile, plan.top + row0, plan.total2 + row0, plan.delta + row0);
        else
          score_gradients<false, Op>(a, w, at, tile, plan.top + row0, plan.total2 + row0, plan.delta + row0);
        clear_down(w.ds_down, j0, 0, tile.i0);
        clear_down(w.ds_down, j0, tile.i1, QUERIES);
        gemm(w.dv + j0 * Dvp, Dvp, w.p + tile.i0, QUERIES, plan.d_down + block * QUERIES * Dvp + 16 * tile.i0, STEP, Dvp,
             N, true, 16 * QUERIES);
        gemm(w.dk + j0 * Dp, Dp, w.ds + tile.i0, QUERIES, plan.q_down + block * QUERIES * Dp + 16 * tile.i0, STEP, Dp, N,
             true, 16 * QUERIES);
      }
      if (begin < 0) continue;
      const int64_t at_dq = split * a.B * a.Hq * plan.query_blocks + block;
      gemm(plan.dq + at_dq * QUERIES * Dp, QUERIES, w.k_t + begin, rows, w.ds_down + 16 * begin, Dp, QUERIES, end - begin,
           plan.dq_begun[at_dq] != 0, 16 * KEYS);
      plan.dq_begun[at_dq] = 1;
    }
  }

  const int64_t row0 = (b * a.Hk + hk) * a.Tk + pass0;
  float *d_gain = a.dk_gain ? a.dk_gain + ((b * plan.passes + pass) * a.Hk + hk) * a.D : nullptr;
  if (d_gain) memset(d_gain, 0, a.D * sizeof(float));
  finish_rows<In>(a, w.dk, w.raw, false, b, hk, pass0, n, Dp, (float)a.scale, (In *)a.dk + row0 * a.D, d_gain);
  for (int64_t i = 0; i < n; i++) float_to_row((In *)a.dv + (row0 + i) * a.Dv, w.dv + i * Dvp, a.Dv);
}

// Computes dQ of one block of queries: adds the splits, transposes the sum, and goes back through RoPE and norm.
template <class In, class Op>
static void finish_queries(const QknormArgs &a, const BackwardPlan<Op> &plan, int64_t unit, int64_t thread) {
  const auto w = plan.of_thread(thread);
  const int64_t qb = unit % plan.query_blocks, bh = unit / plan.query_blocks, b = bh / a.Hq, h = bh % a.Hq;
  const int64_t q0 = qb * QUERIES, n = std::min(QUERIES, a.Tq - q0), Dp = plan.Dp, units = a.B * a.Hq * plan.query_blocks;
  float *first = plan.dq + unit * QUERIES * Dp;
  if (!plan.dq_begun[unit]) memset(first, 0, QUERIES * Dp * sizeof(float));
  for (int64_t s = 1; s < plan.splits; s++) {
    if (!plan.dq_begun[s * units + unit]) continue;
    const float *other = first + s * units * QUERIES * Dp;
    for (int64_t i = 0; i < QUERIES * Dp; i += 16) (Vec::load(first + i) + Vec::load(other + i)).store(first + i);
  }
  transpose_rows(w.rows, first, QUERIES, Dp, QUERIES);
  float *d_gain = a.dq_gain ? a.dq_gain + ((b * plan.query_blocks + qb) * a.Hq + h) * a.D : nullptr;
  if (d_gain) memset(d_gain, 0, a.D * sizeof(float));
  // For a negative scale w.k_t held -K, so dQ has the right sign already.
  finish_rows<In>(a, w.rows, w.raw, true, b, h, q0, n, Dp, std::fabs((float)a.scale),
                  (In *)a.dq + (bh * a.Tq + q0) * a.D, d_gain);
}

template <class Op>
static void sink_gradient(const QknormArgs &a, const BackwardPlan<Op> &plan, int64_t bh) {
  const float sink = a.sink[bh % a.Hq];
  double total = 0.0;
  for (int64_t i = 0; i < a.Tq; i++) {
    const float top = a.lse[bh * a.Tq + i], log_total = a.lse[(a.B * a.Hq + bh) * a.Tq + i];
    if (log_total != -INFINITY)
      total -= (double)std::exp(sink - top * std::fabs((float)a.scale) - log_total) * plan.delta[bh * plan.Tqp + i];
  }
  a.d_sink[bh] = (float)total;
}

template <class In, class Op>
static void backward(const QknormArgs &a) {
  Arena arena{(char *)a.workspace};
  const BackwardPlan<Op> plan(a, arena);
  const int64_t heads = a.B * a.Hq, query_units = heads * plan.query_blocks;
  memset(plan.dq_begun, 0, plan.splits * query_units);
  for (int64_t i = 0; a.query_ids && i < a.B * plan.query_blocks; i++) {
    const int64_t b = i / plan.query_blocks, lo = i % plan.query_blocks * QUERIES;
    plan.query_ranges[i] = id_range(a.query_ids + b * a.Tq + lo, std::min(QUERIES, a.Tq - lo));
  }
  const auto keys = [&](int64_t group, int64_t split, int64_t thread) {
    for (int64_t round = 0; round * plan.splits < plan.passes; round++) {
      // The order of the splits alternates: under a causal mask early keys have more queries and take longer.
      const int64_t pass = round * plan.splits + (round % 2 ? plan.splits - 1 - split : split);
      if (pass < plan.passes) backward_keys<In, Op>(a, plan, group / a.Hk, group % a.Hk, pass, split, thread);
    }
  };
  const int64_t groups = a.B * a.Hk;
  if (groups >= ENOUGH_GROUPS * a.threads && plan.splits == 1) {
    const int64_t per_group = query_units / groups;
    for_units(groups, a.threads, [&](int64_t group, int64_t thread) {
      for (int64_t i = 0; i < per_group; i++) prepare_queries<In, Op>(a, plan, group * per_group + i, thread);
      keys(group, 0, thread);
      for (int64_t i = 0; i < per_group; i++) finish_queries<In, Op>(a, plan, group * per_group + i, thread);
    });
  } else {
    for_units(query_units, a.threads,
              [&](int64_t unit, int64_t thread) { prepare_queries<In, Op>(a, plan, unit, thread); });
    for_units(groups * plan.splits, a.threads,
              [&](int64_t unit, int64_t thread) { keys(unit / plan.splits, unit % plan.splits, thread); });
    for_units(query_units, a.threads,
              [&](int64_t unit, int64_t thread) { finish_queries<In, Op>(a, plan, unit, thread); });
  }
  for (int64_t bh = 0; a.sink && a.d_sink && bh < heads; bh++) sink_gradient(a, plan, bh);
}

template <class Op>
static int64_t backward_workspace(const QknormArgs &a) {
  Arena arena{nullptr};
  const BackwardPlan<Op> plan(a, arena);
  return arena.used + 64;
}
