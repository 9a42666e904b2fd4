// The forward pass of attention. Keys (normalised and rotated) and values are packed once per key head. Then each
// block of queries runs over the blocks of keys that it may see.
#pragma once

// The number of keys in a packed block, so that its keys, values and scores fit the first-level cache together.
static inline int64_t key_block_size(int64_t Dp, int64_t Dvp) { return std::max(Dp, Dvp) <= 64 ? 64 : 128; }

template <class Op>
struct ForwardPlan {
  int64_t Dp, Dvp, key_block, key_blocks, query_blocks;
  Op *keys, *values;    // [B, Hk, key_blocks] blocks, by pack_across [key_block x Dp] and pack_down [key_block x Dvp]
  IdRange *key_ranges;  // [B, key_blocks]
  HeadSums *sums;       // [B, Hq, query_blocks]; empty if the call returns no statistics
  char *scratch;        // per thread
  int64_t scratch_bytes;

  ForwardPlan(const QknormArgs &a, Arena &arena) {
    Dp = round_up(a.D, width_step<Op>());
    Dvp = round_up(a.Dv, 16);
    key_block = key_block_size(Dp, Dvp);
    key_blocks = (a.Tk + key_block - 1) / key_block;
    query_blocks = (a.Tq + QUERY_BLOCK - 1) / QUERY_BLOCK;
    keys = arena.take<Op>(a.B * a.Hk * key_blocks * key_block * Dp);
    values = arena.take<Op>(a.B * a.Hk * key_blocks * key_block * Dvp);
    key_ranges = arena.take<IdRange>(a.key_ids ? a.B * key_blocks : 0);
    sums = arena.take<HeadSums>(a.head_stats ? a.B * a.Hq * query_blocks : 0);
    Arena one{nullptr};
    thread_scratch(one);
    scratch_bytes = round_up(one.used, 4096);
    scratch = arena.take<char>(scratch_bytes * std::max<int64_t>(1, a.threads));
  }
  RowScratch<Op> thread_scratch(Arena &one) const { return RowScratch<Op>(one, QUERY_BLOCK, key_block, Dp, Dvp); }
  RowScratch<Op> of_thread(int64_t thread) const {
    Arena one{scratch + thread * scratch_bytes};
    return thread_scratch(one);
  }
};

template <class In, class Op>
static void forward_block(const QknormArgs &a, const ForwardPlan<Op> &plan, int64_t b, int64_t hq, int64_t qb,
                          int64_t thread) {
  auto w = plan.of_thread(thread);
  const int64_t Dp = plan.Dp, Dvp = plan.Dvp, key_block = plan.key_block, hk = hq / (a.Hq / a.Hk);
  const int64_t q0 = qb * QUERY_BLOCK, n = std::min(QUERY_BLOCK, a.Tq - q0), rows = round_up(n, 16);
  const Positions at = positions(a);
  const int32_t *query_ids = a.query_ids ? a.query_ids + b * a.Tq + q0 : nullptr;
  const IdRange ids = query_ids ? id_range(query_ids, n) : IdRange{};

  load_queries<In>(w.hats, a, b, hq, q0, n, rows, Dp);
  pack_rows(w.q, w.hats, Dp, rows, Dp);
  w.clear(rows, Dvp);
  for (int64_t i = 0; i < n; i++) w.query[i] = q0 + i;

  const int64_t lowest = at.lo(q0), highest = at.hi(q0 + n - 1);
  for (int64_t kb = lowest / key_block; kb * key_block < highest; kb++) {
    const int64_t key0 = kb * key_block, key1 = std::min(key0 + key_block, a.Tk);
    const int64_t width = round_up(std::min(key1, highest) - key0, 32);
    bool by_ids = false;
    if (query_ids) {
      const IdRange &range = plan.key_ranges[b * plan.key_blocks + kb];
      if (!ids.meets(range)) continue;
      by_ids = !ids.uniform_with(range);
    }
    const bool partial = by_ids || at.lo(q0 + n - 1) > key0 || at.hi(q0) < key0 + width || key1 < key0 + width;
    const int64_t first = ((b * a.Hk + hk) * plan.key_blocks + kb) * key_block;
    absorb(a, w, b, n, rows, Dp, Dvp,
           KeyBlock<Op>{plan.keys + first * Dp, plan.values + first * Dvp, key0, width, key_block, partial, by_ids});
  }

  HeadSums sums;
  for (int64_t i = 0; i < n; i++)
    finish_row<In>(a, b, hq, q0 + i, w.visible[i], w.m[i], sum(Vec::load(w.l + 16 * i)), sum(Vec::load(w.t + 16 * i)),
                   w.o + i * Dvp, Dvp, sums);
  if (a.head_stats) plan.sums[(b * a.Hq + hq) * plan.query_blocks + qb] = sums;
}

