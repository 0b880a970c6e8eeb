// Gated delta rule in closed form (WY representation), chunk by chunk, in float.
//
// Per value head, a chunk of n tokens that starts from state S [K, V], with G_t = g_1 + ... + g_t:
//
//     R    = diag(beta) (V - diag(e^G) K S)
//     D    = (I + L)^-1 R                  L_ts = beta_t e^{G_t - G_s} (k_t . k_s) for s < t     the writes
//     o_t  = e^{G_t} q_t S + sum_{s <= t} e^{G_t - G_s} (q_t . k_s) D_s
//     S'   = e^{G_n} S + Kd^T D            Kd_s = e^{G_n - G_s} k_s
//
// T, the transition, is the state that starts from I with V = 0 and has no outputs.  Columns of S and T do not meet
// each other, so both are kept as panels of 64 columns that stay in the first cache through all four lines.
//
// Gates enter as differences G_t - G_s <= 0 of sums taken in double: nothing overflows, and strong gates (G reaches
// -3000 in a chunk) cost no accuracy.
//
// Convolution, SiLU, l2 norm and gates of a chunk are computed on the way.  q and k are those of a key head, so a task
// treats value heads of one key head.

#include "gated_delta.h"

namespace hypic {
namespace HYPIC_ISA {

constexpr int GDN_CHUNK = 32;
constexpr int GDN_PANEL = 64;
constexpr int GDN_MAX_TAPS = 4;

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

static void copy(const float* from, ptrdiff_t count, float* to) {
  for (ptrdiff_t i = 0; i < count; i += W) vstore(to + i, vload(from + i));
}

static float largest(const float* x, ptrdiff_t count) {
  vf top[4] = {vzero(), vzero(), vzero(), vzero()};
  ptrdiff_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W)
    for (int j = 0; j < 4; ++j) top[j] = vmax(top[j], vabs(vload(x + i + j * W)));
  for (; i < count; i += W) top[0] = vmax(top[0], vabs(vload(x + i)));
  return vtop(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
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

// C [n, N] += A X with A [n, n] zero above its diagonal.
static void add_triangular(int n, int N, const float* A, const float* X, ptrdiff_t ldx, float* C, ptrdiff_t ldc) {
  for (int t = 0; t < n; t += GEMM_ROWS) {
    const int rows = n - t < GEMM_ROWS ? n - t : GEMM_ROWS;
    gemm<Into::add>(rows, N, t + rows, A + t * GDN_CHUNK, GDN_CHUNK, 1, X, ldx, C + t * ldc, ldc);
  }
}

// ------------------------------------------------------------------------------------------------ scratch memory

enum class Transition { none, identity, full, dead };  // identity: nothing was multiplied in yet

struct HeadState {
  float *S, *T, *before;  // panels; `before`: S where the interior began
  bool zero;              // S is zero, whatever its memory holds
  Transition transition;
};

// What a task works with.  Rows of chunk matrices are GDN_CHUNK apart where both sides are tokens.
struct Work {
  float* keys;     // [2 n, K] normalised keys, then normalised and scaled queries
  float* keys_t;   // [K, chunk]
  float* gram;     // [2 n, chunk] keys and queries times keys
  float* v;        // [n, V]
  float *L, *A;    // [n, chunk]
  float* Kd;       // [n, K]
  float* KQS;      // [2 n, panel] keys and queries times a panel of S, then D and outputs
  float *beta, *G, *Glow, *eG;  // [chunk]
  float* context;  // [taps - 1, channels of this task]
  float* spare;    // [K, max(K, V)]
  float* T;        // [K, K] a record's transition
  HeadState* heads;
};

static size_t rounded_up(size_t x) { return (x + 63) / 64 * 64; }

struct Arena {
  char* at;
  float* floats(ptrdiff_t n) {
    char* p = at;
    at += rounded_up(n * sizeof(float));
    return (float*)p;
  }
};

static Work carve(const GdnLayer& l, int heads, char* memory, size_t* bytes) {
  const ptrdiff_t K = l.K, V = l.V, C = GDN_CHUNK, most = K > V ? K : V;
  Arena arena{(char*)rounded_up((size_t)memory)};
  char* const start = arena.at;
  Work w;
  w.heads = (HeadState*)arena.at;
  arena.at += rounded_up(heads * sizeof(HeadState));
  w.keys = arena.floats(2 * C * K);
  w.keys_t = arena.floats(K * C);
  w.gram = arena.floats(2 * C * C);
  w.v = arena.floats(C * V);
  w.L = arena.floats(C * C);
  w.A = arena.floats(C * C);
  w.Kd = arena.floats(C * K);
  w.KQS = arena.floats(2 * C * GDN_PANEL);
  w.beta = arena.floats(C);
  w.G = arena.floats(C);
  w.Glow = arena.floats(C);
  w.eG = arena.floats(C);
  w.context = arena.floats((GDN_MAX_TAPS - 1) * (2 * K + heads * V));
  w.spare = arena.floats(K * most);
  w.T = arena.floats(K * K);
  for (int h = 0; h < heads; ++h) {
    float *S = arena.floats(K * V), *T = arena.floats(K * K), *before = arena.floats(K * V);
    if (memory) w.heads[h] = {S, T, before, true, Transition::none};
  }
  if (bytes) *bytes = arena.at - start + 64;
  return w;
}

static size_t gdn_scratch(const GdnLayer& l, int heads) {
  size_t bytes;
  carve(l, heads, nullptr, &bytes);
  return bytes;
}

// ------------------------------------------------------------------------------------------------ chunk: q, k, v

// A task: value heads [head, head + heads) of one key head.  Its channels are q, k and then v of every value head.
template <class X>
struct Task {
  const GdnLayer& l;
  int head, heads, key_head;
  Work w;

  Task(const GdnLayer& layer, int head, int heads, void* scratch)
      : l(layer),
        head(head),
        heads(heads),
        key_head(head / (layer.value_heads / layer.key_heads)),
        w(carve(layer, heads, (char*)scratch, nullptr)) {}

  const X* row(int64_t r) const { return (const X*)l.mixed + r * l.mixed_stride; }
  ptrdiff_t context_stride() const { return 2 * l.K + heads * l.V; }
  ptrdiff_t q_channel() const { return (ptrdiff_t)key_head * l.K; }
  ptrdiff_t k_channel() const { return (ptrdiff_t)(l.key_heads + key_head) * l.K; }
  ptrdiff_t v_channel(int h) const { return (ptrdiff_t)2 * l.key_heads * l.K + (ptrdiff_t)(head + h) * l.V; }

  // The context of the convolution: taps - 1 rows of all channels, `rows` apart; null: zeros.
  void load_context(const X* from, ptrdiff_t rows, ptrdiff_t channels) {
    for (int i = 0; i < l.taps - 1; ++i) {
      float* to = w.context + i * context_stride();
      const X* source = from ? from + i * rows : nullptr;
      load_channels(source, channels, q_channel(), l.K, to);
      load_channels(source, channels, k_channel(), l.K, to + l.K);
      load_channels(source, channels, v_channel(0), heads * l.V, to + 2 * l.K);
    }
  }

  static void load_channels(const X* from, ptrdiff_t stride, ptrdiff_t first, int count, float* to) {
    if (!from)
      for (int c = 0; c < count; c += W) vstore(to + c, vzero());
    else if (stride == 1)
      for (int c = 0; c < count; c += W) vstore(to + c, vload_as_float(from + first + c));
    else
      for (int c = 0; c < count; ++c) to[c] = to_float(from[(first + c) * stride]);
  }

  // Convolution and SiLU of n rows of some channels, NV vectors side by side; `context` is moved on.
  template <int TAPS, int NV>
  void convolve_strip(const X* x, int n, ptrdiff_t channel, int width, float* context, float* out) const {
    vf tap[TAPS][NV], past[TAPS][NV], bias[NV];
    for (int j = 0; j < NV; ++j) {
      for (int i = 0; i < TAPS; ++i) tap[i][j] = vload(l.weight + i * l.channels + channel + j * W);
      for (int i = 0; i < TAPS - 1; ++i) past[i][j] = vload(context + i * context_stride() + j * W);
      bias[j] = l.bias ? vload(l.bias + channel + j * W) : vzero();
    }
    x += channel;
    for (int t = 0; t < n; ++t, x += l.mixed_stride) {
      // Rows are pages apart, which no hardware prefetcher follows: ask for the next chunk's now.
      _mm_prefetch((const char*)(x + GDN_CHUNK * l.mixed_stride), _MM_HINT_T1);
#pragma GCC unroll 2
      for (int j = 0; j < NV; ++j) {
        past[TAPS - 1][j] = vload_as_float(x + j * W);
        vf sum = vfma(past[0][j], tap[0][j], bias[j]);
#pragma GCC unroll 4
        for (int i = 1; i < TAPS; ++i) sum = vfma(past[i][j], tap[i][j], sum);
        vstore(out + t * width + j * W, vrounded_to(vmul(sum, vsigmoid(sum)), x));
#pragma GCC unroll 4
        for (int i = 0; i < TAPS - 1; ++i) past[i][j] = past[i + 1][j];
      }
    }
    for (int i = 0; i < TAPS - 1; ++i)
      for (int j = 0; j < NV; ++j) vstore(context + i * context_stride() + j * W, past[i][j]);
  }

  // Strips are as wide as a cache line of bf16: rows are often a power of two apart, and then the lines of a strip
  // push each other out of the first cache before a second strip could use them.
  template <int TAPS>
  void convolve_taps(const X* x, int n, ptrdiff_t channel, int width, float* context, float* out) const {
    int c = 0;
    for (; c + 2 * W <= width; c += 2 * W) convolve_strip<TAPS, 2>(x, n, channel + c, width, context + c, out + c);
    if (c < width) convolve_strip<TAPS, 1>(x, n, channel + c, width, context + c, out + c);
  }

  void convolve(const X* x, int n, ptrdiff_t channel, int width, float* context, float* out) const {
    switch (l.taps) {
      case 2: return convolve_taps<2>(x, n, channel, width, context, out);
      case 3: return convolve_taps<3>(x, n, channel, width, context, out);
      default: return convolve_taps<4>(x, n, channel, width, context, out);
    }
  }

  void normalise(float* x, int n, float scale) const {
    for (int t = 0; t < n; ++t, x += l.K) {
      vf squares = vzero();
      for (int c = 0; c < l.K; c += W) squares = vfma(vload(x + c), vload(x + c), squares);
      const vf factor = vset(scale / __builtin_sqrtf(vsum(squares) + l.eps));
      for (int c = 0; c < l.K; c += W) vstore(x + c, vmul(vload(x + c), factor));
    }
  }

  // Keys, queries and their products, for all value heads of the task.
  void keys_and_queries(const X* x, int n) {
    const int K = l.K;
    float *k = w.keys, *q = w.keys + n * K;
    convolve(x, n, q_channel(), K, w.context, q);
    convolve(x, n, k_channel(), K, w.context + K, k);
    normalise(k, n, 1.0f);
    normalise(q, n, 1.0f / __builtin_sqrtf((float)K));
    const int columns = (n + W - 1) / W * W;
    // Four rows at a time; what is read behind row n becomes zero below.
    for (int t = 0; t < n; t += 4)
      for (int c = 0; c < K; c += 4) {
        const float* from = k + t * K + c;
        float* to = w.keys_t + c * GDN_CHUNK + t;
        __m128 r0 = _mm_loadu_ps(from), r1 = _mm_loadu_ps(from + K), r2 = _mm_loadu_ps(from + 2 * K),
               r3 = _mm_loadu_ps(from + 3 * K);
        _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
        _mm_storeu_ps(to, r0);
        _mm_storeu_ps(to + GDN_CHUNK, r1);
        _mm_storeu_ps(to + 2 * GDN_CHUNK, r2);
        _mm_storeu_ps(to + 3 * GDN_CHUNK, r3);
      }
    if (n < columns)
      for (int c = 0; c < K; ++c)
        for (int t = n; t < columns; ++t) w.keys_t[c * GDN_CHUNK + t] = 0.0f;
    gemm<Into::set>(2 * n, columns, K, w.keys, K, 1, w.keys_t, GDN_CHUNK, w.gram, GDN_CHUNK);
  }

  // beta, G (a float and what it lacks), e^G of value head h.
  void gates(int64_t first, int n, int h) {
    const X *a = (const X*)l.a + first * l.a_stride + head + h, *b = (const X*)l.b + first * l.b_stride + head + h;
    float steps[GDN_CHUNK] __attribute__((aligned(64)));
    for (int t = 0; t < GDN_CHUNK; ++t) {
      steps[t] = t < n ? to_float(a[t * l.a_stride]) : 0.0f;
      w.beta[t] = t < n ? to_float(b[t * l.b_stride]) : 0.0f;
    }
    const vf rate = vset(l.rate[head + h]), bias = vset(l.dt_bias[head + h]);
    for (int t = 0; t < n; t += W) {
      vstore(steps + t, vmul(rate, vsoftplus(vadd(vload(steps + t), bias))));
      vstore(w.beta + t, vsigmoid(vload(w.beta + t)));
    }
    double sum = 0;
    for (int t = 0; t < n; ++t) {
      sum += steps[t];
      w.G[t] = (float)sum;
      w.Glow[t] = (float)(sum - w.G[t]);
    }
    for (int t = n; t < GDN_CHUNK; ++t) w.G[t] = w.Glow[t] = 0.0f;
    for (int t = 0; t < n; t += W) vstore(w.eG + t, vexp(vload(w.G + t)));
  }

  // e^(G_t - G_s) for s in [s, s + W); wrong, but finite, for s > t.
  vf decay(int t, int s) const {
    const vf high = vsub(vset(w.G[t]), vload(w.G + s)), low = vsub(vset(w.Glow[t]), vload(w.Glow + s));
    return vexp(vmin(vzero(), vadd(high, low)));
  }

  // L, A and Kd of the value head whose gates are set.
  void triangles(int n) {
    for (int t = 0; t < n; ++t) {
      const vf beta = vset(w.beta[t]);
      for (int s = 0; s < n; s += W) {
        const int at = t * GDN_CHUNK + s;
        const vf d = decay(t, s);
        vstore(w.L + at, vmul(vmul(d, beta), vload(w.gram + at)));
        vstore(w.A + at, vkeep(vmul(d, vload(w.gram + n * GDN_CHUNK + at)), t + 1 - s, vzero()));
      }
    }
    float to_end[GDN_CHUNK] __attribute__((aligned(64)));
    for (int t = 0; t < n; t += W) vstore(to_end + t, decay(n - 1, t));
    for (int t = 0; t < n; ++t)
      for (int c = 0; c < l.K; c += W)
        vstore(w.Kd + t * l.K + c, vmul(vset(to_end[t]), vload(w.keys + t * l.K + c)));
  }

  // ---------------------------------------------------------------------------------------------- chunk: states

  // Outputs of rows [first, first + n), and S moved on.
  void advance_state(int64_t first, int n, int h) {
    const int K = l.K, V = l.V;
    HeadState& state = w.heads[h];
    const float end = w.eG[n - 1];
    float* S = state.S;
    for (int c = 0; c < V; c += GDN_PANEL) {
      const int width = panel_width(V, c);
      float *D = w.KQS, *o = w.KQS + n * width;
      if (!state.zero) gemm<Into::set>(2 * n, width, K, w.keys, K, 1, S, width, w.KQS, width);
      for (int t = 0; t < n; ++t) {
        const vf beta = vset(w.beta[t]), eG = vset(w.eG[t]);
        for (int j = 0; j < width; j += W) {
          const vf v = vload(w.v + t * V + c + j);
          const int at = t * width + j;
          vstore(D + at, vmul(beta, state.zero ? v : vfnma(eG, vload(D + at), v)));
          vstore(o + at, state.zero ? vzero() : vmul(eG, vload(o + at)));
        }
      }
      solve(n, width, w.L, D, width);
      add_triangular(n, width, w.A, D, width, o, width);
      X* out = (X*)l.out + first * l.out_stride + (ptrdiff_t)(head + h) * V + c;
      for (int t = 0; t < n; ++t)
        for (int j = 0; j < width; j += W) vstore_rounded(out + t * l.out_stride + j, vload(o + t * width + j));
      if (state.zero)
        gemm<Into::set>(K, width, n, w.Kd, 1, K, D, width, S, width);
      else
        gemm<Into::decay>(K, width, n, w.Kd, 1, K, D, width, S, width, end);
      S += K * width;
    }
    state.zero = false;
  }

  // T moved on by the same chunk.
  void advance_transition(int n, int h, float dead_below) {
    const int K = l.K;
    HeadState& state = w.heads[h];
    const float end = w.eG[n - 1];
    const bool identity = state.transition == Transition::identity;
    float* T = state.T;
    for (int c = 0; c < K; c += GDN_PANEL) {
      const int width = panel_width(K, c);
      float* D = w.KQS;
      if (!identity) gemm<Into::set>(n, width, K, w.keys, K, 1, T, width, D, width);
      for (int t = 0; t < n; ++t) {
        const vf factor = vset(-w.beta[t] * w.eG[t]);
        const float* from = identity ? w.keys + t * K + c : D + t * width;
        for (int j = 0; j < width; j += W) vstore(D + t * width + j, vmul(factor, vload(from + j)));
      }
      solve(n, width, w.L, D, width);
      if (identity) {
        gemm<Into::set>(K, width, n, w.Kd, 1, K, D, width, T, width);
        for (int j = 0; j < width; ++j) T[(c + j) * width + j] += end;
      } else {
        gemm<Into::decay>(K, width, n, w.Kd, 1, K, D, width, T, width, end);
      }
      T += K * width;
    }
    // NaN counts as alive.
    state.transition = largest(state.T, (ptrdiff_t)K * K) < dead_below ? Transition::dead : Transition::full;
  }

  // Rows [first, stop) of one request, in their context and from its state.
  void run(int64_t first, int64_t stop, float dead_below) {
    for (; first < stop; first += GDN_CHUNK) {
      const int n = stop - first < GDN_CHUNK ? (int)(stop - first) : GDN_CHUNK;
      const X* x = row(first);
      keys_and_queries(x, n);
      for (int h = 0; h < heads; ++h) {
        convolve(x, n, v_channel(h), l.V, w.context + 2 * l.K + h * l.V, w.v);
        gates(first, n, h);
        triangles(n);
        advance_state(first, n, h);
        const Transition t = w.heads[h].transition;
        if (t == Transition::identity || t == Transition::full) advance_transition(n, h, dead_below);
      }
    }
  }

  // ---------------------------------------------------------------------------------------------- caches, records

  float* cached_state(int64_t slot, int h) const {
    return l.state + slot * l.state_slot + (ptrdiff_t)(head + h) * l.K * l.V;
  }

  void start(int64_t slot, bool resumed) {
    load_context(resumed ? (const X*)l.conv + slot * l.conv_slot : nullptr, l.conv_row, l.conv_channel);
    for (int h = 0; h < heads; ++h) {
      w.heads[h].zero = !resumed;
      w.heads[h].transition = Transition::none;
      if (resumed) to_panels(cached_state(slot, h), l.K, l.V, w.heads[h].S);
    }
  }

  void finish(int64_t slot) {
    for (int h = 0; h < heads; ++h) store_state(w.heads[h], cached_state(slot, h));
  }

  void store_state(const HeadState& state, float* to) const {
    if (state.zero)
      for (int i = 0; i < l.K * l.V; i += W) vstore(to + i, vzero());
    else
      from_panels(state.S, l.K, l.V, to);
  }

  void begin_interior(const GdnSegments& s, const SegmentRow& r) {
    const ptrdiff_t K = l.K, V = l.V;
    for (int h = 0; h < heads; ++h) {
      HeadState& state = w.heads[h];
      if (r.begins) {
        state.transition = Transition::identity;
        if (r.has_head && !state.zero) copy(state.S, K * V, state.before);
        if (r.has_head && state.zero)
          for (ptrdiff_t i = 0; i < K * V; i += W) vstore(state.before + i, vzero());
        continue;
      }
      const GdnCarry& carry = s.carries[r.carry];
      state.transition = carry.alive[head + h] ? Transition::full : Transition::dead;
      if (state.transition == Transition::dead) continue;
      to_panels(carry.transition + (head + h) * K * K, K, K, state.T);
      if (r.has_head) to_panels(carry.head + (head + h) * K * V, K, V, state.before);
    }
  }

  void pause_interior(const GdnSegments& s, const SegmentRow& r) {
    const ptrdiff_t K = l.K, V = l.V;
    const GdnCarry& carry = s.carries[r.carry];
    for (int h = 0; h < heads; ++h) {
      HeadState& state = w.heads[h];
      carry.alive[head + h] = state.transition == Transition::full;
      if (state.transition == Transition::dead) continue;
      from_panels(state.T, K, K, carry.transition + (head + h) * K * K);
      if (r.has_head && r.begins) from_panels(state.before, K, V, carry.head + (head + h) * K * V);
    }
  }

  // The record of head h: S - T before, and T where it is alive.
  void record(const GdnRecords& records, const SegmentRow& r, int h) {
    const ptrdiff_t K = l.K, V = l.V;
    const HeadState& state = w.heads[h];
    const ptrdiff_t index = r.slot * l.value_heads + head + h;
    float* to = records.state + index * K * V;
    const bool alive = state.transition == Transition::full;
    if (!(alive && r.has_head)) {
      store_state(state, to);
    } else {
      copy(state.S, K * V, w.spare);
      ptrdiff_t panel = 0;
      for (int c = 0; c < V; c += GDN_PANEL) {
        const int width = panel_width((int)V, c);
        const float* T = state.T;
        for (int i = 0; i < K; i += GDN_PANEL) {
          const int inner = panel_width((int)K, i);
          gemm<Into::subtract>((int)K, width, inner, T, inner, 1, state.before + panel + i * width, width,
                               w.spare + panel, width);
          T += K * inner;
        }
        panel += K * width;
      }
      from_panels(w.spare, (int)K, (int)V, to);
    }
    int32_t& tile = records.tile_of[index];
    if (!alive) {
      tile = -1;
      return;
    }
    const float* T = state.T;
    fp16* stored = records.tiles + tile * K * K;
    for (int c = 0; c < K; c += GDN_PANEL) {
      const int width = panel_width((int)K, c);
      for (int i = 0; i < K; ++i, T += width)
        for (int j = 0; j < width; j += W) vstore_fp16(stored + i * K + c + j, vload(T + j));
    }
  }

  // S <- T S + record, or as `mode` says.
  void apply(const GdnRecords& records, int64_t slot, int64_t mode, int h) {
    const ptrdiff_t K = l.K, V = l.V;
    HeadState& state = w.heads[h];
    const ptrdiff_t index = slot * l.value_heads + head + h;
    const float* record = records.state + index * K * V;
    const int32_t tile = mode == compose_transition ? records.tile_of[index] : -1;
    const bool forget = mode == compose_replace || (mode == compose_transition && tile < 0);
    if (forget || state.zero) {
      to_panels(record, l.K, l.V, state.S);
      state.zero = false;
      return;
    }
    float* after = w.spare;
    to_panels(record, l.K, l.V, after);
    if (mode == compose_add) {
      for (ptrdiff_t i = 0; i < K * V; i += W) vstore(after + i, vadd(vload(after + i), vload(state.S + i)));
    } else {
      const fp16* T = records.tiles + tile * K * K;
      for (ptrdiff_t i = 0; i < K * K; i += W) vstore(w.T + i, vload_fp16(T + i));
      ptrdiff_t panel = 0;
      for (int c = 0; c < V; c += GDN_PANEL) {
        const int width = panel_width(l.V, c);
        gemm<Into::add>(l.K, width, l.K, w.T, l.K, 1, state.S + panel, width, after + panel, width);
        panel += K * width;
      }
    }
    w.spare = state.S;
    state.S = after;
  }
};

// ------------------------------------------------------------------------------------------------ one request

template <class X>
static void segments_of(const GdnSegments& s, int request, int head, int heads, void* scratch) {
  const SegmentRow& r = s.rows[request];
  Task<X> task(s.layer, head, heads, scratch);
  const int64_t slot = s.layer.slots[r.batch_row];
  task.start(slot, r.resumed);
  task.run(r.first, r.begin, 0);
  if (r.begin < r.end) {
    if (!r.leading) task.begin_interior(s, r);
    task.run(r.begin, r.end, s.dead_below);
    if (r.ends)
      for (int h = 0; h < heads; ++h) task.record(s.records, r, h);
    else if (!r.leading)
      task.pause_interior(s, r);
    for (int h = 0; h < heads; ++h) task.w.heads[h].transition = Transition::none;
  }
  task.run(r.end, r.stop, 0);
  task.finish(slot);
}

template <class X>
static void compose_of(const GdnCompose& s, int request, int head, int heads, void* scratch) {
  const GdnLayer& l = s.layer;
  const ComposeRow& r = s.rows[request];
  Task<X> task(l, head, heads, scratch);
  const int64_t slot = l.slots[r.batch_row];
  task.start(slot, r.resumed);
  for (int64_t i = r.first_op; i < r.stop_op; ++i) {
    const ComposeOp& op = s.ops[i];
    task.run(op.first, op.first + op.count, 0);
    if (op.mode == compose_none) continue;
    for (int h = 0; h < heads; ++h) task.apply(s.records, op.slot, op.mode, h);
    task.load_context((const X*)s.records.tail + op.slot * (l.taps - 1) * l.channels, l.channels, 1);
  }
  task.finish(slot);
}

// The rows that a convolution sees, in logical order; the last taps - 1 of them are remembered.
template <class X>
struct Tail {
  const GdnLayer& l;
  const X* row[GDN_MAX_TAPS];  // null: zeros
  ptrdiff_t channel[GDN_MAX_TAPS];

  void push(const X* x, ptrdiff_t stride) {
    const int n = l.taps - 1;
    for (int i = 0; i + 1 < n; ++i) row[i] = row[i + 1], channel[i] = channel[i + 1];
    row[n - 1] = x;
    channel[n - 1] = stride;
  }

  void push_tokens(int64_t first, int64_t stop) {
    if (stop - first > l.taps - 1) first = stop - (l.taps - 1);
    for (; first < stop; ++first) push((const X*)l.mixed + first * l.mixed_stride, 1);
  }

  void push_rows(const X* x, ptrdiff_t rows, ptrdiff_t stride) {
    for (int i = 0; i < l.taps - 1; ++i) push(x ? x + i * rows : nullptr, stride);
  }

  // In rising order: where a cache is moved up in place, rows are read before they are overwritten.
  void write(X* to, ptrdiff_t rows, ptrdiff_t stride) const {
    for (int i = 0; i < l.taps - 1; ++i) {
      const X* from = row[i];
      X* const end = to + i * rows;
      if (from == end) continue;
      if (from && channel[i] == 1 && stride == 1)
        __builtin_memcpy(end, from, l.channels * sizeof(X));
      else
        for (ptrdiff_t c = 0; c < l.channels; ++c) end[c * stride] = from ? from[c * channel[i]] : X(0);
    }
  }
};

template <class X>
static void segments_caches_of(const GdnSegments& s, int request) {
  const GdnLayer& l = s.layer;
  const SegmentRow& r = s.rows[request];
  X* cache = (X*)l.conv + l.slots[r.batch_row] * l.conv_slot;
  Tail<X> tail{l, {}, {}};
  tail.push_rows(r.resumed ? cache : nullptr, l.conv_row, l.conv_channel);
  tail.push_tokens(r.first, r.end);
  if (r.ends) tail.write((X*)s.records.tail + r.slot * (l.taps - 1) * l.channels, l.channels, 1);
  tail.push_tokens(r.end, r.stop);
  tail.write(cache, l.conv_row, l.conv_channel);
}

template <class X>
static void compose_caches_of(const GdnCompose& s, int request) {
  const GdnLayer& l = s.layer;
  const ComposeRow& r = s.rows[request];
  X* cache = (X*)l.conv + l.slots[r.batch_row] * l.conv_slot;
  Tail<X> tail{l, {}, {}};
  tail.push_rows(r.resumed ? cache : nullptr, l.conv_row, l.conv_channel);
  for (int64_t i = r.first_op; i < r.stop_op; ++i) {
    const ComposeOp& op = s.ops[i];
    tail.push_tokens(op.first, op.first + op.count);
    if (op.mode != compose_none)
      tail.push_rows((const X*)s.records.tail + op.slot * (l.taps - 1) * l.channels, l.channels, 1);
  }
  tail.write(cache, l.conv_row, l.conv_channel);
}

static void gdn_segments(const GdnSegments& s, int request, int head, int heads, void* scratch) {
  const FlushSubnormals flush;
  s.layer.bf16 ? segments_of<bf16>(s, request, head, heads, scratch)
               : segments_of<float>(s, request, head, heads, scratch);
}

static void gdn_segments_caches(const GdnSegments& s, int request) {
  s.layer.bf16 ? segments_caches_of<bf16>(s, request) : segments_caches_of<float>(s, request);
}

static void gdn_compose(const GdnCompose& s, int request, int head, int heads, void* scratch) {
  const FlushSubnormals flush;
  s.layer.bf16 ? compose_of<bf16>(s, request, head, heads, scratch)
               : compose_of<float>(s, request, head, heads, scratch);
}

static void gdn_compose_caches(const GdnCompose& s, int request) {
  s.layer.bf16 ? compose_caches_of<bf16>(s, request) : compose_caches_of<float>(s, request);
}

}  // namespace HYPIC_ISA
}  // namespace hypic
