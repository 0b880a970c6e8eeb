// Attention of one part of a span: a flash attention whose K tile is fetched, rotated and packed once and then serves
// all rows and all query heads of its kv head.
//
// With bf16 products: scores = Q K^T and sum += P V go through a bf16 GEMM whose right operand is packed in pairs of
// rows. Rotated K and the weights P are rounded to bf16 once each, sums are float. Without: all in float.
//
// Row blocks whose rows see nothing of a tile skip it, so a stream whose later rows see more, or a window, costs what
// it must.

#include "span_attention_wide.inl"

namespace hypic {
namespace HYPIC_ISA {

HYPIC_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
HYPIC_INLINE int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

struct Scratch {
  char *query, *packed, *keys, *values, *row, *weights, *wide;
  float* scores;
};

HYPIC_INLINE size_t lay_out(const Span& s, int max_rows, char* base, Scratch* out) {
  const size_t element = s.gemm ? 2 : 4;
  size_t at = 0;
  auto take = [&](size_t bytes) {
    char* p = base + at;
    at += round_up(bytes, 64);
    return p;
  };
  Scratch x;
  x.query = take(element * s.size * round_up(max_rows * (s.heads / s.kv_heads), ROW_BLOCK));
  // Of each kv head's few rows: they may begin in one block of 16 and end in the next.
  x.packed = take(element * s.size * 2 * 16 * s.kv_heads);
  x.keys = take(element * s.size * TILE);
  x.values = take(element * s.size * TILE);
  x.row = take(element * s.size * 16 * s.kv_heads);
  x.weights = take(element * ROW_BLOCK * TILE);
  x.scores = (float*)take(sizeof(float) * ROW_BLOCK * TILE);
  // K and V of a tile in the query's dtype, and where its columns lie there.
  x.wide = take(s.pool.fp8 ? (2 * bytes_of(s.dtype) * s.size * s.kv_heads + sizeof(int64_t)) * TILE : 0);
  if (out) *out = x;
  return at;
}

static size_t span_scratch(const Span& s, int max_rows) { return lay_out(s, max_rows, nullptr, nullptr); }

HYPIC_INLINE float read_one(const void* p, DType t, ptrdiff_t i) {
  if (t == DType::f32) return ((const float*)p)[i];
  if (t == DType::bf16) return to_float(((const bf16*)p)[i]);
  return _cvtsh_ss(((const fp16*)p)[i]);
}

HYPIC_INLINE vf read(const void* p, DType t, ptrdiff_t i) {
  if (t == DType::f32) return vload((const float*)p + i);
  if (t == DType::bf16) return vload_bf16((const bf16*)p + i);
  return vload_fp16((const fp16*)p + i);
}

HYPIC_INLINE bf16 to_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return (bf16)((bits | 0x400000) >> 16);
  return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

HYPIC_INLINE void write_one(float* p, int i, float x) { p[i] = x; }
HYPIC_INLINE void write_one(bf16* p, int i, float x) { p[i] = to_bf16(x); }
HYPIC_INLINE void write(float* p, int i, vf x) { vstore(p + i, x); }
HYPIC_INLINE void write(bf16* p, int i, vf x) { vstore_bf16(p + i, x); }

// Key `column` of a head as a row of E (float, or bf16 where the products are).
template <DType dtype, class E>
HYPIC_INLINE void fetch_key(const Span& s, int64_t column, int kv_head, E* out) {
  const int size = s.size;
  if (s.cache.cache) {
    const CacheColumns& c = s.cache;
    const ptrdiff_t block = c.blocks[column / c.block_size] * c.block_stride;
    const int32_t* index = c.key + ((column % c.block_size) * s.kv_heads + kv_head) * size;
    for (int d = 0; d < size; ++d) write_one(out, d, read_one(c.cache, dtype, block + index[d]));
    return;
  }
  const PoolColumns& c = s.pool;
  const ptrdiff_t base = c.slots[column] * c.key_stride + (ptrdiff_t)kv_head * size;
  const int rotary = c.table ? c.rotary : 0, half = rotary / 2;
  if (half) {
    const ptrdiff_t angle = c.positions[column] * c.table_stride;
    int i = 0;
    if (c.neox) {
      for (; i + W <= half; i += W) {
        const vf cos = read(c.table, c.table_dtype, angle + i), sin = read(c.table, c.table_dtype, angle + half + i);
        const vf a = read(c.key, dtype, base + i), b = read(c.key, dtype, base + half + i);
        write(out, i, vsub(vmul(a, cos), vmul(b, sin)));
        write(out, half + i, vfma(a, sin, vmul(b, cos)));
      }
    }
    const int first = c.neox ? 1 : 2, second = c.neox ? half : 1;
    for (; i < half; ++i) {
      const float cos = read_one(c.table, c.table_dtype, angle + i);
      const float sin = read_one(c.table, c.table_dtype, angle + half + i);
      const float a = read_one(c.key, dtype, base + i * first);
      const float b = read_one(c.key, dtype, base + i * first + second);
      write_one(out, i * first, a * cos - b * sin);
      write_one(out, i * first + second, b * cos + a * sin);
    }
  }
  int d = rotary;
  if constexpr (dtype == DType::bf16 && sizeof(E) == 2) {
    __builtin_memcpy(out + d, (const bf16*)c.key + base + d, (size - d) * sizeof(bf16));
    return;
  }
  for (; d + W <= size; d += W) write(out, d, read(c.key, dtype, base + d));
  for (; d < size; ++d) write_one(out, d, read_one(c.key, dtype, base + d));
}

#if HYPIC_WIDTH == 16
// out[j * out_stride + i] = in[i * in_stride + j] for i, j < 16; strides in words.
HYPIC_INLINE void transpose16(const int32_t* in, ptrdiff_t in_stride, int32_t* out, ptrdiff_t out_stride) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(in + i * in_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(out + i * out_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(out + (i + 4) * out_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(out + (i + 8) * out_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_si512(out + (i + 12) * out_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}
#endif

// rows [16, words] (a pair of bf16 or one float each) -> out [words, stride], columns first..first+15.
HYPIC_INLINE void transpose_rows(const int32_t* rows, int words, int32_t* out, ptrdiff_t stride) {
  int w = 0;
#if HYPIC_WIDTH == 16
  for (; w + 16 <= words; w += 16) transpose16(rows + w, words, out + w * stride, stride);
#endif
  for (; w < words; ++w)
    for (int j = 0; j < 16; ++j) out[w * stride + j] = rows[j * words + w];
}

// Where K of 16 tokens, the first `column`, and V of a token (and the next) lie in vLLM's cache, in elements.
HYPIC_INLINE ptrdiff_t key_group(const Span& s, int64_t column, int kv_head) {
  const CacheColumns& c = s.cache;
  return c.blocks[column / c.block_size] * c.block_stride + c.key_at.base + column % c.block_size / 16 * c.key_at.token +
         kv_head * c.key_at.head;
}

HYPIC_INLINE ptrdiff_t value_group(const Span& s, int64_t column, int kv_head) {
  const CacheColumns& c = s.cache;
  const int tokens = c.layout == Layout::pairs ? 2 : 1;
  return c.blocks[column / c.block_size] * c.block_stride + c.value_at.base +
         column % c.block_size / tokens * c.value_at.token + kv_head * c.value_at.head;
}

// As `pack_keys`, of a cache that lies as the packed keys do: c0 and blocks are multiples of 16.
static void pack_pairs(const Span& s, int kv_head, int64_t c0, int n, int padded, bf16* out) {
  for (int j = 0; j < padded; j += 16) {
    const size_t here = j < n ? at_most(16, n - j) * sizeof(uint32_t) : 0;
    const bf16* from = (const bf16*)s.cache.cache + key_group(s, here ? c0 + j : c0, kv_head);
    for (int d = 0; d < s.size; d += 2, from += s.cache.key_at.dim) {
      char* to = (char*)(out + (ptrdiff_t)d * padded + 2 * j);
      __builtin_memcpy(to, from, here);
      if (here < 64) __builtin_memset(to + here, 0, 64 - here);
    }
  }
}

// As `pack_keys`, of a cache in which K of neighbouring tokens lies side by side: c0 and blocks are multiples of 16.
template <DType dtype, class E>
static void pack_lines(const Span& s, int kv_head, int64_t c0, int n, int padded, E* out) {
  const ptrdiff_t dim = s.cache.key_at.dim;
  for (int j = 0; j < padded; j += 16) {
    const int here = j < n ? (int)at_most(16, n - j) : 0;
    const ptrdiff_t base = key_group(s, here ? c0 + j : c0, kv_head);
    if constexpr (sizeof(E) == 2) {
      for (int d = 0; d < s.size; d += 2) {
        const bf16 *a = (const bf16*)s.cache.cache + base + d * dim, *b = a + dim;
        uint32_t* to = (uint32_t*)out + (ptrdiff_t)(d / 2) * padded + j;
        if (here == 16)
          for (int i = 0; i < 16; ++i) to[i] = a[i] | (uint32_t)b[i] << 16;
        else
          for (int i = 0; i < 16; ++i) to[i] = i < here ? a[i] | (uint32_t)b[i] << 16 : 0;
      }
    } else {
      for (int d = 0; d < s.size; ++d) {
        float* to = out + (ptrdiff_t)d * padded + j;
        int i = 0;
        for (; i + W <= here; i += W) vstore(to + i, read(s.cache.cache, dtype, base + d * dim + i));
        for (; i < 16; ++i) to[i] = i < here ? read_one(s.cache.cache, dtype, base + d * dim + i) : 0;
      }
    }
  }
}

// K of columns [c0, c0 + n) as [size(/2), padded(, 2)]; columns n..padded are 0.
template <DType dtype, class E>
static void pack_keys(const Span& s, int kv_head, int64_t c0, int n, int padded, E* row, E* out) {
  if (s.cache.cache && s.cache.layout == Layout::lines) return pack_lines<dtype>(s, kv_head, c0, n, padded, out);
  if constexpr (sizeof(E) == 2)
    if (s.cache.cache && s.cache.layout == Layout::pairs) return pack_pairs(s, kv_head, c0, n, padded, out);
  const int words = s.size * (int)sizeof(E) / 4;
  for (int j = 0; j < padded; j += 16) {
    const int here = (int)at_most(16, n - j);
    for (int i = 0; i < here; ++i) fetch_key<dtype>(s, c0 + j + i, kv_head, row + i * s.size);
    if (here < 16) {
      const int from = here < 0 ? 0 : here;
      __builtin_memset(row + from * s.size, 0, (16 - from) * s.size * sizeof(E));
    }
    transpose_rows((const int32_t*)row, words, (int32_t*)out + j, padded);
  }
}

// Value `column` of a head where it lies in vLLM's cache, as a row of floats.
template <DType dtype>
HYPIC_INLINE void fetch_value(const Span& s, int64_t column, int kv_head, float* out) {
  const CacheColumns& c = s.cache;
  const ptrdiff_t block = c.blocks[column / c.block_size] * c.block_stride;
  const int32_t* index = c.value + ((column % c.block_size) * s.kv_heads + kv_head) * s.size;
  for (int d = 0; d < s.size; ++d) out[d] = read_one(c.cache, dtype, block + index[d]);
}

// Where V of a column lies as a row, in elements: in the pool, or in a cache of lines.
HYPIC_INLINE ptrdiff_t value_row(const Span& s, int64_t column, int kv_head) {
  if (s.cache.cache) return value_group(s, column, kv_head);
  return s.pool.slots[column] * s.pool.value_stride + (ptrdiff_t)kv_head * s.size;
}

// Of columns j and j + 1 of n, which count: as a mask of a pair of bf16.
HYPIC_INLINE uint32_t pair_mask(int j, int hidden, int n) {
  return (hidden <= j && j < n ? 0xffffu : 0u) | (hidden <= j + 1 && j + 1 < n ? 0xffff0000u : 0u);
}

HYPIC_INLINE const void* values_of(const Span& s) { return s.cache.cache ? s.cache.cache : s.pool.value; }

// V of columns [c0, c0 + n) as pairs of rows [padded / 2, size, 2]; the first `hidden` of them are 0: nobody sees them,
// and vLLM may have given their blocks away.
static void pack_values_bf16(const Span& s, int kv_head, int64_t c0, int hidden, int n, int padded, bf16* out) {
  const int size = s.size;
  if (s.cache.cache && s.cache.layout == Layout::pairs) {
    for (int j = 0; j < padded; j += 2) {
      uint32_t* to = (uint32_t*)out + (ptrdiff_t)(j / 2) * size;
      const uint32_t mask = pair_mask(j, hidden, n);
      const bf16* from = (const bf16*)s.cache.cache + value_group(s, mask ? c0 + j : c0, kv_head);
      for (int d = 0; d < size; d += 16, from += s.cache.value_at.dim)
        for (int i = 0; i < 16; ++i) to[d + i] = mask & ((const uint32_t*)from)[i];
    }
    return;
  }
  if (s.cache.cache && s.cache.layout == Layout::anywhere) {
    float row[size];
    for (int j = 0; j < padded; ++j) {
      const bool there = hidden <= j && j < n;
      if (there) fetch_value<DType::bf16>(s, c0 + j, kv_head, row);
      for (int d = 0; d < size; ++d) out[(ptrdiff_t)(j / 2 * size + d) * 2 + j % 2] = there ? to_bf16(row[d]) : 0;
    }
    return;
  }
  for (int j = 0; j < padded; j += 2) {
    uint32_t* to = (uint32_t*)out + (ptrdiff_t)(j / 2) * size;
    const bf16* from = (const bf16*)values_of(s);
    const bf16* a = hidden <= j && j < n ? from + value_row(s, c0 + j, kv_head) : nullptr;
    const bf16* b = hidden <= j + 1 && j + 1 < n ? from + value_row(s, c0 + j + 1, kv_head) : nullptr;
    int d = 0;
    if (a && b) {
#if HYPIC_WIDTH == 16
      for (; d + 16 <= size; d += 16) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(a + d)));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(b + d)));
        _mm512_storeu_si512(to + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
#endif
    }
    for (; d < size; ++d) to[d] = (a ? a[d] : 0u) | ((uint32_t)(b ? b[d] : 0u) << 16);
  }
}

template <DType dtype>
static void pack_values_float(const Span& s, int kv_head, int64_t c0, int hidden, int n, int padded, float* out) {
  const int size = s.size;
  for (int j = 0; j < padded; ++j) {
    float* to = out + (ptrdiff_t)j * size;
    if (j < hidden || j >= n) {
      __builtin_memset(to, 0, size * sizeof(float));
      continue;
    }
    if (s.cache.cache && s.cache.layout != Layout::lines) {
      fetch_value<dtype>(s, c0 + j, kv_head, to);
      continue;
    }
    const void* from = values_of(s);
    const ptrdiff_t base = value_row(s, c0 + j, kv_head);
    int d = 0;
    for (; d + W <= size; d += W) vstore(to + d, read(from, dtype, base + d));
    for (; d < size; ++d) to[d] = read_one(from, dtype, base + d);
  }
}

// Products [padded] of one row -> weights e^(score - top); columns [hidden, seen) count. Returns by how much earlier sums
// shrink.
template <class E>
HYPIC_INLINE float softmax_row(const Span& s, float* scores, int hidden, int seen, int padded, E* weights, float* top,
                               float* total) {
  if (seen <= 0 || hidden >= seen) {
    __builtin_memset(weights, 0, padded * sizeof(E));
    return 1.0f;
  }
  float scale = s.scale;
  if (s.soft_cap > 0) {
    const vf inner = vset(scale / s.soft_cap), cap = vset(s.soft_cap);
    for (int j = 0; j < padded; j += W) vstore(scores + j, vmul(cap, vtanh(vmul(vload(scores + j), inner))));
    scale = 1;
  }
  const vf nothing = vset(-__builtin_inff()), by = vset(scale);
  vf highest = nothing;
  for (int j = 0; j < padded; j += W) {
    vf x = vkeep(vmul(vload(scores + j), by), seen - j, nothing);
    if (hidden > j) x = vkeep(nothing, hidden - j, x);
    vstore(scores + j, x);
    highest = vmax(highest, x);
  }
  const float before = *top, after = before > vtop(highest) ? before : vtop(highest);
  const vf shift = vset(after);
  vf sum = vzero();
  for (int j = 0; j < padded; j += W) {
    const vf w = vexp(vsub(vload(scores + j), shift));
    sum = vadd(sum, w);
    write(weights, j, w);
  }
  // No row has seen anything yet: nothing to shrink, and -inf - -inf must not be formed.
  const float shrink = before == -__builtin_inff() ? 0.0f : __builtin_expf(before - after);
  *total = *total * shrink + vsum(sum);
  *top = after;
  return shrink;
}

HYPIC_INLINE void multiply(const Span& s, int M, int N, int K, const bf16* A, int lda, const bf16* B, int ldb, float* C,
                           int ldc, bool add) {
  s.gemm(M, N, K, lda, ldb, ldc, add, A, B, C);
}

HYPIC_INLINE void multiply(const Span&, int M, int N, int K, const float* A, int lda, const float* B, int ldb, float* C,
                           int ldc, bool add) {
  if (add)
    gemm<Into::add>(M, N, K, A, lda, 1, B, ldb, C, ldc);
  else
    gemm<Into::set>(M, N, K, A, lda, 1, B, ldb, C, ldc);
}

HYPIC_INLINE int64_t furthest_seen(const Span& s, int first, int last) {
  int64_t most = 0;
  for (int r = first; r <= last; ++r)
    if (s.visible_kv_lens[r] > most) most = s.visible_kv_lens[r];
  return most;
}

HYPIC_INLINE int64_t least_hidden(const Span& s, int first, int last) {
  if (!s.hidden_kv_lens) return 0;
  int64_t least = s.hidden_kv_lens[first];
  for (int r = first + 1; r <= last; ++r) least = at_most(least, s.hidden_kv_lens[r]);
  return least;
}

// Of the n columns from c0 on, how many at their beginning a row does not see.
HYPIC_INLINE int hidden_of(const Span& s, int row, int64_t c0, int n) {
  return s.hidden_kv_lens ? (int)at_most(n, s.hidden_kv_lens[row] - c0) : 0;
}

// The column that a part begins at: those before it are hidden from all of its rows.
HYPIC_INLINE int64_t first_column(const SpanPart& p, int64_t hidden) {
  return hidden <= p.column0 ? p.column0 : first_read(hidden);
}

template <DType dtype, class E>
static void run_part(const Span& s, const SpanPart& p, char* scratch) {
  Scratch x;
  const int group = s.heads / s.kv_heads, size = s.size, rows = (p.row1 - p.row0) * group;
  lay_out(s, p.row1 - p.row0, scratch, &x);
  E *query = (E*)x.query, *keys = (E*)x.keys, *values = (E*)x.values, *weights = (E*)x.weights;
  for (int r = 0; r < rows; ++r) {
    const ptrdiff_t base =
        (p.row0 + r / group) * s.query_stride + (ptrdiff_t)(p.kv_head * group + r % group) * size;
    int d = 0;
    for (; d + W <= size; d += W) write(query + (ptrdiff_t)r * size, d, read(s.query, dtype, base + d));
    for (; d < size; ++d) write_one(query + (ptrdiff_t)r * size, d, read_one(s.query, dtype, base + d));
    p.top[r] = -__builtin_inff();
    p.total[r] = 0.0f;
  }
  if (p.sum) __builtin_memset(p.sum, 0, (size_t)rows * size * sizeof(float));
  const int64_t hidden = least_hidden(s, p.row0, p.row1 - 1);
  for (int64_t c0 = first_column(p, hidden); c0 < p.column1; c0 += TILE) {
    const int n = (int)at_most(TILE, p.column1 - c0), padded = (int)round_up(n, 32);
    bool packed = false;
    for (int r0 = 0; r0 < rows; r0 += ROW_BLOCK) {
      const int count = (int)at_most(ROW_BLOCK, rows - r0);
      const int first = p.row0 + r0 / group, last = p.row0 + (r0 + count - 1) / group;
      if (furthest_seen(s, first, last) <= c0 || least_hidden(s, first, last) >= c0 + n) continue;
      if (!packed) {
        Span copy;
        const TileColumns tile = columns_of(s, p.kv_head, 1, c0, n, x.wide, &copy);
        pack_keys<dtype>(*tile.span, tile.head, tile.column, n, padded, (E*)x.row, keys);
        if (p.sum) {
          const int unseen = (int)at_most(n, hidden - c0);
          if constexpr (sizeof(E) == 2)
            pack_values_bf16(*tile.span, tile.head, tile.column, unseen, n, padded, values);
          else
            pack_values_float<dtype>(*tile.span, tile.head, tile.column, unseen, n, padded, values);
        }
        packed = true;
      }
      multiply(s, count, padded, size, query + (ptrdiff_t)r0 * size, size, keys, padded, x.scores, padded, false);
      for (int i = 0; i < count; ++i) {
        const int r = r0 + i;
        const int row = p.row0 + r / group, seen = (int)at_most(n, s.visible_kv_lens[row] - c0);
        const float shrink = softmax_row(s, x.scores + (ptrdiff_t)i * padded, hidden_of(s, row, c0, n), seen, padded,
                                         weights + (ptrdiff_t)i * padded, p.top + r, p.total + r);
        if (p.sum && shrink != 1.0f) {
          float* sum = p.sum + (ptrdiff_t)r * size;
          const vf by = vset(shrink);
          int d = 0;
          for (; d + W <= size; d += W) vstore(sum + d, vmul(vload(sum + d), by));
          for (; d < size; ++d) sum[d] *= shrink;
        }
      }
      if (p.sum)
        multiply(s, count, size, padded, weights, padded, values, size, p.sum + (ptrdiff_t)r0 * size, size, true);
    }
  }
}

}  // namespace HYPIC_ISA
}  // namespace hypic

#if HYPIC_BF16
#include "span_attention_few.inl"
#endif
#if HYPIC_TILES
#include "span_attention_tiles.inl"
#endif

namespace hypic {
namespace HYPIC_ISA {

static void span_part(const Span& s, const SpanPart& p, char* scratch) {
#if HYPIC_TILES
  if (serves_few(s, p) && s.pool.key) return run_few<TileProducts>(s, p, scratch);
#endif
#if HYPIC_BF16
  if (serves_few(s, p)) return run_few<VectorProducts>(s, p, scratch);
#endif
  const ptrdiff_t rows = (ptrdiff_t)(p.row1 - p.row0) * (s.heads / s.kv_heads);
  SpanPart one = p;
  one.kv_heads = 1;
  for (int h = 0; h < p.kv_heads; ++h) {
    if (s.dtype == DType::bf16 && s.gemm)
      run_part<DType::bf16, bf16>(s, one, scratch);
    else if (s.dtype == DType::bf16)
      run_part<DType::bf16, float>(s, one, scratch);
    else if (s.dtype == DType::f16)
      run_part<DType::f16, float>(s, one, scratch);
    else
      run_part<DType::f32, float>(s, one, scratch);
    ++one.kv_head;
    if (one.sum) one.sum += rows * s.size;
    one.top += rows;
    one.total += rows;
  }
}

}  // namespace HYPIC_ISA
}  // namespace hypic
