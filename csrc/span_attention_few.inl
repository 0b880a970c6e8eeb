// Few rows: decode, where the products are of bf16.
//
// Packing a tile pays only when many rows use it. For a few rows K rows are used as they lie (after rotation): scores are
// dot products whose partial sums are added up for 16 columns at once, and pairs of V rows are interleaved in registers.

namespace hypic {
namespace HYPIC_ISA {

HYPIC_INLINE __m512bh load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

// Element i of every 128 bits of the result is the sum of those 128 bits of x[i].
HYPIC_INLINE vf sum_quarters(const vf* x) {
  const vf one = vadd(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const vf two = vadd(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512d a = _mm512_castps_pd(one), b = _mm512_castps_pd(two);
  return vadd(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

// Elements 4 i to 4 i + 3 of the result are the sums of the quarters of x[i].
HYPIC_INLINE vf sum_across(const vf* x) {
  const vf one = vadd(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
  const vf two = vadd(_mm512_shuffle_f32x4(x[2], x[3], 0x88), _mm512_shuffle_f32x4(x[2], x[3], 0xdd));
  return vadd(_mm512_shuffle_f32x4(one, two, 0x88), _mm512_shuffle_f32x4(one, two, 0xdd));
}

// scores[r * TILE + j] = query row r . keys[j] for 16 keys, for `rows` rows from the first on.
template <int rows>
static void score_keys(const bf16* query, const bf16* keys, int size, float* scores) {
  vf sum[rows][4];
#pragma GCC unroll 4
  for (int four = 0; four < 4; ++four) {
    const bf16* key = keys + 4 * four * size;
    vf part[rows][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) part[r][j] = vzero();
    for (int d = 0; d < size; d += 32) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512bh k = load_pairs(key + j * size + d);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) part[r][j] = _mm512_dpbf16_ps(part[r][j], load_pairs(query + r * size + d), k);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) sum[r][four] = sum_quarters(part[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) vstore(scores + r * TILE, sum_across(sum[r]));
}

// to[0 .. 32) += what products with interleaved vectors found: elements 0-3, 8-11, ... are in `low`, 4-7, 12-15, ... in
// `high`.
HYPIC_INLINE void add_interleaved(vf low, vf high, float* to) {
  const __m512i one = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i two = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  vstore(to, vadd(vload(to), _mm512_permutex2var_ps(low, one, high)));
  vstore(to + 16, vadd(vload(to + 16), _mm512_permutex2var_ps(low, two, high)));
}

// sum[r, d .. d + 64) += weights[r, n] V[n, d .. d + 64), for `rows` rows from the first on.
template <int rows>
static void weigh_values(const Span& s, int kv_head, int64_t c0, int n, const bf16* weights, int d, float* sum) {
  const PoolColumns& c = s.pool;
  const bf16* value = (const bf16*)c.value + (ptrdiff_t)kv_head * s.size + d;
  vf low[rows][2], high[rows][2];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) low[r][h] = high[r][h] = vzero();
  for (int j = 0; j < n; j += 2) {
    // An odd last column meets itself with weight 0.
    const bf16* a = value + c.slots[c0 + j] * c.value_stride;
    const bf16* b = j + 1 < n ? value + c.slots[c0 + j + 1] * c.value_stride : a;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512i x = _mm512_loadu_si512(a + 32 * h), y = _mm512_loadu_si512(b + 32 * h);
      const __m512bh first = (__m512bh)_mm512_unpacklo_epi16(x, y), second = (__m512bh)_mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        int pair;
        __builtin_memcpy(&pair, weights + r * TILE + j, 4);
        const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
        low[r][h] = _mm512_dpbf16_ps(low[r][h], w, first);
        high[r][h] = _mm512_dpbf16_ps(high[r][h], w, second);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) add_interleaved(low[r][h], high[r][h], sum + (ptrdiff_t)r * s.size + d + 32 * h);
}

// The same for vLLM's cache in pairs, which lies as products want it.
template <int rows>
static void score_pairs(const bf16* query, const bf16* keys, ptrdiff_t dim, int size, float* scores) {
  vf sum[rows][2];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = vzero();
  for (int d = 0; d < size; d += 4, keys += 2 * dim) {
    const __m512bh a = load_pairs(keys), b = load_pairs(keys + dim);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      int pair[2];
      __builtin_memcpy(pair, query + (ptrdiff_t)r * size + d, 8);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], (__m512bh)_mm512_set1_epi32(pair[0]), a);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], (__m512bh)_mm512_set1_epi32(pair[1]), b);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) vstore(scores + r * TILE, vadd(sum[r][0], sum[r][1]));
}

template <int rows>
static void weigh_pairs(const Span& s, int kv_head, int64_t c0, int hidden, int n, const bf16* weights, int d,
                        float* sum) {
  const ptrdiff_t token = s.cache.value_at.token, dim = s.cache.value_at.dim;
  vf all[rows][4];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int h = 0; h < 4; ++h) all[r][h] = vzero();
  for (int begin = 0; begin < n; begin += 16) {
    const bf16* from = (const bf16*)s.cache.cache + value_group(s, c0 + begin, kv_head) + d / 16 * dim;
    const int end = (int)at_most(n, begin + 16);
    for (int j = begin; j < end; j += 2, from += token) {
      // What is hidden or not there need not be a number.
      const __m512i mask = _mm512_set1_epi32((int)pair_mask(j, hidden, n));
      __m512bh value[4];
#pragma GCC unroll 4
      for (int h = 0; h < 4; ++h)
        value[h] = (__m512bh)_mm512_and_si512(mask, _mm512_loadu_si512(from + h * dim));
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        int pair;
        __builtin_memcpy(&pair, weights + r * TILE + j, 4);
        const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int h = 0; h < 4; ++h) all[r][h] = _mm512_dpbf16_ps(all[r][h], w, value[h]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int h = 0; h < 4; ++h) {
      float* to = sum + (ptrdiff_t)r * s.size + d + 16 * h;
      vstore(to, vadd(vload(to), all[r][h]));
    }
}

// A number that is known to the compiler.
template <int n>
struct Count {
  constexpr operator int() const { return n; }
};

// Calls body(rows, first) for four rows at a time, and for what is left.
template <class F>
HYPIC_INLINE void by_four(int rows, const F& body) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) body(Count<4>(), r);
  if (rows - r == 3) body(Count<3>(), r);
  if (rows - r == 2) body(Count<2>(), r);
  if (rows - r == 1) body(Count<1>(), r);
}

