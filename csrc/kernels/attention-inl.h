// Causal attention over paged keys and values: FlashAttention's online softmax (Dao et al., 2205.14135) in splits of a fixed number of
// keys (Flash-Decoding), merged in order.
//
// What depends on the KV format is in kv_page-inl.h (how pages hold tokens) and attention_products-inl.h (scores and weighted values). A
// split covers keys [128 s, 128 (s+1)) of the sequence whatever the batch looks like, and splits are folded left to right, so a row's bits do
// not depend on who computed them.
// The query rows that read the same KV head (all heads of its group, several tokens of a prompt, sequences over one prefix) share each load.

namespace paceline::PL_ISA {
namespace {

inline float* at_row(float* base, int row, int stride) {
  return base + static_cast<size_t>(row) * static_cast<size_t>(stride);
}
inline const float* at_row(const float* base, int row, int stride) {
  return base + static_cast<size_t>(row) * static_cast<size_t>(stride);
}

// RMS norm of one head (when weight is not null), then rotation of its pairs (2i, 2i+1) (when cos is not null), then times factor. In
// place.
inline void rotate_head(float* x, int head_dim, const float* weight, float eps, const float* cos, const float* sin,
                        float factor) {
  F32x16 r = set1(1.0f);
  if (weight != nullptr) r = inverse_rms(x, head_dim, eps);
  for (int i = 0; i < head_dim; i += 16) {
    F32x16 v = load(x + i);
    if (weight != nullptr) v = v * r * load(weight + i);
    if (cos != nullptr) v = fma(swap_pairs(v), load(sin + i), v * load(cos + i));
    store(x + i, v * set1(factor));
  }
}

// A row's cosines and sines; null where the layer does not rotate.
struct Rotation {
  const float* cos;
  const float* sin;
};
inline Rotation rotation_of(const AttentionArgs& args, int row) {
  if (args.cos == nullptr) return {nullptr, nullptr};
  return {at_row(args.cos, row, args.shape->head_dim), at_row(args.sin, row, args.shape->head_dim)};
}

void key_value_write(const AttentionArgs& args, int sequence, int row, int kv_head) {
  const AttentionShape& s = *args.shape;
  const int d = s.head_dim;
  const int position = args.positions[row];
  const int32_t page = args.page_table[static_cast<size_t>(sequence) * static_cast<size_t>(args.page_table_stride) +
                                       static_cast<size_t>(position / kPageTokens)];
  float key[kMaxHeadDim];
  std::memcpy(key, at_row(args.k, row, args.qkv_stride) + kv_head * d, static_cast<size_t>(d) * sizeof(float));
  const Rotation rotation = rotation_of(args, row);
  rotate_head(key, d, args.k_norm, args.norm_eps, rotation.cos, rotation.sin, 1.0f);
  store_token(s.kind, head_page(args, page, kv_head), position % kPageTokens, d, key,
              at_row(args.v, row, args.qkv_stride) + kv_head * d);
}

void rotate_query(const AttentionArgs& args, int row, int head) {
  const int d = args.shape->head_dim;
  const Rotation rotation = rotation_of(args, row);
  rotate_head(at_row(args.q, row, args.qkv_stride) + head * d, d, args.q_norm, args.norm_eps, rotation.cos,
              rotation.sin, args.query_scale);
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

// Writes a row's finished values. The sink is folded last, whatever the splits were: exp(sink) more in the denominator.
inline void finish(const Partial& p, int head_dim, const float* sink, float* out) {
  F32x16 inverse = set1(1.0f / *p.sum);
  if (sink != nullptr) {
    const float top = *p.maximum > *sink ? *p.maximum : *sink;
    float factors[16] = {*p.maximum - top, *sink - top};
    store(factors, exp(load(factors)));
    inverse = set1(factors[0] / std::fma(*p.sum, factors[0], factors[1]));
  }
  for (int i = 0; i < head_dim; i += 16) store(out + i, load(p.values + i) * inverse);
}

inline const float* sink_of(const AttentionArgs& args, int head) {
  return args.sinks == nullptr ? nullptr : args.sinks + head;
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

[[gnu::noinline]] void cap_scores(float* scores, int padded, float cap) {
  for (int i = 0; i < padded; i += 16) store(scores + i, soft_capped(load(scores + i), set1(cap)));
}

template <class Pages>
inline void attention_of(const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
  const AttentionShape& s = *args.shape;
  const int d = s.head_dim;
  const int heads = unit.num_heads();
  const int first_head = unit.kv_head * s.group() + unit.head_begin;
  const int num_rows = (unit.row_end - unit.row_begin) * heads;
  const int partial_stride = d + 16;
  float* q = scratch;                               // [num_rows][d]
  float* scores = q + num_rows * d;                 // [num_rows][kSplitTokens]
  float* split = scores + num_rows * kSplitTokens;  // [num_rows][d + 16]
  float* running = split + num_rows * partial_stride;

  const auto partial = [&](float* base, int r) {
    float* p = base + r * partial_stride;
    return Partial{p, p + d, p + d + 1};
  };
  const int32_t* rows = args.unit_rows + unit.row_begin;
  for (int i = 0; i < unit.row_end - unit.row_begin; ++i)
    std::memcpy(q + i * heads * d, at_row(args.q, rows[i], args.qkv_stride) + first_head * d,
                static_cast<size_t>(heads * d) * sizeof(float));
  const auto leave = [&](int r, const float* base, int of_split) {
    std::memcpy(slot_of(args, rows[r / heads], first_head + r % heads, of_split), base + r * partial_stride,
                static_cast<size_t>(d + 2) * sizeof(float));
  };
  for (int r = 0; r < num_rows; ++r) *partial(running, r).sum = 0.0f;
  const Pages pages(num_rows, d, q, running + num_rows * partial_stride);

  const int32_t* page_ids =
      args.page_table + static_cast<size_t>(unit.sequence) * static_cast<size_t>(args.page_table_stride);
  const int last = args.positions[rows[unit.row_end - 1 - unit.row_begin]];
  for (int block = unit.split_begin; block < unit.split_end; ++block) {
    const int first_key = block * kSplitTokens;
    const int num_keys = last + 1 - first_key < kSplitTokens ? last + 1 - first_key : kSplitTokens;
    const int padded = round_up(num_keys, 16);
    const uint8_t* head_pages[kSplitTokens / kPageTokens];
    for (int k0 = 0; k0 < num_keys; k0 += kPageTokens)
      head_pages[k0 / kPageTokens] = head_page(args, page_ids[(first_key + k0) / kPageTokens], unit.kv_head);
    const bool goes_on = block + 1 < unit.split_end;
    const uint8_t* next =
        goes_on ? head_page(args, page_ids[(first_key + kSplitTokens) / kPageTokens], unit.kv_head) : nullptr;
    for (int k0 = 0; k0 < num_keys; k0 += kPageTokens) {
      const uint8_t* ahead = k0 + kPageTokens < num_keys ? head_pages[k0 / kPageTokens + 1] : next;
      pages.scores(head_pages[k0 / kPageTokens], num_keys - k0 > 16 ? 2 : 1, scores + k0, kSplitTokens, ahead);
    }
    for (int r = 0; r < num_rows; ++r) {
      const int position = args.positions[rows[r / heads]];
      const int oldest = args.window > 0 ? position - args.window + 1 : 0;
      const int begin = oldest > first_key ? oldest - first_key : 0;
      const int end = position + 1 - first_key < num_keys ? position + 1 - first_key : num_keys;
      const Partial p = partial(split, r);
      if (args.softcap != 0.0f) cap_scores(scores + r * kSplitTokens, padded, args.softcap);
      exponentiate(scores + r * kSplitTokens, begin, end, padded, p.maximum, p.sum);
      pages.round_numerators(r, scores + r * kSplitTokens, head_pages, begin, end, padded);
    }
    for (int k0 = 0; k0 < num_keys; k0 += kPageTokens) {
      const int count = num_keys - k0 < kPageTokens ? num_keys - k0 : kPageTokens;
      pages.values(head_pages[k0 / kPageTokens], k0, count, scores, kSplitTokens, split, partial_stride);
    }
    for (int r = 0; r < num_rows; ++r) {
      pages.finish_values(split + r * partial_stride, r);
      if (unit.result == UnitResult::splits)
        leave(r, split, block);
      else
        fold(partial(running, r), partial(split, r), d);
    }
  }
  if (unit.result == UnitResult::splits) return;
  for (int r = 0; r < num_rows; ++r) {
    if (unit.result == UnitResult::folded) {
      leave(r, running, unit.split_end - 1);
    } else {
      const int head = first_head + r % heads;
      finish(partial(running, r), d, sink_of(args, head),
             at_row(args.out, rows[r / heads], args.out_stride) + head * d);
    }
  }
}

// Computes one unit: writes finished rows to args.out, or partials to args.partials. scratch: attention_scratch_floats.
void attention(const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
  switch (args.shape->kind) {
    case KVKind::f16:
      return attention_of<FloatPages<F16Terms>>(args, unit, scratch);
    case KVKind::bf16:
      return attention_of<FloatPages<BF16Terms>>(args, unit, scratch);
    case KVKind::f32:
      return attention_of<FloatPages<F32Terms>>(args, unit, scratch);
    case KVKind::int8:
      return attention_of<Int8Pages>(args, unit, scratch);
  }
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
  finish(running, s.head_dim, sink_of(args, head), at_row(args.out, row, args.out_stride) + head * s.head_dim);
}

}  // namespace
}  // namespace paceline::PL_ISA
