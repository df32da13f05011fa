// Passes over the logits of one output, and the boundary of what top_k and top_p keep. Part of sample-inl.h.
//
// Blocks are 64 logits. Their maxima let later passes skip blocks that cannot matter: a filter keeps a set of the form
// {z > z_b, or z == z_b and id <= id_b}, whose members lie in few blocks.

namespace paceline::PL_ISA {
namespace {

constexpr int kBlock = 64;
// Blocks whose partial sums or maxima stay in registers: bounds the rounding error of sums.
constexpr int kSuperBlock = 16;
constexpr int kBins = 512;  // 4 kB of stack; one level leaves about 1/512 of the candidates
constexpr int kFew = 16;    // candidates that are sorted by insertion
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kNaN = __builtin_nanf("");
// Weights are summed as integers, so that no order of summation matters: 2^18 tokens of weight 1 reach 2^58.
constexpr float kMassUnit = 0x1p40f;

inline int num_blocks(int n) { return (n + kBlock - 1) / kBlock; }

// Block b of x [n], the missing end of the last one filled with -inf in `tail` [64].
inline const float* block_of(const float* x, int n, int b, float* tail) {
  const int begin = b * kBlock;
  if (begin + kBlock <= n) return x + begin;
  for (int i = 0; i < kBlock; ++i) tail[i] = begin + i < n ? x[begin + i] : kMinusInfinity;
  return tail;
}

// The boundary of a kept set: tokens above it, and equal ones up to and including id.
struct Boundary {
  float z;
  int32_t id;
};
constexpr Boundary kNoBoundary{kMinusInfinity, -1};  // everything but what is banned

// What top_k, top_p and min_p keep: the tokens within the boundary whose z - largest is at least `least`.
struct Kept {
  Boundary at;
  float largest;  // of z; not finite when no token is left
  float least;

