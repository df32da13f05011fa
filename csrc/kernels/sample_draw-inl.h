// The draw of one output: Philox words, Gumbel noise, and their argmax over what is kept. Part of sample-inl.h.

namespace paceline::PL_ISA {
namespace {

// Words of Philox4x32-10 for counters (first .. first + 15, position, 0, 0): word k of counter j at words[16 * k + j].
//
// A counter's words live in the even lanes, where the 32 x 32 -> 64 bit product reads them: the odd ones may hold anything, so a product
// is used as it comes and only its high half has to move.
inline void philox_block(uint32_t first, uint32_t position, uint64_t seed, int32_t* words) {
  const I32x16 m0 = set1(static_cast<int32_t>(0xD2511F53u)), m1 = set1(static_cast<int32_t>(0xCD9E8D57u));
  I32x16 c0[2], c1[2], c2[2], c3[2];
  for (int h = 0; h < 2; ++h) {  // lane 2i of half h is counter 2i + h
    c0[h] = iota() + set1(static_cast<int32_t>(first + static_cast<uint32_t>(h)));
    c1[h] = set1(static_cast<int32_t>(position));
    c2[h] = set1(0);
    c3[h] = set1(0);
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int r = 0; r < 10; ++r) {
    const I32x16 key0 = set1(static_cast<int32_t>(k0)), key1 = set1(static_cast<int32_t>(k1));
    for (int h = 0; h < 2; ++h) {
      const I32x16 p0 = mul_even_u32(c0[h], m0), p1 = mul_even_u32(c2[h], m1);
      c0[h] = odd_to_even(p1) ^ c1[h] ^ key0;
      c1[h] = p1;
      c2[h] = odd_to_even(p0) ^ c3[h] ^ key1;
      c3[h] = p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const Mask16 even = set1(1) > (iota() & set1(1));
  const auto merge = [&](const I32x16* c, int32_t* to) { store(to, select(even, c[0], even_to_odd(c[1]))); };
  merge(c0, words);
  merge(c1, words + 16);
  merge(c2, words + 32);
  merge(c3, words + 48);
}

// -log u for u = (w + 1/2) / 2^32, relative error about 4e-7 over the whole range, so also where u is close to 1:
// log m = 2 atanh s, s = (m - 1) / (m + 1), with m = u and m - 1 exact there, else m the mantissa of u.
inline F32x16 exponential_noise(I32x16 w) {
  const Mask16 upper = set1(0) > w;  // u >= 1/2: work on t = 1 - u
  const F32x16 t = fma(to_f32(select(upper, set1(-1) - w, w)), set1(0x1p-32f), set1(0x1p-33f));
  const I32x16 bits = bits_of(t);
  const I32x16 shifted = bits - set1(0x3f3504f3) + set1(static_cast<int32_t>(127u << 23));
  const I32x16 e = shift_right<23>(shifted) - set1(127);
  const F32x16 m = from_bits(bits - shift_left<23>(e));
  const F32x16 one = set1(1.0f);
  const F32x16 ef = select(upper, zero_f32(), to_f32(e));
  const F32x16 s = select(upper, zero_f32() - t, m - one) / select(upper, set1(2.0f) - t, m + one);
  const F32x16 z = s * s;  // at most 1/9
  F32x16 p = set1(2.0f / 15.0f);
  p = fma(p, z, set1(2.0f / 13.0f));
  p = fma(p, z, set1(2.0f / 11.0f));
  p = fma(p, z, set1(2.0f / 9.0f));
  p = fma(p, z, set1(2.0f / 7.0f));
  p = fma(p, z, set1(2.0f / 5.0f));
  p = fma(p, z, set1(2.0f / 3.0f));
  const F32x16 rest = fma(ef, set1(1.42860677e-6f), p * z * s);
  return zero_f32() - fma(ef, set1(0.693145752f), fma(set1(2.0f), s, rest));
}

// Best score of each lane so far and its id.
struct Best {
  F32x16 score;
  I32x16 id;
};

// z + G for block b with its words, -inf for what is not kept; updates best.
inline void score_block(const float* z, int b, const int32_t* words, const Kept& kept, Best& best) {
  const F32x16 none = set1(kMinusInfinity);
  int32_t in_order[kBlock];
  for (int j = 0; j < 16; ++j) {
    for (int k = 0; k < 4; ++k) in_order[4 * j + k] = words[16 * k + j];
  }
  for (int i = 0; i < kBlock; i += 16) {
    const F32x16 v = load(z + b * kBlock + i);
    const I32x16 ids = iota() + set1(static_cast<int32_t>(b * kBlock + i));
    const F32x16 score = kept.choose(v, ids, v - log(exponential_noise(load(in_order + i))), none);
    const Mask16 rises = score > best.score;
    best.score = select(rises, score, best.score);
    best.id = select(rises, ids, best.id);
  }
}

// 1 - u for the largest of 64 words.
inline float smallest_gap(const int32_t* words) {
  const I32x16 flip = set1(INT32_MIN);  // signed comparison of unsigned words
  I32x16 top = load(words) ^ flip;
  for (int i = 16; i < kBlock; i += 16) {
    const I32x16 w = load(words + i) ^ flip;
    top = select(w > top, w, top);
  }
  int32_t lanes[16];
  store(lanes, top);
  int32_t largest = lanes[0];
  for (int i = 1; i < 16; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  return (static_cast<float>(~(static_cast<uint32_t>(largest) ^ 0x80000000u)) + 0.5f) * 0x1p-32f;
}

// argmax of z + G over the tokens that are kept.
//
// A token can only reach a score `bound` that another has if 1 - u <= -log u <= exp(z - bound). So a block is skipped when exp(its
// maximum - bound) is below every possible 1 - u, and most others need only their largest word and no logarithm.
inline int32_t draw(const float* z, int n, const float* block_max, const Kept& kept, const SampleRow& row) {
  const int blocks = num_blocks(n);
  int32_t words[kBlock];
  const auto make_words = [&](int b) {
    philox_block(static_cast<uint32_t>(b) * (kBlock / 4), row.position, row.seed, words);
  };
  // The block of the largest z first, only for a bound that lets others be skipped; ids must be visited in ascending order.
  int peak = 0;
  while (block_max[peak] != kept.largest) ++peak;
  Best best{set1(kMinusInfinity), set1(0)};
  make_words(peak);
  score_block(z, peak, words, kept, best);
  float bound = reduce_max(best.score);
  best = {set1(kMinusInfinity), set1(0)};
  for (int begin = 0; begin < blocks; begin += 16) {
    float limits[16];
    // The allowance covers the rounding of scores, which grows with their size.
    const float allowance = 1e-3f + 1e-6f * (bound < 0.0f ? -bound : bound);
    store(limits, exp(min(load(block_max + begin) - set1(bound) + set1(allowance), set1(80.0f))));
    const int end = begin + 16 < blocks ? begin + 16 : blocks;
    for (int b = begin; b < end; ++b) {
      if (!kept.reaches(block_max[b]) || limits[b - begin] < 0x1p-33f) continue;
      make_words(b);
      if (smallest_gap(words) > limits[b - begin]) continue;
      score_block(z, b, words, kept, best);
      const float top = reduce_max(best.score);
      bound = top > bound ? top : bound;
    }
  }
  float scores[16];
  int32_t ids[16];
  store(scores, best.score);
  store(ids, best.id);
  int lane_of_best = 0;
  for (int i = 1; i < 16; ++i) {
    if (ranks_before(scores[i], ids[i], scores[lane_of_best], ids[lane_of_best])) lane_of_best = i;
  }
  return ids[lane_of_best];
}

}  // namespace
}  // namespace paceline::PL_ISA