// Packs the keys and values [lo, lo + n) of (b, h) into one block.
template <class In, class Op>
static void pack_block(Op *keys, Op *values, float *hats, const QknormArgs &a, int64_t b, int64_t h, int64_t lo,
                       int64_t n, int64_t key_block, int64_t Dp, int64_t Dvp) {
  const In *k = (const In *)a.k + b * a.k_stride[0] + h * a.k_stride[1] + lo * a.k_stride[2];
  const In *v = (const In *)a.v + b * a.v_stride[0] + h * a.v_stride[1] + lo * a.v_stride[2];
  const bool full = n == key_block, raw = !a.k_gain && !a.rope;
  if (!(full && raw && a.D == Dp && copy_across(keys, k, a.k_stride[2], key_block, Dp))) {
    load_hats<In>(hats, a, false, b, h, lo, n, key_block, Dp);
    pack_across(keys, hats, Dp, key_block, Dp);
  }
  if (!(full && a.Dv == Dvp && copy_down(values, v, a.v_stride[2], key_block, Dvp))) {
    load_values<In>(hats, a, b, h, lo, n, key_block, Dvp);
    pack_down(values, hats, Dvp, key_block, Dvp);
  }
}

template <class In, class Op>
static void pack_keys(const QknormArgs &a, const ForwardPlan<Op> &plan, int64_t unit, int64_t thread) {
  const int64_t size = plan.key_block, kb = unit % plan.key_blocks, bh = unit / plan.key_blocks, b = bh / a.Hk;
  const int64_t lo = kb * size, n = std::min(size, a.Tk - lo);
  pack_block<In>(plan.keys + unit * size * plan.Dp, plan.values + unit * size * plan.Dvp, plan.of_thread(thread).hats, a,
                 b, bh % a.Hk, lo, n, size, plan.Dp, plan.Dvp);
}

template <class In, class Op>
static void forward(const QknormArgs &a) {
  Arena arena{(char *)a.workspace};
  const ForwardPlan<Op> plan(a, arena);
  for (int64_t i = 0; a.key_ids && i < a.B * plan.key_blocks; i++) {
    const int64_t b = i / plan.key_blocks, lo = i % plan.key_blocks * plan.key_block;
    plan.key_ranges[i] = id_range(a.key_ids + b * a.Tk + lo, std::min(plan.key_block, a.Tk - lo));
  }
  const int64_t G = a.Hq / a.Hk, heads = a.B * a.Hq, groups = a.B * a.Hk;
  const auto block = [&](int64_t bh, int64_t qb, int64_t thread) {
    forward_block<In, Op>(a, plan, bh / a.Hq, bh % a.Hq, qb, thread);
  };
  if (groups >= ENOUGH_GROUPS * a.threads) {
    for_units(groups, a.threads, [&](int64_t group, int64_t thread) {
      for (int64_t kb = 0; kb < plan.key_blocks; kb++) pack_keys<In, Op>(a, plan, group * plan.key_blocks + kb, thread);
      for (int64_t i = 0; i < G * plan.query_blocks; i++) block(group * G + i % G, i / G, thread);
    });
  } else {
    for_units(groups * plan.key_blocks, a.threads,
              [&](int64_t unit, int64_t thread) { pack_keys<In, Op>(a, plan, unit, thread); });
    // The last blocks come first, because under a causal mask they have the most keys.
    for_units(heads * plan.query_blocks, a.threads, [&](int64_t unit, int64_t thread) {
      block(unit % heads, plan.query_blocks - 1 - unit / heads, thread);
    });
  }
  if (a.head_stats) reduce_heads(a, plan.sums, plan.query_blocks);
}

template <class Op>
static int64_t forward_workspace(const QknormArgs &a) {
  Arena arena{nullptr};
  const ForwardPlan<Op> plan(a, arena);
  return arena.used + 64;
}
