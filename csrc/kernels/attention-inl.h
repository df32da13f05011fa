// Causal attention over paged keys and values: FlashAttention's online softmax (Dao et al., 2205.14135) in splits of a fixed number of
// keys (Flash-Decoding), merged in order.
//
// Scores have keys as lanes (key pages are stored transposed, [head_dim][16 tokens]), outputs have components as lanes; both are the same
// small product, out[row][16 lanes] = sum over i of a[row][i] * b[i][16 lanes], i in order. A split covers keys [128 s, 128 (s+1)) of the
// sequence whatever the batch looks like, and splits are folded left to right, so a row's bits do not depend on who computed them.
// The query rows that read the same KV head (all heads of its group, several tokens of a prompt, sequences over one prefix) share each load.

namespace paceline::PL_ISA {
namespace {

struct KeysF16 {
  static inline F32x16 get(const uint16_t* p) { return load_f16(p); }
};
struct KeysBF16 {
  static inline F32x16 get(const uint16_t* p) { return load_bf16(p); }
};
struct KeysF32 {
  static inline F32x16 get(const float* p) { return load(p); }
};

// Query rows that share one pass over keys or values, and how many blocks of 16 lanes such a pass takes when there are fewer rows: enough
// independent chains of multiply-adds to hide their latency, few enough for the registers.
#if defined(PL_SIMD_AVX512)
constexpr int kBlockRows = 12;
constexpr int kRowsOfTwoBlocks = 6;
#elif defined(PL_SIMD_AVX2)
constexpr int kBlockRows = 6;
constexpr int kRowsOfTwoBlocks = 0;
#else
constexpr int kBlockRows = 4;
constexpr int kRowsOfTwoBlocks = 0;
#endif

// out[m][16 t + lane] = (what is there or 0) + sum over i < count of a[m][i] * b[t * b_block + i * b_stride + lane], i in order
template <class Load, int M, int T, class B>
[[gnu::noinline]] void product(const float* a, int a_stride, const B* b, int b_stride, int b_block, int count,
                               bool resume, float* out, int out_stride) {
  F32x16 acc[M][T];
  unroll<M>([&](auto m) PL_INLINE {
    unroll<T>([&](auto t) PL_INLINE { acc[m][t] = resume ? load(out + m * out_stride + t * 16) : zero_f32(); });
  });
  for (int i = 0; i < count; ++i) {
    F32x16 v[T];
    unroll<T>([&](auto t) PL_INLINE { v[t] = Load::get(b + t * b_block + i * b_stride); });
    unroll<M>([&](auto m) PL_INLINE {
      const F32x16 x = set1(a[m * a_stride + i]);
      unroll<T>([&](auto t) PL_INLINE { acc[m][t] = fma(v[t], x, acc[m][t]); });
    });
  }
  unroll<M>([&](auto m)
                PL_INLINE { unroll<T>([&](auto t) PL_INLINE { store(out + m * out_stride + t * 16, acc[m][t]); }); });
}

// The product for any number of rows and blocks, `b_block` values apart.
template <class Load, class B>
inline void products(int rows, int blocks, const float* a, int a_stride, const B* b, int b_stride, int b_block,
                     int count, bool resume, float* out, int out_stride) {
  for_blocks_of<kBlockRows>(0, rows, [&]<int M>(int row) {
    const float* left = a + row * a_stride;
    float* to = out + row * out_stride;
    int block = 0;
    if constexpr (M <= kRowsOfTwoBlocks)
      for (; block + 2 <= blocks; block += 2)
        product<Load, M, 2>(left, a_stride, b + block * b_block, b_stride, b_block, count, resume, to + block * 16,
                            out_stride);
    for (; block < blocks; ++block)
      product<Load, M, 1>(left, a_stride, b + block * b_block, b_stride, b_block, count, resume, to + block * 16,
                          out_stride);
  });
}

inline float* at_row(float* base, int row, int stride) {
  return base + static_cast<size_t>(row) * static_cast<size_t>(stride);
}
inline const float* at_row(const float* base, int row, int stride) {
  return base + static_cast<size_t>(row) * static_cast<size_t>(stride);
}

template <class Load>
inline void expand_page(const uint16_t* from, int count, float* to) {
  for (int i = 0; i < count; i += 16) store(to + i, Load::get(from + i));
}

inline uint16_t* head_page(const AttentionArgs& args, int32_t page, int kv_head) {
  const AttentionShape& s = *args.shape;
  return args.kv + static_cast<size_t>(page) * s.page_values() +
         (static_cast<size_t>(args.layer) * static_cast<size_t>(s.num_kv_heads) + static_cast<size_t>(kv_head)) *
             s.head_page_values();
}

// The largest finite f16: a key or value beyond it is stored as this, so that pages never hold an infinity.
constexpr float kLargestStored = 65504.0f;

inline void store_16bit(KVKind kind, uint16_t* to, F32x16 x) {
  if (kind == KVKind::f16)
    store_f16(to, max(min(x, set1(kLargestStored)), set1(-kLargestStored)));
  else
    store_bf16(to, x);
}

// RMS norm of one head (when weight is not null), then rotation of its pairs (2i, 2i+1), then times factor. In place.
inline void rotate_head(float* x, int head_dim, const float* weight, float eps, const float* cos, const float* sin,
                        float factor) {
  F32x16 r = set1(1.0f);
  if (weight != nullptr) {
    F32x16 squares = zero_f32();
    for (int i = 0; i < head_dim; i += 16) {
      const F32x16 v = load(x + i);
      squares = fma(v, v, squares);
    }
    r = set1(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(head_dim) + eps));
  }
  for (int i = 0; i < head_dim; i += 16) {
    F32x16 v = load(x + i);
    if (weight != nullptr) v = v * r * load(weight + i);
    const F32x16 rotated = fma(swap_pairs(v), load(sin + i), v * load(cos + i));
    store(x + i, rotated * set1(factor));
  }
}

// Rotates the query heads of one KV head's group, rotates its key, and stores key and value in the row's page.
void rope_write(const AttentionArgs& args, int sequence, int row, int kv_head) {
  const AttentionShape& s = *args.shape;
  const int d = s.head_dim;
  const float* cos = at_row(args.cos, row, d);
  const float* sin = at_row(args.sin, row, d);
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  for (int h = 0; h < s.group(); ++h)
    rotate_head(at_row(args.q, row, args.qkv_stride) + (kv_head * s.group() + h) * d, d, args.q_norm, args.norm_eps,
                cos, sin, factor);

  const int position = args.positions[row];
  const int32_t page = args.page_table[static_cast<size_t>(sequence) * static_cast<size_t>(args.page_table_stride) +
                                       static_cast<size_t>(position / kPageTokens)];
  uint16_t* keys = head_page(args, page, kv_head);
  const int token = position % kPageTokens;
  uint16_t* key_lane = keys + (token / 16) * 16 * d + token % 16;
  uint16_t* value_row = keys + kPageTokens * d + token * d;
  float key[256];
  std::memcpy(key, at_row(args.k, row, args.qkv_stride) + kv_head * d, static_cast<size_t>(d) * sizeof(float));
  rotate_head(key, d, args.k_norm, args.norm_eps, cos, sin, 1.0f);
  const float* value = at_row(args.v, row, args.qkv_stride) + kv_head * d;
  for (int i = 0; i < d; i += 16) {
    uint16_t lanes[16];
    store_16bit(s.kind, lanes, load(key + i));
    for (int j = 0; j < 16; ++j) key_lane[(i + j) * 16] = lanes[j];
    store_16bit(s.kind, value_row + i, load(value + i));
  }
}

// Running softmax of one query row: values [head_dim], then its maximum and its sum.
struct Partial {
  float* values;
  float* maximum;
  float* sum;
};

// Folds a split's result into the running one, on the right.
inline void fold(Partial into, Partial split, int head_dim) {
  if (*into.sum == 0.0f) {
    std::memcpy(into.values, split.values, static_cast<size_t>(head_dim) * sizeof(float));
    *into.maximum = *split.maximum;
    *into.sum = *split.sum;
    return;
  }
  if (*split.sum == 0.0f) return;
  const float top = *into.maximum > *split.maximum ? *into.maximum : *split.maximum;
  float factors[16] = {*into.maximum - top, *split.maximum - top};
  store(factors, exp(load(factors)));
  const float keep = factors[0], add = factors[1];
  for (int i = 0; i < head_dim; i += 16)
    store(into.values + i, fma(load(split.values + i), set1(add), load(into.values + i) * set1(keep)));
  *into.sum = std::fma(*split.sum, add, *into.sum * keep);
  *into.maximum = top;
}

inline void finish(const Partial& p, int head_dim, float* out) {
  const F32x16 inverse = set1(1.0f / *p.sum);
  for (int i = 0; i < head_dim; i += 16) store(out + i, load(p.values + i) * inverse);
}

// Softmax numerators of one row's scores in place; lanes outside [begin, end) become 0. Returns (maximum, sum) through the pointers.
inline void exponentiate(float* scores, int begin, int end, int padded, float* maximum, float* sum) {
  if (begin >= end) {
    std::memset(scores, 0, static_cast<size_t>(padded) * sizeof(float));
    *maximum = 0.0f;
    *sum = 0.0f;
    return;
  }
  const F32x16 lowest = set1(-INFINITY);
  F32x16 top = lowest;
  for (int i = 0; i < padded; i += 16) {
    F32x16 v = load(scores + i);
    if (i + 16 > end) v = select(first_lanes(end - i), v, lowest);
    if (i < begin) v = select(first_lanes(begin - i), lowest, v);
    store(scores + i, v);
    top = max(v, top);
  }
  const float m = reduce_max(top);
  F32x16 total = zero_f32();
  for (int i = 0; i < padded; i += 16) {
    const F32x16 e = exp(load(scores + i) - set1(m));
    store(scores + i, e);
    total = total + e;
  }
  *maximum = m;
  *sum = reduce_add(total);
}

// The partial of one split of a row and head: values [head_dim], maximum, sum.
inline float* slot_of(const AttentionArgs& args, int row, int head, int split) {
  const AttentionShape& s = *args.shape;
  const size_t slot = static_cast<size_t>(args.row_slots[row] + split);
  return args.partials +
         (slot * static_cast<size_t>(s.num_heads) + static_cast<size_t>(head)) * static_cast<size_t>(s.head_dim + 16);
}

template <class Stored>
inline void attention_of(const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
  const AttentionShape& s = *args.shape;
  const int d = s.head_dim;
  const int group = s.group();
  const int num_rows = (unit.row_end - unit.row_begin) * group;
  const int partial_stride = d + 16;
  float* q = scratch;                               // [num_rows][d]
  float* scores = q + num_rows * d;                 // [num_rows][kSplitTokens]
  float* split = scores + num_rows * kSplitTokens;  // [num_rows][d + 16]
  float* running = split + num_rows * partial_stride;
  float* page_f32 = running + num_rows * partial_stride;  // [32 * d]: keys, then values
  // Many rows repay turning a page into floats once; the values are the same either way.
  const bool expand = num_rows > kBlockRows;

  const auto partial = [&](float* base, int r) {
    float* p = base + r * partial_stride;
    return Partial{p, p + d, p + d + 1};
  };
  const int32_t* rows = args.unit_rows + unit.row_begin;
  for (int i = 0; i < unit.row_end - unit.row_begin; ++i)
    std::memcpy(q + i * group * d, at_row(args.q, rows[i], args.qkv_stride) + unit.kv_head * group * d,
                static_cast<size_t>(group * d) * sizeof(float));
  const auto leave = [&](int r, const float* base, int of_split) {
    std::memcpy(slot_of(args, rows[r / group], unit.kv_head * group + r % group, of_split), base + r * partial_stride,
                static_cast<size_t>(d + 2) * sizeof(float));
  };
  for (int r = 0; r < num_rows; ++r) *partial(running, r).sum = 0.0f;

  const int32_t* pages =
      args.page_table + static_cast<size_t>(unit.sequence) * static_cast<size_t>(args.page_table_stride);
  const int last = args.positions[rows[unit.row_end - 1 - unit.row_begin]];
  for (int block = unit.split_begin; block < unit.split_end; ++block) {
    const int first_key = block * kSplitTokens;
    const int num_keys = last + 1 - first_key < kSplitTokens ? last + 1 - first_key : kSplitTokens;
    const int padded = round_up(num_keys, 16);
    for (int k0 = 0; k0 < num_keys; k0 += kPageTokens) {
      const uint16_t* keys = head_page(args, pages[(first_key + k0) / kPageTokens], unit.kv_head);
      const int blocks = num_keys - k0 > 16 ? 2 : 1;
      if (expand) {
        expand_page<Stored>(keys, blocks * 16 * d, page_f32);
        products<KeysF32>(num_rows, blocks, q, d, page_f32, 16, 16 * d, d, false, scores + k0, kSplitTokens);
      } else {
        products<Stored>(num_rows, blocks, q, d, keys, 16, 16 * d, d, false, scores + k0, kSplitTokens);
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      const int position = args.positions[rows[r / group]];
      const int begin = s.window > 0 && position - s.window + 1 > first_key ? position - s.window + 1 - first_key : 0;
      const int end = position + 1 - first_key < num_keys ? position + 1 - first_key : num_keys;
      const Partial p = partial(split, r);
      exponentiate(scores + r * kSplitTokens, begin, end, padded, p.maximum, p.sum);
    }
    for (int k0 = 0; k0 < num_keys; k0 += kPageTokens) {
      const uint16_t* values = head_page(args, pages[(first_key + k0) / kPageTokens], unit.kv_head) + kPageTokens * d;
      const int count = num_keys - k0 < kPageTokens ? num_keys - k0 : kPageTokens;
      if (expand) {
        expand_page<Stored>(values, count * d, page_f32);
        products<KeysF32>(num_rows, d / 16, scores + k0, kSplitTokens, page_f32, d, 16, count, k0 > 0, split,
                          partial_stride);
      } else {
        products<Stored>(num_rows, d / 16, scores + k0, kSplitTokens, values, d, 16, count, k0 > 0, split,
                         partial_stride);
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      if (unit.result == UnitResult::splits)
        leave(r, split, block);
      else
        fold(partial(running, r), partial(split, r), d);
    }
  }
  if (unit.result == UnitResult::splits) return;
  for (int r = 0; r < num_rows; ++r) {
    if (unit.result == UnitResult::folded)
      leave(r, running, unit.split_end - 1);
    else
      finish(partial(running, r), d,
             at_row(args.out, rows[r / group], args.out_stride) + (unit.kv_head * group + r % group) * d);
  }
}

// Computes one unit: writes finished rows to args.out, or partials to args.partials. scratch: attention_scratch_floats.
void attention(const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
  if (args.shape->kind == KVKind::f16)
    attention_of<KeysF16>(args, unit, scratch);
  else
    attention_of<KeysBF16>(args, unit, scratch);
}

// Folds the partials of splits [begin, end) of one row and head and writes the finished values.
void attention_merge(const AttentionArgs& args, int row, int head, int begin, int end) {
  const AttentionShape& s = *args.shape;
  const auto partial = [&](int split) {
    float* p = slot_of(args, row, head, split);
    return Partial{p, p + s.head_dim, p + s.head_dim + 1};
  };
  const Partial running = partial(begin);
  for (int split = begin + 1; split < end; ++split) fold(running, partial(split), s.head_dim);
  finish(running, s.head_dim, at_row(args.out, row, args.out_stride) + head * s.head_dim);
}

}  // namespace
}  // namespace paceline::PL_ISA