static bool serves_few(const Span& s, const SpanPart& p) {
  const CacheColumns& c = s.cache;
  const bool packs_well = c.cache && c.layout != Layout::pairs && (p.sum || c.layout != Layout::anywhere);
  return (p.row1 - p.row0) * (s.heads / s.kv_heads) <= FEW_ROWS && s.dtype == DType::bf16 && s.gemm &&
         s.size % 64 == 0 && !packs_well;
}

// Whether `rotate_keys` serves the span.
HYPIC_INLINE bool rotates_pairs(const Span& s) {
  const PoolColumns& c = s.pool;
  return c.key && c.table && c.table_dtype == DType::bf16 && c.neox && c.rotary % 64 == 0;
}

// Copies a query row. Dimensions that rotate are ordered as `rotate_keys` leaves them: of every 32, as interleaving
// two vectors orders them.
HYPIC_INLINE void copy_query(const bf16* from, int size, int rotary, bf16* to) {
  const __m512i order = _mm512_set_epi16(31, 30, 29, 28, 23, 22, 21, 20, 15, 14, 13, 12, 7, 6, 5, 4,  //
                                         27, 26, 25, 24, 19, 18, 17, 16, 11, 10, 9, 8, 3, 2, 1, 0);
  for (int d = 0; d < rotary; d += 32)
    _mm512_storeu_si512(to + d, _mm512_permutexvar_epi16(order, _mm512_loadu_si512(from + d)));
  __builtin_memcpy(to + rotary, from + rotary, (size - rotary) * sizeof(bf16));
}

