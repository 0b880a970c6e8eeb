// Span attention: query rows over columns that each row sees a prefix of.  See span_attention.inl for the method.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hypic {

enum class DType : int { f32, bf16, f16 };

// C [M, N] float (+)= A [M, K] B, bf16 bit patterns; B packed in pairs of rows, [K / 2, N, 2].
using GemmBf16 = void (*)(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                          const uint16_t* A, const uint16_t* B, float* C);

// Columns in the public pool: unrotated K and V by token slot.
struct PoolColumns {
  const void *key, *value;               // [slots, kv_heads, size], heads and elements contiguous
  bool fp8;                              // they are e4m3, times a scale; else as the query is
  float key_scale, value_scale;
  ptrdiff_t key_stride, value_stride;    // elements between slots
  const int64_t *slots, *positions;      // [columns]
  int64_t slot_count, position_count;    // of the pool, of the table
  const void* table;                     // [positions, rotary] cos, then sin; null: keys are not rotated
  DType table_dtype;
  ptrdiff_t table_stride;
  int rotary;
  bool neox;
};

// How K and V lie in a block of vLLM's cache.  lines: K of 16 tokens, V of all dimensions lie side by side.  pairs: two
// dimensions of K, then the next of 16 tokens; two tokens of V, then the next of 16 dimensions.
enum class Layout : int { anywhere, lines, pairs };

// Where a group of K (16 tokens, one or two dimensions) or V (one or two tokens, 16 dimensions) lies in a block: at
// base + group of tokens * token + head * head + group of dimensions * dim.
struct Affine {
  ptrdiff_t base, token, head, dim;
};

// Columns in vLLM's paged cache, rotated already, in whatever layout the stock kernel packs K and V.
struct CacheColumns {
  const void* cache;
  ptrdiff_t block_stride;   // elements between blocks
  const int32_t* blocks;    // block of every block_size tokens of this request
  int block_size;
  const int32_t* key;       // [block_size, kv_heads, size]: where an element of a block lies in it
  const int32_t* value;     // the same for V; null: not read
  Layout layout;
  Affine key_at, value_at;  // what `key` and `value` say, where the layout is not `anywhere`
};

// One request's rows.  `pool` or `cache` is set.
struct Span {
  const void* query;        // its first row, [rows, heads, size]
  ptrdiff_t query_stride;   // elements between rows
  int rows, heads, kv_heads, size;
  DType dtype;
  const int64_t* visible_kv_lens;  // [rows]: a row sees columns < visible_kv_lens
  const int64_t* hidden_kv_lens;   // [rows]: of these, those >= hidden_kv_lens; null: all
  float scale;
  float soft_cap;           // scores are soft_cap * tanh(scale q.k / soft_cap); 0: scale q.k
  bool weighs;              // whether V is wanted, or the weights alone
  GemmBf16 gemm;            // null: compute in float
  PoolColumns pool;
  CacheColumns cache;
};

// Rows of a part, times query heads per kv head, that count as few: they wait for memory, not for products.
constexpr int FEW_ROWS = 8;
// Rows of a score block; so many of all kv heads are few together.
constexpr int ROW_BLOCK = 48;

// Columns that are hidden from all rows are skipped in whole vectors of so many, so a few at a window's edge are read in
// vain: the first column that is read where so many are hidden.
constexpr int64_t first_read(int64_t hidden) { return hidden / 32 * 32; }

// Part of a span: some kv heads, rows [row0, row1), columns [column0, column1).  Results are laid out by kv head, and for
// each the rows of its query heads are row major: part row = (row - row0) * group + head in group.
struct SpanPart {
  int kv_head, kv_heads, row0, row1;
  int64_t column0, column1;
  float* sum;   // [part rows, size] sum of weights times V, null: wanted are only the weights
  float* top;   // [part rows] largest score, -inf if nothing is seen
  float* total; // [part rows] sum of weights e^(score - top)
};

struct SpanKernels {
  size_t (*scratch)(const Span&, int max_rows);  // bytes that `part` needs for parts of up to so many rows
  void (*part)(const Span&, const SpanPart&, char* scratch);
};

}  // namespace hypic
