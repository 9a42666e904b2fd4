// The forward pass for few queries and many keys. Keys are not packed in advance, since no block of keys is read
// twice. The query heads that share a key head form one block of rows. The keys are split among the threads, and
// the splits are merged in a fixed order. Their number depends on the shape alone, so the result has the same bits
// on any number of threads.
#pragma once

// The largest number of queries for this pass, and the smallest number of keys that is worth another split.
constexpr int64_t DECODE_QUERIES = 16, DECODE_KEYS = 512;
constexpr int64_t MAX_SPLITS = 32;

// The sums of one row over the keys of one split. The sums of the output are in DecodePlan::outs.
struct Partial {
  int64_t visible;
  float m, l, t;
};

template <class Op>
struct DecodePlan {
  int64_t Dp, Dvp, key_block, G, n, rows, first, last, splits, blocks_per_split;
  Partial *partials;  // [B, Hk, splits, n]
  float *outs;        // [B, Hk, splits, n, Dvp]
  HeadSums *sums;     // [B, Hq]
  char *scratch;
  int64_t scratch_bytes;

  // Whether this pass supports the call.
  static bool fits(const QknormArgs &a) {
    return a.Tq <= DECODE_QUERIES && a.Tk > 2 * a.Tq && a.Hq / a.Hk * a.Tq <= MAX_ROWS;
  }

  DecodePlan(const QknormArgs &a, Arena &arena) {
    Dp = round_up(a.D, width_step<Op>());
    Dvp = round_up(a.Dv, 16);
    key_block = key_block_size(Dp, Dvp);
    G = a.Hq / a.Hk;
    n = G * a.Tq;
    rows = round_up(n, 16);
    const Positions at = positions(a);
    first = at.lo(0) / key_block;
    last = (at.hi(a.Tq - 1) + key_block - 1) / key_block;
    splits = std::max<int64_t>(1, std::min(MAX_SPLITS, (last - first) * key_block / DECODE_KEYS));
    blocks_per_split = (last - first + splits - 1) / splits;
    partials = arena.take<Partial>(a.B * a.Hk * splits * n);
    outs = arena.take<float>(a.B * a.Hk * splits * n * Dvp);
    sums = arena.take<HeadSums>(a.head_stats ? a.B * a.Hq : 0);
    Arena one{nullptr};
    thread_scratch(one);
    scratch_bytes = round_up(one.used, 4096);
    scratch = arena.take<char>(scratch_bytes * std::max<int64_t>(1, a.threads));
  }

  struct Scratch {
    RowScratch<Op> w;
    Op *keys, *values;
  };
  Scratch thread_scratch(Arena &one) const {
    const RowScratch<Op> w(one, rows, key_block, Dp, Dvp);
    Op *keys = one.take<Op>(key_block * Dp), *values = one.take<Op>(key_block * Dvp);
    return {w, keys, values};
  }
  Scratch of_thread(int64_t thread) const {
    Arena one{scratch + thread * scratch_bytes};
    return thread_scratch(one);
  }
};