// Keys of a column, rotated: that of kv head `kv_head + h` goes to keys + h * stride.  A pair (a, b) of dimensions times
// (cos, -sin) and (sin, cos) is what a bf16 product of pairs computes; angles are read once for all heads.
HYPIC_INLINE void rotate_keys(const Span& s, int64_t column, int kv_head, int kv_heads, bf16* keys, ptrdiff_t stride) {
  const PoolColumns& c = s.pool;
  const int size = s.size, half = c.rotary / 2;
  const bf16* key = (const bf16*)c.key + c.slots[column] * c.key_stride + (ptrdiff_t)kv_head * size;
  const bf16* angle = (const bf16*)c.table + c.positions[column] * c.table_stride;
  const __m512 zero = _mm512_setzero_ps();
  for (int i = 0; i < half; i += 32) {
    const __m512i cos = _mm512_loadu_si512(angle + i), sin = _mm512_loadu_si512(angle + half + i);
    const __m512i minus = _mm512_xor_si512(sin, _mm512_set1_epi16((short)0x8000));
    const __m512bh cos_low = (__m512bh)_mm512_unpacklo_epi16(cos, minus), sin_low = (__m512bh)_mm512_unpacklo_epi16(sin, cos);
    const __m512bh cos_high = (__m512bh)_mm512_unpackhi_epi16(cos, minus), sin_high = (__m512bh)_mm512_unpackhi_epi16(sin, cos);
    for (int h = 0; h < kv_heads; ++h) {
      const __m512i a = _mm512_loadu_si512(key + h * size + i), b = _mm512_loadu_si512(key + h * size + half + i);
      const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
      bf16* to = keys + h * stride + i;
      _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(_mm512_dpbf16_ps(zero, high, cos_high),
                                                           _mm512_dpbf16_ps(zero, low, cos_low)));
      _mm512_storeu_si512(to + half, (__m512i)_mm512_cvtne2ps_pbh(_mm512_dpbf16_ps(zero, high, sin_high),
                                                                  _mm512_dpbf16_ps(zero, low, sin_low)));
    }
  }
  if (c.rotary < size)
    for (int h = 0; h < kv_heads; ++h)
      __builtin_memcpy(keys + h * stride + c.rotary, key + h * size + c.rotary, (size - c.rotary) * sizeof(bf16));
}

// Fetches a column of the pool ahead of time: K and V of kv heads, which lie side by side.
HYPIC_INLINE void fetch_ahead(const Span& s, int64_t column, int kv_head, int kv_heads) {
  const int64_t slot = s.pool.slots[column];
  const char* k = (const char*)((const bf16*)s.pool.key + slot * s.pool.key_stride + kv_head * s.size);
  const char* v = (const char*)((const bf16*)s.pool.value + slot * s.pool.value_stride + kv_head * s.size);
  for (int b = 0; b < 2 * s.size * kv_heads; b += 64) {
    _mm_prefetch(k + b, _MM_HINT_T0);
    _mm_prefetch(v + b, _MM_HINT_T1);
  }
}

// Products of a group's rows with columns of the pool.
class VectorProducts {
 public:
  static constexpr int STEP = 16;  // columns that weights are padded to
  VectorProducts(const bf16* query, int rows, int kv_heads, int size, const Scratch&)
      : query_(query), rows_(rows), kv_heads_(kv_heads), size_(size) {}

  // scores[r * TILE + j] = query row r . key j of its kv head, for 16 keys of each kv head.
  void score(const bf16* keys, float* scores) const {
    for (int h = 0; h < kv_heads_; ++h)
      by_four(rows_, [&](auto count, int r) {
        const ptrdiff_t row = h * rows_ + r;
        score_keys<count>(query_ + row * size_, keys + (ptrdiff_t)16 * h * size_, size_, scores + row * TILE);
      });
  }

  // sum[r, d .. d + 64) += weights[r, n] V[n, d .. d + 64) for the rows of a kv head.
  void weigh(const Span& s, int kv_head, int64_t c0, int n, const bf16* weights, int d, float* sum) const {
    by_four(rows_, [&](auto count, int r) {
      weigh_values<count>(s, kv_head, c0, n, weights + r * TILE, d, sum + (ptrdiff_t)r * s.size);
    });
  }

 private:
  const bf16* query_;
  int rows_, kv_heads_, size_;
};

