// Online softmax. A block of queries takes in one block of keys after the other: scores, mask, running softmax, and
// product with the values. Then each row is finished with the sink, the output and the statistics.
//
// The running values of a row are m, the largest raw score (q.k before scaling, with the sign of the scale), and
// the sums l = sum 2^x and t = sum 2^x x with x = (score - m) |scale| log2(e). The entropy is ln(l) - ln(2) t / l,
// which loses no digits to cancellation at large logits.
#pragma once

constexpr int64_t MAX_ROWS = 128;  // the largest number of rows of a block of queries

// The scratch memory of a thread for one block of queries.
template <class Op>
struct RowScratch {
  Op *q, *p;                  // [rows x Dp], [rows x key_block]
  float *s, *o;               // [rows x key_block], [rows x Dvp]
  float *hats;                // rows of q, k or v in fp32, before they are packed
  float *m, *l, *t;           // m is [rows]; l and t are [rows x 16], a sum per lane, added up at the end
  int64_t *visible, *query;   // [rows]: number of visible keys so far, and the index of the query

  RowScratch(Arena &arena, int64_t rows, int64_t key_block, int64_t Dp, int64_t Dvp) {
    q = arena.take<Op>(rows * Dp);
    p = arena.take<Op>(rows * key_block);
    s = arena.take<float>(rows * key_block);
    o = arena.take<float>(rows * Dvp);
    hats = arena.take<float>(std::max(key_block, rows) * std::max(Dp, Dvp));
    m = arena.take<float>(rows);
    l = arena.take<float>(16 * rows);
    t = arena.take<float>(16 * rows);
    visible = arena.take<int64_t>(rows);
    query = arena.take<int64_t>(rows);
  }
  void clear(int64_t rows, int64_t Dvp) {
    for (int64_t i = 0; i < rows; i++) m[i] = -INFINITY, visible[i] = 0;
    memset(l, 0, 16 * rows * sizeof(float));
    memset(t, 0, 16 * rows * sizeof(float));
    memset(o, 0, rows * Dvp * sizeof(float));
  }
};

// The keys [key0, key0 + width) of one batch entry, packed. `partial` says that not all rows see all of them, and
// `by_ids` that the ids decide it as well.
template <class Op>
struct KeyBlock {
  const Op *keys, *values;
  int64_t key0, width, stride;  // stride: number of keys in a packed block
  bool partial, by_ids;
};

// Loads the rows [lo, lo + n) of q or k at (b, h), normalised and rotated, as fp32 [padded_rows][Dp]. The other
// entries become 0.
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

// Loads queries and multiplies them by the sign of the scale. After that only |scale| is used.
template <class In>
static void load_queries(float *out, const QknormArgs &a, int64_t b, int64_t h, int64_t lo, int64_t n,
                         int64_t padded_rows, int64_t Dp) {
  load_hats<In>(out, a, true, b, h, lo, n, padded_rows, Dp);
  if (a.scale < 0)
    for (int64_t i = 0; i < n * Dp; i++) out[i] = -out[i];
}

template <class In>
static void load_values(float *out, const QknormArgs &a, int64_t b, int64_t h, int64_t lo, int64_t n,
                        int64_t padded_rows, int64_t Dvp) {
  const In *base = (const In *)a.v + b * a.v_stride[0] + h * a.v_stride[1];
  for (int64_t i = 0; i < n; i++) row_to_float(out + i * Dvp, base + (lo + i) * a.v_stride[2], a.Dv, Dvp);
  memset(out + n * Dvp, 0, (padded_rows - n) * Dvp * sizeof(float));
}

// Sets hidden scores of one row to -inf, and returns the number of visible keys.
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
      if (left < 16) {  // the array of ids ends here
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

// Computes p = 2^((s - origin) to_log2) of one row and adds it to the sums l and t of each lane. MASKED says that
// some s may be -inf. The difference is taken before the product: s to_log2 - origin to_log2 would have an error
// of half an ulp of the largest logit.
template <bool STATS, bool MASKED, class Op>
static inline void softmax_row(Op *p, const float *s, int64_t width, float to_log2, float origin, float *l_sum,
                               float *t_sum) {
  const Vec c = Vec::set(to_log2), o = Vec::set(origin), floor = Vec::set(-160.0f);
  Vec l0 = Vec::load(l_sum), l1 = Vec::set(0.0f), t0 = Vec::load(t_sum), t1 = Vec::set(0.0f);
  for (int64_t j = 0; j < width; j += 32) {
    const Vec x0 = (Vec::load(s + j) - o) * c, x1 = (Vec::load(s + j + 16) - o) * c;
    const Vec e0 = exp2(x0), e1 = exp2(x1);
    l0 = l0 + e0;
    l1 = l1 + e1;
    if (STATS) {  // the floor is needed because 0 * -inf is NaN
      t0 = fma(e0, MASKED ? max(floor, x0) : x0, t0);
      t1 = fma(e1, MASKED ? max(floor, x1) : x1, t1);
    }
    store_pair(p + j, e0, e1);
  }
  (l0 + l1).store(l_sum);
  if (STATS) (t0 + t1).store(t_sum);
}

// Adds a block of keys to the first n of `rows` rows.
template <class Op>
static void absorb(const QknormArgs &a, const RowScratch<Op> &w, int64_t b, int64_t n, int64_t rows, int64_t Dp,
                   int64_t Dvp, const KeyBlock<Op> &block) {
  const Positions at = positions(a);
  const float to_log2 = std::fabs((float)a.scale) * 1.44269504088896341f;
  const bool stats = a.head_stats != nullptr;
  const int64_t ld = block.stride, width = block.width;
  const int32_t *key_ids = block.by_ids ? a.key_ids + b * a.Tk : nullptr;
  gemm(w.s, ld, w.q, Dp, block.keys, rows, width, Dp, false);
  for (int64_t i = 0; i < n; i++) {
    float *s = w.s + i * ld;
    const int64_t query = w.query[i];
    w.visible[i] += !block.partial ? width
                                   : mask_row(s, width, block.key0, at.lo(query), at.hi(query), key_ids, a.Tk,
                                              key_ids ? a.query_ids[b * a.Tq + query] : 0);
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
        const Vec shift = Vec::set((m_old - m) * to_log2), shrink = exp2(shift);
        const Vec l = Vec::load(w.l + 16 * i), t = Vec::load(w.t + 16 * i);
        (shrink * fma(l, shift, t)).store(w.t + 16 * i);
        (shrink * l).store(w.l + 16 * i);
        float *o = w.o + i * Dvp;
        for (int64_t c = 0; c < Dvp; c += 16) (Vec::load(o + c) * shrink).store(o + c);
      }
    }
    const float origin = m == -INFINITY ? 0.0f : m;
    if (!stats)
      softmax_row<false, false>(w.p + i * ld, s, width, to_log2, origin, w.l + 16 * i, w.t + 16 * i);
    else if (block.partial)
      softmax_row<true, true>(w.p + i * ld, s, width, to_log2, origin, w.l + 16 * i, w.t + 16 * i);
    else
      softmax_row<true, false>(w.p + i * ld, s, width, to_log2, origin, w.l + 16 * i, w.t + 16 * i);
  }
  for (int64_t i = n; i < rows; i++) memset((void *)(w.p + i * ld), 0, width * sizeof(Op));
  gemm(w.o, Dvp, w.p, ld, block.values, rows, Dvp, width, true, 16 * ld);
}