  bool any() const { return largest - largest == 0.0f; }
  // Whether a block with that maximum can hold a token that is kept.
  bool reaches(float block_max) const { return block_max >= at.z && block_max - largest >= least; }
  // `value` in the lanes of tokens that are kept, `otherwise` in the others.
  F32x16 choose(F32x16 z, I32x16 ids, F32x16 value, F32x16 otherwise) const {
    // z above the boundary, or equal and the id not beyond it.
    const F32x16 equal = select(ids > set1(at.id), otherwise, value);
    const F32x16 within = select(z > set1(at.z), value, select(z == set1(at.z), equal, otherwise));
    return select(z - set1(largest) >= set1(least), within, otherwise);
  }
};

// Candidates in ascending order of id; weight is a mass relative to the most likely token.
struct Candidates {
  float* z;
  int32_t* id;
  float* weight;
  int count;
};

// Natural logarithm of a positive normal double, within 2 ulp and without libm, whose results depend on the machine.
inline double log_scalar(double x) {
  uint64_t u;
  __builtin_memcpy(&u, &x, 8);
  int64_t e = static_cast<int64_t>((u + 0x0009'5f61'9980'c434u) >> 52) -
              1023;  // mantissas from sqrt(2) on count as the next power
  const uint64_t mantissa = u - (static_cast<uint64_t>(e) << 52);
  double m;
  __builtin_memcpy(&m, &mantissa, 8);
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double p = 0.0;
  for (int k = 23; k >= 3; k -= 2) p = (p + 1.0 / k) * s2;
  const double ef = static_cast<double>(e);
  return ef * 0x1.62e42fefa3800p-1 + (2.0 * (s + s * p) + ef * 0x1.ef35793c76730p-45);
}

struct Peak {
  float value;
  int32_t id;
  bool finite;
};

// The largest of x [n], the lowest id that has it, and whether all are finite.
inline Peak find_peak(const float* x, int n) {
  float tail[kBlock];
  const int blocks = num_blocks(n);
  const F32x16 zero = zero_f32();
  F32x16 bad = zero;  // stays 0 unless an infinity or NaN passes: 0 * x is NaN then
  float best = kMinusInfinity;
  int best_super = 0;
  for (int begin = 0; begin < blocks; begin += kSuperBlock) {
    const int end = begin + kSuperBlock < blocks ? begin + kSuperBlock : blocks;
    F32x16 m0 = set1(kMinusInfinity), m1 = m0, m2 = m0, m3 = m0;
    for (int b = begin; b < end; ++b) {
      const float* p = block_of(x, n, b, tail);
      const F32x16 v0 = load(p), v1 = load(p + 16), v2 = load(p + 32), v3 = load(p + 48);
      m0 = max(m0, v0);
      m1 = max(m1, v1);
      m2 = max(m2, v2);
      m3 = max(m3, v3);
      if (p != tail) {
        bad = fma(v0, zero, fma(v1, zero, bad));
        bad = fma(v2, zero, fma(v3, zero, bad));
      }
    }
    const float top = reduce_max(max(max(m0, m1), max(m2, m3)));
    if (top > best) {
      best = top;
      best_super = begin;
    }
  }
  bool finite = reduce_add(bad) == 0.0f;
  for (int i = n / kBlock * kBlock; i < n; ++i) finite = finite && x[i] - x[i] == 0.0f;
  int id = best_super * kBlock;
  while (id < n - 1 && x[id] != best) ++id;
  return {best, id, finite};
}

// Maxima of the blocks of x into block_max; returns the largest.
inline float find_block_maxima(const float* x, int n, float* block_max) {
  float tail[kBlock];
  float best = kMinusInfinity;
  for (int b = 0; b < num_blocks(n); ++b) {
    const float* p = block_of(x, n, b, tail);
    const float top = reduce_max(max(max(load(p), load(p + 16)), max(load(p + 32), load(p + 48))));
    block_max[b] = top;
    best = top > best ? top : best;
  }
  return best;
}

// z = x / temperature, padded with -inf to whole blocks, in place when z is x; block maxima as above. temperature 1 changes no bits.
inline float divide(const float* x, int n, float temperature, float* z, float* block_max) {
  float tail[kBlock];
  const F32x16 t = set1(temperature);
  float best = kMinusInfinity;
  for (int b = 0; b < num_blocks(n); ++b) {
    const float* p = block_of(x, n, b, tail);
    F32x16 top = set1(kMinusInfinity);
    for (int i = 0; i < kBlock; i += 16) {
      F32x16 v = load(p + i);
      if (temperature != 1.0f) v = v / t;
      store(z + b * kBlock + i, v);
      top = max(top, v);
    }
    block_max[b] = reduce_max(top);
    best = block_max[b] > best ? block_max[b] : best;
  }
  return best;
}

// Sum of exp(x - largest) over x [n].
inline float sum_exp(const float* x, int n, float largest) {
  float tail[kBlock];
  const int blocks = num_blocks(n);
  const F32x16 m = set1(largest);
  F32x16 total = zero_f32();
  for (int begin = 0; begin < blocks; begin += kSuperBlock) {
    const int end = begin + kSuperBlock < blocks ? begin + kSuperBlock : blocks;
    F32x16 s0 = zero_f32(), s1 = s0, s2 = s0, s3 = s0;
    for (int b = begin; b < end; ++b) {
      const float* p = block_of(x, n, b, tail);
      s0 = s0 + exp(load(p) - m);
      s1 = s1 + exp(load(p + 16) - m);
      s2 = s2 + exp(load(p + 32) - m);
      s3 = s3 + exp(load(p + 48) - m);
    }
    total = total + ((s0 + s1) + (s2 + s3));
  }
  return reduce_add(total);
}

// Lanes of v, whose ids are `ids`, that lie within the boundary.
inline uint32_t lanes_within(F32x16 v, I32x16 ids, Boundary at) {
  const F32x16 z = set1(at.z);
  const uint32_t above = bitmask(v > z);
  const uint32_t equal = bitmask(v == z);
  return equal == 0 ? above : above | (equal & ~bitmask(ids > set1(at.id)));
}

// Fills `to` with the tokens of x within the boundary, weights 1.
inline void collect(const float* x, int n, const float* block_max, Boundary at, Candidates& to) {
  float tail[kBlock];
  int count = 0;
  for (int b = 0; b < num_blocks(n); ++b) {
    if (block_max[b] < at.z) continue;
    const float* p = block_of(x, n, b, tail);
    for (int i = 0; i < kBlock; i += 16) {
      const int first = b * kBlock + i;
      uint32_t lanes = lanes_within(load(p + i), iota() + set1(static_cast<int32_t>(first)), at);
      if (first + 16 > n) lanes &= first < n ? (1u << (n - first)) - 1u : 0u;
      if (__builtin_popcount(lanes) > 4) {
        // Writes every lane and advances only past those wanted: no branch to mispredict. Never past the block's own place.
        for (int j = 0; j < 16; ++j) {
          to.z[count] = p[i + j];
          to.id[count] = first + j;
          count += static_cast<int>((lanes >> j) & 1u);
        }
        continue;
      }
      for (; lanes != 0; lanes &= lanes - 1) {
        const int j = __builtin_ctz(lanes);
        to.z[count] = p[i + j];
        to.id[count] = first + j;
        ++count;
      }
    }
  }
  for (int i = 0; i < count; i += 16) store(to.weight + i, set1(1.0f));
  to.count = count;
}

// Weights exp(z - largest); returns their total mass.
inline int64_t weigh(Candidates& c, float largest) {
  int64_t total = 0;
  for (int i = 0; i < c.count; i += 16) {
    store(c.weight + i, exp(load(c.z + i) - set1(largest)));
    const int end = i + 16 < c.count ? i + 16 : c.count;
    for (int j = i; j < end; ++j) total += static_cast<int64_t>(c.weight[j] * kMassUnit);
  }
  return total;
}

inline bool ranks_before(float z, int32_t id, float other_z, int32_t other_id) {
  return z > other_z || (z == other_z && id < other_id);
}

inline void sort_few(Candidates& c) {
  for (int i = 1; i < c.count; ++i) {
    const float z = c.z[i], weight = c.weight[i];
    const int32_t id = c.id[i];
    int j = i;
    for (; j > 0 && ranks_before(z, id, c.z[j - 1], c.id[j - 1]); --j) {
      c.z[j] = c.z[j - 1];
      c.id[j] = c.id[j - 1];
      c.weight[j] = c.weight[j - 1];
    }
    c.z[j] = z;
    c.id[j] = id;
    c.weight[j] = weight;
  }
}

// Largest z of the candidates, or largest -z.
inline float largest_of(const Candidates& c, bool negated) {
  const F32x16 sign = set1(negated ? -1.0f : 1.0f);
  F32x16 top = set1(kMinusInfinity);
  int i = 0;
  for (; i + 16 <= c.count; i += 16) top = max(top, load(c.z + i) * sign);
  float best = reduce_max(top);
  for (; i < c.count; ++i) {
    const float v = negated ? -c.z[i] : c.z[i];
    best = v > best ? v : best;
  }
  return best;
}

// Linear bins of z from `high` (bin 0) down to the lowest candidate (bin kBins - 1).
struct Binning {
  F32x16 high, lift, scale;
};

// Every step rounds monotonically, so the bins are in order. `lift` keeps the scale finite for neighbouring subnormals.
inline F32x16 below_high(const Binning& b, F32x16 z) { return min(b.high - z, set1(3e38f)) * b.lift; }
inline I32x16 bins_of(const Binning& b, F32x16 z) { return round_to_i32(below_high(b, z) * b.scale); }
inline Binning binning_of(float high, float low) {
  Binning b{set1(high), set1(high - low < 1e-25f ? 0x1p100f : 1.0f), set1(1.0f)};
  b.scale = set1(static_cast<float>(kBins - 1)) / below_high(b, set1(low));
  return b;
}

// The smallest prefix of the ranked candidates whose mass reaches `target`, or all of them. Destroys the candidates.
//
// Each level spreads them over linear bins of z, finds the bin where the mass is reached, and goes on with that bin only. Largest and
// smallest z fall into different bins, so every level makes progress; equal ones need no bins.
inline Boundary find_boundary(Candidates c, int64_t target) {
  for (;;) {
    const float high = largest_of(c, false), low = -largest_of(c, true);
    if (c.count <= kFew || high == low) {
      if (high != low) sort_few(c);
      int i = 0;
      for (; i < c.count - 1; ++i) {
        target -= static_cast<int64_t>(c.weight[i] * kMassUnit);
        if (target <= 0) break;
      }
      return {c.z[i], c.id[i]};
    }
    int64_t mass[kBins] = {};
    int32_t bins[16];
    const Binning binning = binning_of(high, low);
    for (int i = 0; i < c.count; i += 16) {
      store(bins, bins_of(binning, load(c.z + i)));
      const int end = c.count - i < 16 ? c.count - i : 16;
      for (int j = 0; j < end; ++j) mass[bins[j]] += static_cast<int64_t>(c.weight[i + j] * kMassUnit);
    }
    int bin = 0;
    while (bin < kBins - 1 && mass[bin] < target) target -= mass[bin++];
    int count = 0;
    const I32x16 wanted = set1(static_cast<int32_t>(bin));
    for (int i = 0; i < c.count; i += 16) {
      const I32x16 found = bins_of(binning, load(c.z + i));
      uint32_t lanes = ~(bitmask(found > wanted) | bitmask(wanted > found)) & 0xffffu;
      if (c.count - i < 16) lanes &= (1u << (c.count - i)) - 1u;
      for (; lanes != 0; lanes &= lanes - 1) {
        const int j = i + __builtin_ctz(lanes);
        c.z[count] = c.z[j];
        c.id[count] = c.id[j];
        c.weight[count] = c.weight[j];
        ++count;
      }
    }
    c.count = count;
  }
}

// The boundary of the k first-ranked of x [n], 1 <= k <= n.
inline Boundary find_top(const float* x, int n, const float* block_max, int k, Candidates& space) {
  const int blocks = num_blocks(n);
  const int64_t target = static_cast<int64_t>(k) * static_cast<int64_t>(kMassUnit);
  space.count = 0;
  for (int b = 0; b < blocks && k < blocks; ++b) {
    if (block_max[b] == kMinusInfinity) continue;
    space.z[space.count] = block_max[b];
    space.id[space.count] = b;
    space.weight[space.count++] = 1.0f;
  }
  // The k-th largest block maximum bounds the k-th largest value from below.
  const Boundary loose = space.count >= k ? Boundary{find_boundary(space, target).z, n} : kNoBoundary;
  collect(x, n, block_max, loose, space);
  return find_boundary(space, target);
}

// The boundary of top_k and then top_p over z [n]; banned tokens (-inf) are never needed to reach it.
inline Boundary find_filters(const float* z, int n, const float* block_max, float largest, const SampleRow& row,
                             Candidates& space) {
  Boundary at = kNoBoundary;
  if (row.top_k > 0 && row.top_k < n) at = find_top(z, n, block_max, row.top_k, space);
  if (!(row.top_p < 1.0f)) return at;
  const double p = static_cast<double>(row.top_p);
  double total;
  if (at.z == kMinusInfinity) {
    // All tokens below weight (1 - p) * total / n together weigh less than 1 - p, so the prefix ends before them. Half of it allows for
    // rounding.
    total = static_cast<double>(sum_exp(z, n, largest)) * static_cast<double>(kMassUnit);
    const double least = 0.5 * (1.0 - p) * total / static_cast<double>(kMassUnit) / n;
    collect(z, n, block_max, {static_cast<float>(static_cast<double>(largest) + log_scalar(least)), n}, space);
    weigh(space, largest);
  } else {
    collect(z, n, block_max, at, space);
    total = static_cast<double>(weigh(space, largest));
  }
  return find_boundary(space, static_cast<int64_t>(p * total));
}

}  // namespace
}  // namespace paceline::PL_ISA
