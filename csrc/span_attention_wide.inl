// FP8 columns of the pool, a tile at a time in the query's dtype: copied once, they serve all rows of a part. What reads
// columns of the pool reads the copies as if they were a small pool.

namespace hypic {
namespace HYPIC_ISA {

constexpr int TILE = 256;  // columns of a tile: packed K and V of one head stay in the second-level cache

HYPIC_INLINE size_t bytes_of(DType t) { return t == DType::f32 ? 4 : 2; }

HYPIC_INLINE void write_as(void* p, DType t, ptrdiff_t i, vf x) {
  if (t == DType::f32) return vstore((float*)p + i, x);
  if (t == DType::bf16) return vstore_bf16((bf16*)p + i, x);
  vstore_fp16((fp16*)p + i, x);
}

// A tile of columns as the rest of a part reads them: those of `span` from `column` on, heads from `head` on.
struct TileColumns {
  const Span* span;
  int64_t column;
  int head;
};

// FP8 columns [c0, c0 + n) of the pool, of kv heads [kv_head, kv_head + kv_heads), copied in the query's dtype;
// `copy` becomes a span that has them as columns [0, n) of heads [0, kv_heads).
static TileColumns widen(const Span& s, int kv_head, int kv_heads, int64_t c0, int n, char* memory, Span* copy) {
  const PoolColumns& c = s.pool;
  const ptrdiff_t width = (ptrdiff_t)kv_heads * s.size, first = (ptrdiff_t)kv_head * s.size;
  int64_t* const slots = (int64_t*)memory;
  char* const key = memory + TILE * sizeof(int64_t);
  char* const value = key + TILE * width * bytes_of(s.dtype);
  const vf by_key = vset(c.key_scale), by_value = vset(c.value_scale);
  for (int j = 0; j < n; ++j) {
    const fp8* k = (const fp8*)c.key + c.slots[c0 + j] * c.key_stride + first;
    const fp8* v = (const fp8*)c.value + c.slots[c0 + j] * c.value_stride + first;
    if (j + 32 < n)
      for (ptrdiff_t b = 0; b < width; b += 64) {
        _mm_prefetch((const char*)c.key + c.slots[c0 + j + 32] * c.key_stride + first + b, _MM_HINT_T0);
        _mm_prefetch((const char*)c.value + c.slots[c0 + j + 32] * c.value_stride + first + b, _MM_HINT_T0);
      }
    for (ptrdiff_t d = 0; d < width; d += W) {
      write_as(key, s.dtype, j * width + d, vmul(by_key, vload_fp8(k + d)));
      write_as(value, s.dtype, j * width + d, vmul(by_value, vload_fp8(v + d)));
    }
    slots[j] = j;
  }
  *copy = s;
  copy->kv_heads = kv_heads;
  copy->pool.fp8 = false;
  copy->pool.key = key;
  copy->pool.value = value;
  copy->pool.key_stride = copy->pool.value_stride = width;
  copy->pool.slots = slots;
  copy->pool.positions = c.positions + c0;
  return {copy, 0, 0};
}

// Columns [c0, c0 + n) as they are read, widened where they must be.
HYPIC_INLINE TileColumns columns_of(const Span& s, int kv_head, int kv_heads, int64_t c0, int n, char* memory,
                                    Span* copy) {
  if (!s.pool.fp8) return {&s, c0, kv_head};
  return widen(s, kv_head, kv_heads, c0, n, memory, copy);
}

}  // namespace HYPIC_ISA
}  // namespace hypic
