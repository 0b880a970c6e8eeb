// Few rows, on a CPU with AMX: products of 16 columns and all query rows at once.
//
// Keys as they lie are rows of a tile, query rows its columns. Rows of all kv heads share a result: where a row is not of
// a tile's kv head, the query is 0.

#include <immintrin.h>

namespace hypic {
namespace HYPIC_ISA {

// What tiles hold; the compiler wants their numbers as they are written. A tile has 16 rows of 64 bytes; weights and what
// is added up with them have one for each query row.
#define HYPIC_SCORES 0
#define HYPIC_KEYS 1
#define HYPIC_PACKED 2
#define HYPIC_SUMS_0 3
#define HYPIC_SUMS_1 4
#define HYPIC_SUMS_2 5
#define HYPIC_SUMS_3 6
#define HYPIC_WEIGHTS 7

// Has everything written that tiles are about to read: GCC's intrinsics do not say which memory they do.
HYPIC_INLINE void settle(const void* read) { __asm__ volatile("" : : "r"(read) : "memory"); }

// Sets tiles up for as long as it lives; then they are as another kernel (oneDNN's) left them.
class Tiles {
 public:
  explicit Tiles(int rows) {
    _tile_storeconfig(before_);
    alignas(64) Shapes shapes{1, 0, {}, {}, {}};
    for (int i = 0; i < 8; ++i) {
      shapes.row_bytes[i] = 64;
      shapes.rows[i] = uint8_t(i < HYPIC_SUMS_0 ? 16 : rows);
    }
    settle(&shapes);
    _tile_loadconfig(&shapes);
  }
  ~Tiles() {
    settle(before_);
    _tile_loadconfig(before_);
  }
  Tiles(const Tiles&) = delete;

