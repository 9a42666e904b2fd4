// Sizes of blocks, the keys that a query may see, and the layout of the workspace.
#pragma once

constexpr int64_t QUERY_BLOCK = 32;

// With at least this many (batch, key head) groups per thread, one thread takes a group through all steps. Its data
// then stay in the cache of that core, and no thread waits for others between the steps.
constexpr int64_t ENOUGH_GROUPS = 8;

// The keys [lo, hi) that one query may see by position.
struct Positions {
  int64_t off, Tk, window;
  bool causal;
  int64_t lo(int64_t query) const {
    const int64_t token = query + off;
    return window ? std::max<int64_t>(0, token - window + 1) : 0;
  }
  int64_t hi(int64_t query) const {
    const int64_t token = query + off;
    int64_t end = Tk;
    if (causal) end = std::min(end, token + 1);
    if (window) end = std::min(end, token + window);
    return std::max<int64_t>(0, end);
  }
  // The queries [first, last) that may see one key by position.
  int64_t first_query(int64_t key, int64_t Tq) const {
    int64_t first = 0;
    if (causal) first = std::max(first, key - off);
    if (window) first = std::max(first, key - off - window + 1);
    return std::min(first, Tq);
  }
  int64_t last_query(int64_t key, int64_t Tq) const {
    int64_t last = Tq;
    if (window) last = std::min(last, key - off + window);
    return std::max<int64_t>(0, last);
  }
};

static inline Positions positions(const QknormArgs &a) { return {a.Tk - a.Tq, a.Tk, a.window, a.causal != 0}; }

// The smallest and the largest id of a block. Negative ids, which mark padding, set `padded` instead.
struct IdRange {
  int32_t low, high;
  bool padded;
  bool meets(const IdRange &other) const { return low <= other.high && other.low <= high; }
  bool uniform_with(const IdRange &other) const {
    return !padded && !other.padded && low == high && other.low == other.high && low == other.low;
  }
};
static inline IdRange id_range(const int32_t *ids, int64_t n) {
  IdRange r{INT32_MAX, INT32_MIN, false};
  for (int64_t i = 0; i < n; i++) {
    if (ids[i] < 0) {
      r.padded = true;
    } else {
      r.low = std::min(r.low, ids[i]);
      r.high = std::max(r.high, ids[i]);
    }
  }
  return r;
}

// Hands out aligned pieces of one buffer. With a null buffer it only computes the size that is needed.
struct Arena {
  char *base;
  int64_t used = 0;
  template <class T>
  T *take(int64_t n) {
    used = (used + 63) / 64 * 64;
    T *p = base ? (T *)(base + used) : nullptr;
    used += n * (int64_t)sizeof(T);
    return p;
  }
};

// Runs body(unit, thread) for every unit on torch's threads. Each thread takes the next unit when it is free, since
// units differ in cost under a causal mask. No two units write to the same place, so the order does not change the
// result.
template <class Body>
static void for_units(int64_t units, int64_t threads, const Body &body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t units;
    const Body *body;
  } shared;
  shared.units = units;
  shared.body = &body;
  auto worker = [](int64_t begin, int64_t end, void *context) {
    Shared &s = *(Shared *)context;
    begin_tiles();
    for (int64_t t = begin; t < end; t++)
      for (int64_t unit; (unit = s.next.fetch_add(1)) < s.units;) (*s.body)(unit, t);
    end_tiles();
  };
  threads = std::max<int64_t>(1, std::min(threads, units));
  if (threads == 1 || !qknorm_parallel_for || qknorm_parallel_for(0, threads, 1, worker, &shared) != 0)
    worker(0, 1, &shared);
}
