// What the linear layers' operators share: roundings, gates, scratch memory, triangular products.
#pragma once

namespace hypic {
namespace HYPIC_ISA {

HYPIC_INLINE vf vload_as_float(const bf16* p) { return vload_bf16(p); }
HYPIC_INLINE vf vload_as_float(const float* p) { return vload(p); }
HYPIC_INLINE void vstore_rounded(bf16* p, vf x) { vstore_bf16(p, x); }
HYPIC_INLINE void vstore_rounded(float* p, vf x) { vstore(p, x); }
HYPIC_INLINE float to_float(float x) { return x; }

// x as the stock convolution hands it on: rounded to the dtype of its input.
HYPIC_INLINE vf vrounded_to(vf x, const float*) { return x; }
HYPIC_INLINE vf vrounded_to(vf x, const bf16*) {
#if HYPIC_WIDTH == 16
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(vto_bf16(x)), 16));
#else
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(vto_bf16(x)), 16));
#endif
}

// 1 / (1 + e^-x)
HYPIC_INLINE vf vsigmoid(vf x) { return vdiv(vset(1), vadd(vset(1), vexp(vmin(vset(87), vsub(vzero(), x))))); }

// log(1 + u) for 0 <= u <= 1: 2 atanh(u / (2 + u)), whose series in s <= 1/3 needs eight terms.
HYPIC_INLINE vf vlog1p(vf u) {
  const vf s = vdiv(u, vadd(u, vset(2))), t = vmul(s, s);
  vf p = vset(2.0f / 15);
  p = vfma(p, t, vset(2.0f / 13));
  p = vfma(p, t, vset(2.0f / 11));
  p = vfma(p, t, vset(2.0f / 9));
  p = vfma(p, t, vset(2.0f / 7));
  p = vfma(p, t, vset(2.0f / 5));
  p = vfma(p, t, vset(2.0f / 3));
  return vfma(vmul(p, t), s, vadd(s, s));
}

HYPIC_INLINE vf vsoftplus(vf x) { return vadd(vmax(x, vzero()), vlog1p(vexp(vsub(vzero(), vabs(x))))); }

// Products of tiny numbers must not become subnormal: CPUs multiply those a hundred times more slowly.
struct FlushSubnormals {
  unsigned saved;
  FlushSubnormals() : saved(_mm_getcsr()) { _mm_setcsr(saved | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved); }
};

static void copy(const float* from, ptrdiff_t count, float* to) {
  for (ptrdiff_t i = 0; i < count; i += W) vstore(to + i, vload(from + i));
}

// C [n, N] += A X with A [n, n], of any strides, zero above its diagonal.
static void add_triangular(int n, int N, const float* A, ptrdiff_t row, ptrdiff_t col, const float* X, ptrdiff_t ldx,
                           float* C, ptrdiff_t ldc) {
  for (int t = 0; t < n; t += GEMM_ROWS) {
    const int rows = n - t < GEMM_ROWS ? n - t : GEMM_ROWS;
    gemm<Into::add>(rows, N, t + rows, A + t * row, row, col, X, ldx, C + t * ldc, ldc);
  }
}

// to [columns, n] <- the transpose of from [n, columns], their rows `to_row` and `from_row` apart.  Four rows at a
// time: what lies behind row n is read and written, too.
static void transpose(const float* from, ptrdiff_t from_row, int n, int columns, float* to, ptrdiff_t to_row) {
  for (int t = 0; t < n; t += 4)
    for (int c = 0; c < columns; c += 4) {
      const float* f = from + t * from_row + c;
      float* const o = to + c * to_row + t;
      __m128 r0 = _mm_loadu_ps(f), r1 = _mm_loadu_ps(f + from_row), r2 = _mm_loadu_ps(f + 2 * from_row),
             r3 = _mm_loadu_ps(f + 3 * from_row);
      _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
      _mm_storeu_ps(o, r0);
      _mm_storeu_ps(o + to_row, r1);
      _mm_storeu_ps(o + 2 * to_row, r2);
      _mm_storeu_ps(o + 3 * to_row, r3);
    }
}

// Scratch memory is cut into arrays that begin with a cache line.
static size_t rounded_up(size_t x) { return (x + 63) / 64 * 64; }

struct Arena {
  char* at;
  float* floats(ptrdiff_t n) {
    char* p = at;
    at += rounded_up(n * sizeof(float));
    return (float*)p;
  }
};

}  // namespace HYPIC_ISA
}  // namespace hypic