template <class In, class Op>
static void decode_split(const QknormArgs &a, const DecodePlan<Op> &plan, int64_t unit, int64_t thread) {
  auto [w, keys, values] = plan.of_thread(thread);
  const int64_t split = unit % plan.splits, bh = unit / plan.splits, b = bh / a.Hk, hk = bh % a.Hk;
  const int64_t Dp = plan.Dp, Dvp = plan.Dvp, key_block = plan.key_block, n = plan.n;
  const Positions at = positions(a);
  const IdRange ids = a.query_ids ? id_range(a.query_ids + b * a.Tq, a.Tq) : IdRange{};
  for (int64_t g = 0; g < plan.G; g++) {
    const int64_t padded = g + 1 < plan.G ? a.Tq : plan.rows - g * a.Tq;
    load_queries<In>(w.hats + g * a.Tq * Dp, a, b, hk * plan.G + g, 0, a.Tq, padded, Dp);
    for (int64_t i = 0; i < a.Tq; i++) w.query[g * a.Tq + i] = i;
  }
  pack_rows(w.q, w.hats, Dp, plan.rows, Dp);
  w.clear(plan.rows, Dvp);

  const int64_t begin = plan.first + split * plan.blocks_per_split;
  const int64_t end = std::min(plan.last, begin + plan.blocks_per_split), highest = at.hi(a.Tq - 1);
  for (int64_t kb = begin; kb < end; kb++) {
    const int64_t key0 = kb * key_block, keys_here = std::min(key_block, a.Tk - key0);
    const int64_t width = round_up(std::min(keys_here, highest - key0), 32);
    bool by_ids = false;
    if (a.query_ids) {
      const IdRange range = id_range(a.key_ids + b * a.Tk + key0, keys_here);
      if (!ids.meets(range)) continue;
      by_ids = !ids.uniform_with(range);
    }
    const bool partial = by_ids || at.lo(a.Tq - 1) > key0 || at.hi(0) < key0 + width || keys_here < width;
    pack_block<In>(keys, values, w.hats, a, b, hk, key0, keys_here, key_block, Dp, Dvp);
    absorb(a, w, b, n, plan.rows, Dp, Dvp, KeyBlock<Op>{keys, values, key0, width, key_block, partial, by_ids});
  }
  for (int64_t i = 0; i < n; i++)
    plan.partials[unit * n + i] = {w.visible[i], w.m[i], sum(Vec::load(w.l + 16 * i)), sum(Vec::load(w.t + 16 * i))};
  memcpy(plan.outs + unit * n * Dvp, w.o, n * Dvp * sizeof(float));
}

// Merges the splits of row `row` of a key head (b, hk) and writes its results.
template <class In, class Op>
static void merge_row(const QknormArgs &a, const DecodePlan<Op> &plan, int64_t bh, int64_t row) {
  const float to_log2 = std::fabs((float)a.scale) * 1.44269504088896341f;
  const Partial *parts = plan.partials + bh * plan.splits * plan.n + row;
  float *outs = plan.outs + (bh * plan.splits * plan.n + row) * plan.Dvp;
  int64_t visible = 0;
  float m = -INFINITY, l = 0.0f, t = 0.0f;
  for (int64_t s = 0; s < plan.splits; s++) m = std::max(m, parts[s * plan.n].m);
  for (int64_t s = 0; s < plan.splits; s++) {
    const Partial &part = parts[s * plan.n];
    float *o = outs + s * plan.n * plan.Dvp;
    // A split that saw no key has sums of 0 and needs no shift. A split whose scores are all -inf has the weight 0,
    // and shift * l, which is -inf * 0, must not add a NaN to t. A NaN in the sums of a split reaches the result.
    const float shift = part.m == m || part.visible == 0 ? 0.0f : (part.m - m) * to_log2, weight = std::exp2(shift);
    visible += part.visible;
    l += weight * part.l;
    t += weight * (part.t + (weight > 0.0f ? shift * part.l : 0.0f));
    for (int64_t c = 0; c < plan.Dvp; c += 16) {
      const Vec x = Vec::load(o + c) * Vec::set(weight);
      (s == 0 ? x : Vec::load(outs + c) + x).store(outs + c);
    }
  }
  const int64_t b = bh / a.Hk, hq = bh % a.Hk * plan.G + row / a.Tq;
  HeadSums none;
  finish_row<In>(a, b, hq, row % a.Tq, visible, m, l, t, outs, plan.Dvp,
                 a.head_stats ? plan.sums[b * a.Hq + hq] : none);
}

template <class In, class Op>
static void decode(const QknormArgs &a) {
  Arena arena{(char *)a.workspace};
  const DecodePlan<Op> plan(a, arena);
  for_units(a.B * a.Hk * plan.splits, a.threads,
            [&](int64_t unit, int64_t thread) { decode_split<In, Op>(a, plan, unit, thread); });
  if (a.head_stats) std::fill(plan.sums, plan.sums + a.B * a.Hq, HeadSums{});
  for (int64_t bh = 0; bh < a.B * a.Hk; bh++)
    for (int64_t row = 0; row < plan.n; row++) merge_row<In>(a, plan, bh, row);
  if (a.head_stats) reduce_heads(a, plan.sums, 1);
}

template <class Op>
static int64_t decode_workspace(const QknormArgs &a) {
  Arena arena{nullptr};
  const DecodePlan<Op> plan(a, arena);
  return arena.used + 64;
}
