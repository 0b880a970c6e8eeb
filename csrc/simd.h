// Vectors of float and the float matrix product.
//
// Compiled once per instruction set, by the isa_*.cpp that includes it. Everything lives in a namespace named after the
// instruction set, and nothing of the C++ library is used: an inline function compiled for a newer machine can thus not
// be linked into code for an older one.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#ifndef HYPIC_ISA
#error "include this file from isa_*.cpp, which names the instruction set"
#endif

namespace hypic {
namespace HYPIC_ISA {

#define HYPIC_INLINE static inline __attribute__((always_inline))

using bf16 = uint16_t;  // bit pattern of a bfloat16
using fp16 = uint16_t;  // bit pattern of an IEEE half
using fp8 = uint8_t;    // bit pattern of an e4m3 without infinities

#if HYPIC_WIDTH == 16

using vf = __m512;
constexpr int W = 16;
HYPIC_INLINE vf vset(float x) { return _mm512_set1_ps(x); }
HYPIC_INLINE vf vzero() { return _mm512_setzero_ps(); }
HYPIC_INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
HYPIC_INLINE void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
HYPIC_INLINE vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
HYPIC_INLINE vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
HYPIC_INLINE vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
HYPIC_INLINE vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
HYPIC_INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
HYPIC_INLINE vf vfnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
HYPIC_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN; so does vmin
HYPIC_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
HYPIC_INLINE vf vabs(vf a) { return _mm512_abs_ps(a); }
HYPIC_INLINE float vsum(vf a) { return _mm512_reduce_add_ps(a); }
HYPIC_INLINE float vtop(vf a) { return _mm512_reduce_max_ps(a); }
// Lanes >= n become `other`.
HYPIC_INLINE vf vkeep(vf x, int n, vf other) {
  return _mm512_mask_blend_ps(n >= W ? (__mmask16)0xffff : (__mmask16)((1u << (n < 0 ? 0 : n)) - 1), other, x);
}
// 2^n for an integral float n in [-126, 127].
HYPIC_INLINE vf vpow2(vf n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
HYPIC_INLINE vf vround(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HYPIC_INLINE vf vload_bf16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
HYPIC_INLINE vf vload_fp16(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
HYPIC_INLINE void vstore_fp16(fp16* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// FP8 (e4m3): as a half its bits stand for a 256th. Halves know no flushing of denormals. NaN stays NaN.
HYPIC_INLINE vf vload_fp8(const fp8* p) {
  const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i size = _mm256_and_si256(x, _mm256_set1_epi16(0x7f)), sign = _mm256_xor_si256(x, size);
  const __m256i nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f));
  const __m256i half = _mm256_or_si256(_mm256_slli_epi16(sign, 8), _mm256_slli_epi16(size, 7));
  const __m256i found = _mm256_blendv_epi8(half, _mm256_set1_epi16(0x7e00), nan);
  return _mm512_mul_ps(_mm512_cvtph_ps(found), _mm512_set1_ps(256.0f));
}
HYPIC_INLINE __m256i vto_bf16(vf x) {
#if HYPIC_BF16
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
#endif
}
HYPIC_INLINE void vstore_bf16(bf16* p, vf x) { _mm256_storeu_si256((__m256i*)p, vto_bf16(x)); }

#else  // 8 lanes

using vf = __m256;
constexpr int W = 8;
HYPIC_INLINE vf vset(float x) { return _mm256_set1_ps(x); }
HYPIC_INLINE vf vzero() { return _mm256_setzero_ps(); }
HYPIC_INLINE vf vload(const float* p) { return _mm256_loadu_ps(p); }
HYPIC_INLINE void vstore(float* p, vf x) { _mm256_storeu_ps(p, x); }
HYPIC_INLINE vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
HYPIC_INLINE vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
HYPIC_INLINE vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
HYPIC_INLINE vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
HYPIC_INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
HYPIC_INLINE vf vfnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
HYPIC_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }  // b where either is NaN; so does vmin
HYPIC_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
HYPIC_INLINE vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
HYPIC_INLINE float vsum(vf a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
HYPIC_INLINE float vtop(vf a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
HYPIC_INLINE vf vkeep(vf x, int n, vf other) {
  const __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(kept));
}
HYPIC_INLINE vf vpow2(vf n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
HYPIC_INLINE vf vround(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HYPIC_INLINE vf vload_bf16(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
HYPIC_INLINE vf vload_fp16(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
HYPIC_INLINE void vstore_fp16(fp16* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HYPIC_INLINE vf vload_fp8(const fp8* p) {
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i size = _mm_and_si128(x, _mm_set1_epi16(0x7f)), sign = _mm_xor_si128(x, size);
  const __m128i nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f));
  const __m128i half = _mm_or_si128(_mm_slli_epi16(sign, 8), _mm_slli_epi16(size, 7));
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_blendv_epi8(half, _mm_set1_epi16(0x7e00), nan)), _mm256_set1_ps(256.0f));
}
HYPIC_INLINE __m128i vto_bf16(vf x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
HYPIC_INLINE void vstore_bf16(bf16* p, vf x) { _mm_storeu_si128((__m128i*)p, vto_bf16(x)); }

#endif

HYPIC_INLINE float to_float(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

// e^x for x <= 88: at most 1.011 ulp off, measured over all floats of [-87, 88] on 8 and on 16 lanes. 0 for x < -87, so
// that -inf and what is too small to matter vanish. NaN for NaN: what is no number must not go unseen.
HYPIC_INLINE vf vexp(vf x) {
  const vf n = vround(vmul(x, vset(1.44269504088896341f)));
  // x - n ln 2 in two parts: the first has few bits, so that n times it is exact.
  vf r = vfnma(n, vset(0.693359375f), x);
  r = vfnma(n, vset(-2.12194440e-4f), r);
  vf p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  p = vadd(vfma(p, vmul(r, r), r), vset(1.0f));
  const vf y = vmul(p, vpow2(vmax(n, vset(-126.0f))));
#if HYPIC_WIDTH == 16
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), y);
#else
  return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_NLT_UQ), y);
#endif
}

// tanh x: at most 2.25 ulp off, measured over all floats up to 32 on 8 and on 16 lanes. NaN for NaN.
HYPIC_INLINE vf vtanh(vf x) {
  // Near 0 the quotient below would lose what e^2x - 1 cancels: there an odd polynomial.
  const vf square = vmul(x, x);
  vf p = vset(-5.70498872745e-3f);
  p = vfma(p, square, vset(2.06390887954e-2f));
  p = vfma(p, square, vset(-5.37397155531e-2f));
  p = vfma(p, square, vset(1.33314422036e-1f));
  p = vfma(p, square, vset(-3.33332819422e-1f));
  const vf small = vfma(vmul(p, square), x, x);
  const vf e = vexp(vmul(vset(2.0f), vmax(vset(-10.0f), vmin(vset(10.0f), x))));
  const vf large = vdiv(vsub(e, vset(1.0f)), vadd(e, vset(1.0f)));
#if HYPIC_WIDTH == 16
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(vabs(x), _mm512_set1_ps(0.625f), _CMP_LT_OQ), large, small);
#else
  return _mm256_blendv_ps(large, small, _mm256_cmp_ps(vabs(x), _mm256_set1_ps(0.625f), _CMP_LT_OQ));
#endif
}

// ------------------------------------------------------------------------------------------------ C = A B, float
//
// A [M, K] with any strides (rows, columns): a transposed A costs nothing, it is read by broadcasts. B [K, N] with
// contiguous rows. C [M, N] with contiguous rows. N is a multiple of W.

enum class Into { set, add, subtract, decay };  // C = AB, C += AB, C -= AB, C = scale C + AB

#if HYPIC_WIDTH == 16
constexpr int GEMM_ROWS = 6, GEMM_VECTORS = 4;  // 24 sums, 4 vectors of B, 1 broadcast: 29 of 32 registers
#else
constexpr int GEMM_ROWS = 4, GEMM_VECTORS = 3;  // 12 sums, 3 vectors of B, 1 broadcast: 16 of 16
#endif

// Not inlined: the compiler would keep the addresses of all rows of C in registers that the sums need.
template <int MR, int NV, Into into>
static __attribute__((noinline)) void gemm_tile(int K, const float* A, ptrdiff_t row, ptrdiff_t col, const float* B,
                                                ptrdiff_t ldb, float* C, ptrdiff_t ldc, float scale = 1) {
  vf sum[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) {
      sum[i][j] = into == Into::set ? vzero() : vload(C + i * ldc + j * W);
      if (into == Into::decay) sum[i][j] = vmul(sum[i][j], vset(scale));
    }
  for (int k = 0; k < K; ++k) {
    vf b[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) b[j] = vload(B + k * ldb + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const vf a = vset(A[i * row + k * col]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j)
        sum[i][j] = into == Into::subtract ? vfnma(a, b[j], sum[i][j]) : vfma(a, b[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) vstore(C + i * ldc + j * W, sum[i][j]);
}

template <int NV, Into into>
static void gemm_columns(int M, int K, const float* A, ptrdiff_t row, ptrdiff_t col, const float* B, ptrdiff_t ldb,
                         float* C, ptrdiff_t ldc, float scale = 1) {
  int i = 0;
  for (; i + GEMM_ROWS <= M; i += GEMM_ROWS)
    gemm_tile<GEMM_ROWS, NV, into>(K, A + i * row, row, col, B, ldb, C + i * ldc, ldc, scale);
  A += i * row;
  C += i * ldc;
  switch (M - i) {
    case 5: return gemm_tile<5 <= GEMM_ROWS ? 5 : 1, NV, into>(K, A, row, col, B, ldb, C, ldc, scale);
    case 4: return gemm_tile<4, NV, into>(K, A, row, col, B, ldb, C, ldc, scale);
    case 3: return gemm_tile<3, NV, into>(K, A, row, col, B, ldb, C, ldc, scale);
    case 2: return gemm_tile<2, NV, into>(K, A, row, col, B, ldb, C, ldc, scale);
    case 1: return gemm_tile<1, NV, into>(K, A, row, col, B, ldb, C, ldc, scale);
    default: return;
  }
}

template <Into into>
static void gemm(int M, int N, int K, const float* A, ptrdiff_t row, ptrdiff_t col, const float* B, ptrdiff_t ldb,
                 float* C, ptrdiff_t ldc, float scale = 1) {
  int j = 0;
  for (; j + GEMM_VECTORS * W <= N; j += GEMM_VECTORS * W)
    gemm_columns<GEMM_VECTORS, into>(M, K, A, row, col, B + j, ldb, C + j, ldc, scale);
  switch ((N - j) / W) {
    case 3: return gemm_columns<GEMM_VECTORS == 4 ? 3 : 1, into>(M, K, A, row, col, B + j, ldb, C + j, ldc, scale);
    case 2: return gemm_columns<2, into>(M, K, A, row, col, B + j, ldb, C + j, ldc, scale);
    case 1: return gemm_columns<1, into>(M, K, A, row, col, B + j, ldb, C + j, ldc, scale);
    default: return;
  }
}

}  // namespace HYPIC_ISA
}  // namespace hypic