// Sums over rows of one head, for its statistics.
struct HeadSums {
  float top = -INFINITY;
  double entropy = 0.0, ratio = 0.0, sink = 0.0;
  int64_t rows = 0, ratio_rows = 0;
  void add(const HeadSums &o) {
    top = std::isnan(top) || top > o.top ? top : o.top;  // a NaN is kept
    entropy += o.entropy;
    ratio += o.ratio;
    sink += o.sink;
    rows += o.rows;
    ratio_rows += o.ratio_rows;
  }
};

// Writes the results of query `query` of head (b, hq), given its sums over the visible keys. Overwrites o.
template <class In>
static void finish_row(const QknormArgs &a, int64_t b, int64_t hq, int64_t query, int64_t visible, float m, float l,
                       float t, float *o, int64_t Dvp, HeadSums &sums) {
  const bool seen = visible > 0;
  const int64_t row = (b * a.Hq + hq) * a.Tq + query;
  // NaN scores never raise the maximum above -inf. Such a row must report NaN, and not that it saw no key.
  const float top = !seen ? -INFINITY : std::isnan(l) ? NAN : m * std::fabs((float)a.scale), log_sum = std::log(l);
  const float key_lse = seen ? top + log_sum : -INFINITY;
  float keep = seen ? 1.0f / l : 0.0f, log_total = seen ? log_sum : -INFINITY;
  if (a.sink && seen) {  // log_total stays relative to the maximum of the keys; `high` avoids overflow
    const float sink = a.sink[hq] - top, high = std::max(log_sum, sink);
    if (!std::isnan(log_sum)) log_total = high + std::log(std::exp(log_sum - high) + std::exp(sink - high));
    keep *= std::exp(log_sum - log_total);
  }
  const bool has_maximum = seen && m != -INFINITY;  // the backward pass subtracts m, so it must not be -inf
  a.lse[row] = has_maximum ? m : 0.0f;
  a.lse[a.B * a.Hq * a.Tq + row] = log_total;
  if (a.head_stats) {
    float entropy = seen ? std::max(0.0f, log_sum - 0.693147180559945309f * t / l) : 0.0f;
    if (std::isnan(l)) entropy = NAN;
    if (a.row_max) {
      a.row_max[row] = top;
      a.row_log_sum[row] = seen ? log_sum : -INFINITY;
      a.row_entropy[row] = entropy;
      if (hq == 0 && (b == 0 || a.key_ids)) a.visible_keys[(a.key_ids ? b * a.Tq : 0) + query] = visible;
    }
    const int64_t token = query + a.Tk - a.Tq;
    const bool padding = a.key_ids && token >= 0 && a.key_ids[b * a.Tk + token] < 0;
    if (seen && !padding) {
      const bool choice = visible > 1;
      sums.add({top, entropy, choice ? entropy / std::log((float)visible) : 0.0,
                a.sink ? 1.0 / (1.0 + std::exp(key_lse - a.sink[hq])) : 0.0, 1, choice});
    }
  }
  for (int64_t c = 0; c < Dvp; c += 16)
    (seen ? Vec::load(o + c) * Vec::set(keep) : Vec::set(0.0f)).store(o + c);
  float_to_row((In *)a.out + row * a.Dv, o, a.Dv);
}

// Computes the statistics of the heads from `parts` sums for each (b, hq), added in a fixed order.
static void reduce_heads(const QknormArgs &a, const HeadSums *sums, int64_t parts) {
  for (int64_t h = 0; h < a.Hq; h++) {
    HeadSums total;
    for (int64_t b = 0; b < a.B; b++)
      for (int64_t i = 0; i < parts; i++) total.add(sums[(b * a.Hq + h) * parts + i]);
    a.head_stats[h] = total.top;
    a.head_stats[a.Hq + h] = (float)total.entropy;
    a.head_stats[2 * a.Hq + h] = (float)total.ratio;
    a.head_stats[3 * a.Hq + h] = (float)total.sink;
    a.row_counts[0] = total.rows;  // the same for every head
    a.row_counts[1] = total.ratio_rows;
  }
}