template <class Products>
static void run_few(const Span& s, const SpanPart& p, char* scratch) {
  Scratch x;
  const int group = s.heads / s.kv_heads, size = s.size, rows = (p.row1 - p.row0) * group, all = rows * p.kv_heads;
  lay_out(s, p.row1 - p.row0, scratch, &x);
  bf16 *query = (bf16*)x.query, *keys = (bf16*)x.row, *weights = (bf16*)x.weights;
  const bool by_pairs = rotates_pairs(s);
  for (int h = 0; h < p.kv_heads; ++h)
    for (int r = 0; r < rows; ++r) {
      const bf16* from = (const bf16*)s.query + (p.row0 + r / group) * s.query_stride +
                         (ptrdiff_t)((p.kv_head + h) * group + r % group) * size;
      copy_query(from, size, by_pairs ? s.pool.rotary : 0, query + (ptrdiff_t)(h * rows + r) * size);
    }
  const Products products(query, rows, p.kv_heads, size, x);
  for (int r = 0; r < all; ++r) {
    p.top[r] = -__builtin_inff();
    p.total[r] = 0.0f;
  }
  if (p.sum) __builtin_memset(p.sum, 0, (size_t)all * size * sizeof(float));
  const bool pairs = s.cache.cache && s.cache.layout == Layout::pairs;
  const int64_t stop = at_most(p.column1, furthest_seen(s, p.row0, p.row1 - 1));
  const int64_t hidden = least_hidden(s, p.row0, p.row1 - 1);
  for (int64_t c0 = first_column(p, hidden); c0 < stop; c0 += TILE) {
    const int n = (int)at_most(TILE, stop - c0), padded = (int)round_up(n, Products::STEP);
    Span copy;
    const TileColumns tile = columns_of(s, p.kv_head, p.kv_heads, c0, n, x.wide, &copy);
    for (int j = 0; j < n; j += 16) {
      if (pairs) {
        for (int h = 0; h < p.kv_heads; ++h) {
          const bf16* group_of_16 = (const bf16*)s.cache.cache + key_group(s, c0 + j, p.kv_head + h);
          by_four(rows, [&](auto count, int r) {
            score_pairs<count>(query + (ptrdiff_t)(h * rows + r) * size, group_of_16, s.cache.key_at.dim, size,
                               x.scores + (h * rows + r) * TILE + j);
          });
        }
        continue;
      }
      const int here = (int)at_most(16, n - j);
      for (int i = 0; i < here; ++i) {
        if (const int64_t ahead = c0 + j + i + 32; s.pool.key && !s.pool.fp8 && ahead < stop)
          fetch_ahead(s, ahead, p.kv_head, p.kv_heads);
        if (by_pairs)
          rotate_keys(*tile.span, tile.column + j + i, tile.head, p.kv_heads, keys + i * size, 16 * size);
        else
          for (int h = 0; h < p.kv_heads; ++h)
            fetch_key<DType::bf16>(*tile.span, tile.column + j + i, tile.head + h, keys + (16 * h + i) * size);
      }
      if (here < 16)
        for (int h = 0; h < p.kv_heads; ++h)
          __builtin_memset(keys + (16 * h + here) * size, 0, (16 - here) * size * sizeof(bf16));
      products.score(keys, x.scores + j);
    }
    for (int r = 0; r < all; ++r) {
      const int row = p.row0 + r % rows / group, seen = (int)at_most(n, s.visible_kv_lens[row] - c0);
      const float shrink = softmax_row(s, x.scores + r * TILE, hidden_of(s, row, c0, n), seen, padded,
                                       weights + r * TILE, p.top + r, p.total + r);
      if (p.sum && shrink != 1.0f)
        for (int d = 0; d < size; d += W) vstore(p.sum + r * size + d, vmul(vload(p.sum + r * size + d), vset(shrink)));
    }
    if (!p.sum) continue;
    for (int h = 0; h < p.kv_heads; ++h)
      for (int d = 0; d < size; d += 64) {
        const bf16* w = weights + h * rows * TILE;
        float* sum = p.sum + (ptrdiff_t)h * rows * size;
        if (pairs)
          by_four(rows, [&](auto count, int r) {
            weigh_pairs<count>(s, p.kv_head + h, c0, (int)at_most(n, hidden - c0), n, w + r * TILE, d,
                               sum + (ptrdiff_t)r * size);
          });
        else
          products.weigh(*tile.span, tile.head + h, tile.column, n, w, d, sum);
      }
  }
}

}  // namespace HYPIC_ISA
}  // namespace hypic