 private:
  struct Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  alignas(64) char before_[64];
};

constexpr int TILE_ELEMENTS = 512;  // of 16 bits

// The first and the last block of 16 query rows that rows of a kv head lie in.
struct RowBlocks {
  int first, last;
  RowBlocks(int kv_head, int rows) : first(kv_head * rows / 16), last((kv_head * rows + rows - 1) / 16) {}
};

// Query rows [kv_heads * rows, size] -> for each kv head and block of 16 rows, tiles of 32 dimensions.
static void pack_query(const bf16* query, int rows, int kv_heads, int size, bf16* to) {
  const ptrdiff_t block = ptrdiff_t(size / 32) * TILE_ELEMENTS;
  for (int h = 0; h < kv_heads; ++h) {
    const RowBlocks blocks(h, rows);
    __builtin_memset(to, 0, (blocks.last - blocks.first + 1) * block * sizeof(bf16));
    for (int r = h * rows; r < (h + 1) * rows; ++r) {
      const int32_t* from = (const int32_t*)(query + ptrdiff_t(r) * size);
      int32_t* column = (int32_t*)(to + (r / 16 - blocks.first) * block) + r % 16;
      for (int d = 0; d < size / 2; ++d) column[d * 16] = from[d];
    }
    to += (blocks.last - blocks.first + 1) * block;
  }
}

// scores[r * TILE + j] = query row r . key j of its kv head, for 16 keys of each kv head.
static void score_tiles(const bf16* packed, const bf16* keys, int rows, int kv_heads, int size, float* scores) {
  alignas(64) int32_t found[16 * 16], turned[16 * 16];
  const ptrdiff_t block = ptrdiff_t(size / 32) * TILE_ELEMENTS;
  settle(keys);
  _tile_zero(HYPIC_SCORES);
  for (int h = 0, started = 0; h < kv_heads; ++h) {
    const RowBlocks blocks(h, rows);
    for (int b = blocks.first; b <= blocks.last; ++b, packed += block) {
      for (int d = 0; d < size; d += 32) {
        _tile_loadd(HYPIC_KEYS, keys + ptrdiff_t(16) * h * size + d, size * sizeof(bf16));
        _tile_loadd(HYPIC_PACKED, packed + ptrdiff_t(d / 32) * TILE_ELEMENTS, 64);
        _tile_dpbf16ps(HYPIC_SCORES, HYPIC_KEYS, HYPIC_PACKED);
      }
      const int end = (int)at_most(16 * (b + 1), kv_heads * rows);
      if ((h + 1) * rows < end) continue;  // rows of the next kv head are of this block, too
      _tile_stored(HYPIC_SCORES, found, 64);
      _tile_zero(HYPIC_SCORES);
      transpose16(found, 16, turned, 16);
      for (; started < end; ++started)
        vstore(scores + started * TILE, vload((const float*)turned + (started - 16 * b) * 16));
    }
  }
}

// Interleaves V of 32 columns from c0 on, of 64 dimensions, for four tiles.  Columns from `n` on weigh 0 and repeat the
// last one.
HYPIC_INLINE void pack_values(const PoolColumns& c, const bf16* value, int64_t c0, int n, bf16* to) {
  for (int j = 0; j < 32; j += 2, to += 32) {
    const bf16* a = value + c.slots[c0 + at_most(j, n - 1)] * c.value_stride;
    const bf16* b = value + c.slots[c0 + at_most(j + 1, n - 1)] * c.value_stride;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512i x = _mm512_loadu_si512(a + 32 * h), y = _mm512_loadu_si512(b + 32 * h);
      _mm512_storeu_si512(to + (2 * h) * TILE_ELEMENTS, _mm512_unpacklo_epi16(x, y));
      _mm512_storeu_si512(to + (2 * h + 1) * TILE_ELEMENTS, _mm512_unpackhi_epi16(x, y));
    }
  }
}

// sum[r, d .. d + 64) += weights[r, n] V[n, d .. d + 64) of the pool, for the `rows` rows of a kv head; weights are 0 from
// column n on.
static void weigh_tiles(const Span& s, int kv_head, int64_t c0, int n, int rows, const bf16* weights, int d,
                        bf16* packed, float* sum) {
  const bf16* value = (const bf16*)s.pool.value + ptrdiff_t(kv_head) * s.size + d;
  _tile_zero(HYPIC_SUMS_0);
  _tile_zero(HYPIC_SUMS_1);
  _tile_zero(HYPIC_SUMS_2);
  _tile_zero(HYPIC_SUMS_3);
  for (int j = 0; j < n; j += 32) {
    bf16* here = packed + (j / 32 % 2) * 4 * TILE_ELEMENTS;
    pack_values(s.pool, value, c0 + j, n - j, here);
    settle(here);
    _tile_loadd(HYPIC_WEIGHTS, weights + j, TILE * sizeof(bf16));
    _tile_loadd(HYPIC_PACKED, here, 64);
    _tile_dpbf16ps(HYPIC_SUMS_0, HYPIC_WEIGHTS, HYPIC_PACKED);
    _tile_loadd(HYPIC_PACKED, here + TILE_ELEMENTS, 64);
    _tile_dpbf16ps(HYPIC_SUMS_1, HYPIC_WEIGHTS, HYPIC_PACKED);
    _tile_loadd(HYPIC_PACKED, here + 2 * TILE_ELEMENTS, 64);
    _tile_dpbf16ps(HYPIC_SUMS_2, HYPIC_WEIGHTS, HYPIC_PACKED);
    _tile_loadd(HYPIC_PACKED, here + 3 * TILE_ELEMENTS, 64);
    _tile_dpbf16ps(HYPIC_SUMS_3, HYPIC_WEIGHTS, HYPIC_PACKED);
  }
  alignas(64) float found[4][FEW_ROWS][16];
  _tile_stored(HYPIC_SUMS_0, found[0], 64);
  _tile_stored(HYPIC_SUMS_1, found[1], 64);
  _tile_stored(HYPIC_SUMS_2, found[2], 64);
  _tile_stored(HYPIC_SUMS_3, found[3], 64);
  for (int r = 0; r < rows; ++r)
    for (int h = 0; h < 2; ++h)
      add_interleaved(vload(found[2 * h][r]), vload(found[2 * h + 1][r]), sum + ptrdiff_t(r) * s.size + d + 32 * h);
}

// What `run_few` computes, as VectorProducts does.
class TileProducts {
 public:
  static constexpr int STEP = 32;  // columns of V that are weighed at once
  TileProducts(const bf16* query, int rows, int kv_heads, int size, const Scratch& x)
      : tiles_(rows), query_((bf16*)x.packed), values_((bf16*)x.values), rows_(rows), kv_heads_(kv_heads), size_(size) {
    pack_query(query, rows, kv_heads, size, query_);
  }

  void score(const bf16* keys, float* scores) const { score_tiles(query_, keys, rows_, kv_heads_, size_, scores); }

  void weigh(const Span& s, int kv_head, int64_t c0, int n, const bf16* weights, int d, float* sum) const {
    weigh_tiles(s, kv_head, c0, n, rows_, weights, d, values_, sum);
  }

 private:
  const Tiles tiles_;
  bf16 *query_, *values_;
  int rows_, kv_heads_, size_;
};

}  // namespace HYPIC_ISA
}  // namespace hypic
