// Panels, triangular systems and roundings of the gated delta rule: see gated_delta.inl.

#include "gated_delta.h"

namespace hypic {
namespace HYPIC_ISA {

constexpr int GDN_CHUNK = 32;
constexpr int GDN_PANEL = 64;

// ------------------------------------------------------------------------------------------------ panels
//
// A matrix [K, N] as panels: columns [64 p, 64 p + w) lie together as [K, w], w = 64 but in the last panel.

HYPIC_INLINE int panel_width(int N, int column) { return N - column < GDN_PANEL ? N - column : GDN_PANEL; }

static void to_panels(const float* rows, int K, int N, float* panels) {
  for (int c = 0; c < N; c += GDN_PANEL) {
    const int w = panel_width(N, c);
    for (int i = 0; i < K; ++i, panels += w)
      for (int j = 0; j < w; j += W) vstore(panels + j, vload(rows + i * N + c + j));
  }
}

static void from_panels(const float* panels, int K, int N, float* rows) {
  for (int c = 0; c < N; c += GDN_PANEL) {
    const int w = panel_width(N, c);
    for (int i = 0; i < K; ++i, panels += w)
      for (int j = 0; j < w; j += W) vstore(rows + i * N + c + j, vload(panels + j));
  }
}

static float largest(const float* x, ptrdiff_t count) {
  vf top[4] = {vzero(), vzero(), vzero(), vzero()};
  ptrdiff_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W)
    for (int j = 0; j < 4; ++j) top[j] = vmax(top[j], vabs(vload(x + i + j * W)));
  for (; i < count; i += W) top[0] = vmax(top[0], vabs(vload(x + i)));
  return vtop(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
}

// ------------------------------------------------------------------------------------------------ decays by channel

// R rows [K] decay by one token more; then L_i = beta k . row_i and A_i = q . row_i.
template <int R>
static __attribute__((noinline)) void decay_rows(int K, const float* decay, float* rows, const float* k, const float* q,
                                                 float beta, float* L, float* A) {
  vf by_k[R], by_q[R];
  for (int i = 0; i < R; ++i) by_k[i] = by_q[i] = vzero();
  for (int c = 0; c < K; c += W) {
    const vf d = vload(decay + c), kc = vload(k + c), qc = vload(q + c);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      const vf x = vmul(d, vload(rows + i * K + c));
      vstore(rows + i * K + c, x);
      by_k[i] = vfma(kc, x, by_k[i]);
      by_q[i] = vfma(qc, x, by_q[i]);
    }
  }
  for (int i = 0; i < R; ++i) {
    L[i] = beta * vsum(by_k[i]);
    A[i] = vsum(by_q[i]);
  }
}

// ------------------------------------------------------------------------------------------------ triangles

template <int MR, int NV>
static __attribute__((noinline)) void solve_tile(int t, const float* L, float* X, ptrdiff_t ld) {
  L += t * GDN_CHUNK;
  float* to = X + t * ld;
  vf sum[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) sum[i][j] = vload(to + i * ld + j * W);
  for (int s = 0; s < t; ++s) {
    vf x[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) x[j] = vload(X + s * ld + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const vf l = vset(L[i * GDN_CHUNK + s]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) sum[i][j] = vfnma(l, x[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 1; i < MR; ++i)
#pragma GCC unroll 8
    for (int s = 0; s < i; ++s) {
      const vf l = vset(L[i * GDN_CHUNK + t + s]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) sum[i][j] = vfnma(l, sum[s][j], sum[i][j]);
    }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) vstore(to + i * ld + j * W, sum[i][j]);
}

template <int NV>
static void solve_columns(int n, const float* L, float* X, ptrdiff_t ld) {
  int t = 0;
  for (; t + 4 <= n; t += 4) solve_tile<4, NV>(t, L, X, ld);
  switch (n - t) {
    case 3: return solve_tile<3, NV>(t, L, X, ld);
    case 2: return solve_tile<2, NV>(t, L, X, ld);
    case 1: return solve_tile<1, NV>(t, L, X, ld);
    default: return;
  }
}

// X [n, N] <- (I + L)^-1 X; only what is below L's diagonal is read.
static void solve(int n, int N, const float* L, float* X, ptrdiff_t ld) {
  int j = 0;
  for (; j + GEMM_VECTORS * W <= N; j += GEMM_VECTORS * W) solve_columns<GEMM_VECTORS>(n, L, X + j, ld);
  switch ((N - j) / W) {
    case 3: return solve_columns<GEMM_VECTORS == 4 ? 3 : 1>(n, L, X + j, ld);
    case 2: return solve_columns<2>(n, L, X + j, ld);
    case 1: return solve_columns<1>(n, L, X + j, ld);
    default: return;
  }
}

}  // namespace HYPIC_ISA
}  // namespace hypic
