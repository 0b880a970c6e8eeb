// One task of Mamba2: its scratch memory, and a walk over token rows for heads of one group.  See mamba2.inl for the
// equations.

#include "mamba2.h"

namespace hypic {
namespace HYPIC_ISA {

constexpr int SSD_CHUNK = 64;

// States [P, N]: of the request; from zero over its interior; where `keep` was called.
struct Mamba2Head {
  float *S, *alone, *kept;
  bool zero, alone_zero, kept_zero;  // what the memory holds does not count
  double log_transition;             // of the interior
};

// What a task works with.  Rows of matrices whose columns are tokens are SSD_CHUNK apart.
struct Mamba2Work {
  float *B, *C;    // [n, N]
  float* C_t;      // [N, chunk]
  float* scores;   // [n, chunk] B_s . C_t, by s
  float* weights;  // [n, chunk] the same, decayed, and 0 for t < s
  float* x;        // [n, P], then times d
  float* y;        // [n, P]
  float* y_t;      // [P, chunk]
  float* added;    // [P, N]
  float *d, *G, *Glow, *eG, *to_end;  // [chunk]
  float* context;  // [taps - 1, channels of this task]
  Mamba2Head* heads;
};

static Mamba2Work mamba2_carve(const Mamba2Layer& l, int heads, char* memory, size_t* bytes) {
  const ptrdiff_t P = l.P, N = l.N, T = SSD_CHUNK;
  Arena arena{(char*)rounded_up((size_t)memory)};
  char* const start = arena.at;
  Mamba2Work w;
  w.heads = (Mamba2Head*)arena.at;
  arena.at += rounded_up(heads * sizeof(Mamba2Head));
  w.B = arena.floats(T * N);
  w.C = arena.floats(T * N);
  w.C_t = arena.floats(N * T);
  w.scores = arena.floats(T * T);
  w.weights = arena.floats(T * T);
  w.x = arena.floats(T * P);
  w.y = arena.floats(T * P);
  w.y_t = arena.floats(P * T);
  w.added = arena.floats(P * N);
  w.d = arena.floats(T);
  w.G = arena.floats(T);
  w.Glow = arena.floats(T);
  w.eG = arena.floats(T);
  w.to_end = arena.floats(T);
  w.context = arena.floats((MAX_TAPS - 1) * (heads * P + 2 * N));
  for (int h = 0; h < heads; ++h) {
    float *S = arena.floats(P * N), *alone = arena.floats(P * N), *kept = arena.floats(P * N);
    if (memory) w.heads[h] = {S, alone, kept, true, true, true, 0};
  }
  if (bytes) *bytes = arena.at - start + 64;
  return w;
}

static size_t mamba2_scratch(const Mamba2Layer& l, int heads) {
  size_t bytes;
  mamba2_carve(l, heads, nullptr, &bytes);
  return bytes;
}

// S <- scale S + added; `zero`: S counts as zero.
static void move_state(float* S, bool zero, float scale, const float* added, ptrdiff_t count) {
  if (zero) return copy(added, count, S);
  const vf by = vset(scale);
  for (ptrdiff_t i = 0; i < count; i += W) vstore(S + i, vfma(by, vload(S + i), vload(added + i)));
}

// A task: heads [head, head + heads) of one group.  Its channels are x of every head, then B and C.
template <class X>
struct Mamba2Task {
  const Mamba2Layer& l;
  int head, heads, group;
  bool interior = false;  // rows belong to an interior whose record has T
  Mamba2Work w;

  Mamba2Task(const Mamba2Layer& layer, int head, int heads, void* scratch)
      : l(layer),
        head(head),
        heads(heads),
        group(head / (layer.heads / layer.groups)),
        w(mamba2_carve(layer, heads, (char*)scratch, nullptr)) {}

  ptrdiff_t elements() const { return (ptrdiff_t)l.P * l.N; }
  ptrdiff_t context_stride() const { return (ptrdiff_t)heads * l.P + 2 * l.N; }
  ptrdiff_t x_channel(int h) const { return (ptrdiff_t)(head + h) * l.P; }
  ptrdiff_t B_channel() const { return (ptrdiff_t)l.heads * l.P + (ptrdiff_t)group * l.N; }
  ptrdiff_t C_channel() const { return B_channel() + (ptrdiff_t)l.groups * l.N; }

  // The context of the convolution: taps - 1 rows of all channels, `rows` apart; null: zeros.
  void load_context(const X* from, ptrdiff_t rows, ptrdiff_t channels) {
    for (int i = 0; i < l.taps - 1; ++i) {
      float* to = w.context + i * context_stride();
      const X* source = from ? from + i * rows : nullptr;
      load_channels(source, channels, x_channel(0), heads * l.P, to);
      load_channels(source, channels, B_channel(), l.N, to + heads * l.P);
      load_channels(source, channels, C_channel(), l.N, to + heads * l.P + l.N);
    }
  }

  void convolve(const X* x, int n, ptrdiff_t channel, int width, float* context, float* out) const {
    // As vLLM's operator for prefill does.
    convolve_rows<Sums::rounded>(l, SSD_CHUNK, x, n, channel, width, context, context_stride(), out);
  }

  // ---------------------------------------------------------------------------------------------- chunks

  static int columns(int n) { return (n + W - 1) / W * W; }

  // B, C and their products, for all heads of the task.
  void keys_and_queries(const X* x, int n) {
    const int N = l.N;
    float* context = w.context + heads * l.P;
    convolve(x, n, B_channel(), N, context, w.B);
    convolve(x, n, C_channel(), N, context + N, w.C);
    // What is read behind row n becomes zero below.
    transpose(w.C, N, n, N, w.C_t, SSD_CHUNK);
    if (n < columns(n))
      for (int c = 0; c < N; ++c)
        for (int t = n; t < columns(n); ++t) w.C_t[c * SSD_CHUNK + t] = 0.0f;
    gemm<Into::set>(n, columns(n), N, w.B, N, 1, w.C_t, SSD_CHUNK, w.scores, SSD_CHUNK);
  }

  // d, G (a float and what it lacks), e^G and e^(G_n - G) of head h; returns G_n.
  double gates(int64_t first, int n, int h) {
    const X* dt = (const X*)l.dt + first * l.dt_stride + head + h;
    for (int t = 0; t < SSD_CHUNK; ++t) w.d[t] = t < n ? to_float(dt[t * l.dt_stride]) : 0.0f;
    const vf bias = vset(l.dt_bias[head + h]);
    for (int t = 0; t < n; t += W) vstore(w.d + t, vsoftplus(vadd(vload(w.d + t), bias)));
    const double rate = l.rate[head + h];
    double sum = 0;
    for (int t = 0; t < n; ++t) {
      sum += rate * w.d[t];
      w.G[t] = (float)sum;
      w.Glow[t] = (float)(sum - w.G[t]);
    }
    for (int t = n; t < SSD_CHUNK; ++t) w.G[t] = w.Glow[t] = 0.0f;
    const vf last = vset(w.G[n - 1]), last_low = vset(w.Glow[n - 1]);
    for (int t = 0; t < n; t += W) {
      const vf G = vload(w.G + t), low = vload(w.Glow + t);
      vstore(w.eG + t, vexp(G));
      vstore(w.to_end + t, vexp(vmin(vzero(), vadd(vsub(last, G), vsub(last_low, low)))));
    }
    return sum;
  }

  // The weight of x_s in y_t, of the head whose gates are set.
  void decayed_scores(int n) {
    for (int s = 0; s < n; ++s) {
      const vf G = vset(w.G[s]), low = vset(w.Glow[s]);
      float* const row = w.weights + s * SSD_CHUNK;
      const float* const scores = w.scores + s * SSD_CHUNK;
      // `add_triangular` reads GEMM_ROWS - 1 columns before the diagonal, too.
      const int from = s < GEMM_ROWS ? 0 : (s - GEMM_ROWS) / W * W;
      for (int t = from; t < n; t += W) {
        const vf high = vsub(vload(w.G + t), G), rest = vsub(vload(w.Glow + t), low);
        const vf weight = vmul(vexp(vmin(vzero(), vadd(high, rest))), vload(scores + t));
        vstore(row + t, vkeep(vzero(), s - t, weight));
      }
    }
  }

  // Outputs of rows [first, first + n), and the states moved on.
  void advance(int64_t first, int n, int h) {
    const int P = l.P, N = l.N;
    Mamba2Head& state = w.heads[h];
    convolve((const X*)l.mixed + first * l.mixed_stride, n, x_channel(h), P, w.context + h * P, w.x);
    const double log_decay = gates(first, n, h);
    decayed_scores(n);
    if (!state.zero) {
      gemm<Into::set>(P, columns(n), N, state.S, N, 1, w.C_t, SSD_CHUNK, w.y_t, SSD_CHUNK);
      transpose(w.y_t, SSD_CHUNK, P, columns(n), w.y, P);
    }
    const vf D = vset(l.D[head + h]);
    for (int t = 0; t < n; ++t) {
      const vf d = vset(w.d[t]), eG = vset(w.eG[t]);
      float *x = w.x + t * P, *y = w.y + t * P;
      for (int j = 0; j < P; j += W) {
        const vf direct = vmul(D, vload(x + j));
        vstore(y + j, state.zero ? direct : vfma(eG, vload(y + j), direct));
        vstore(x + j, vmul(d, vload(x + j)));
      }
    }
    add_triangular(n, P, w.weights, 1, SSD_CHUNK, w.x, P, w.y, P);
    X* out = (X*)l.out + first * l.out_stride + (ptrdiff_t)(head + h) * P;
    for (int t = 0; t < n; ++t)
      for (int j = 0; j < P; j += W) vstore_rounded(out + t * l.out_stride + j, vload(w.y + t * P + j));

    for (int t = 0; t < n; ++t) {
      const vf to_end = vset(w.to_end[t]);
      for (int j = 0; j < P; j += W) vstore(w.x + t * P + j, vmul(to_end, vload(w.x + t * P + j)));
    }
    const float decay = w.eG[n - 1];
    if (interior) {
      gemm<Into::set>(P, N, n, w.x, 1, P, w.B, N, w.added, N);
      move_state(state.S, state.zero, decay, w.added, elements());
      move_state(state.alone, state.alone_zero, decay, w.added, elements());
      state.alone_zero = false;
      state.log_transition += log_decay;
    } else if (state.zero) {
      gemm<Into::set>(P, N, n, w.x, 1, P, w.B, N, state.S, N);
    } else {
      gemm<Into::decay>(P, N, n, w.x, 1, P, w.B, N, state.S, N, decay);
    }
    state.zero = false;
  }

  // Rows [first, stop) of one request, in their context and from its state.
  void run(int64_t first, int64_t stop) {
    for (; first < stop; first += SSD_CHUNK) {
      const int n = stop - first < SSD_CHUNK ? (int)(stop - first) : SSD_CHUNK;
      keys_and_queries((const X*)l.mixed + first * l.mixed_stride, n);
      for (int h = 0; h < heads; ++h) advance(first, n, h);
    }
  }

  // ---------------------------------------------------------------------------------------------- caches, records

  // A head's place in vLLM's cache, in elements.
  ptrdiff_t cached(int64_t slot, int h) const { return slot * l.state_slot + (head + h) * elements(); }

  void start(int64_t slot, bool resumed) {
    load_context(resumed ? (const X*)l.conv + slot * l.conv_slot : nullptr, l.conv_row, l.conv_channel);
    for (int h = 0; h < heads; ++h) {
      w.heads[h].zero = !resumed;
      if (!resumed) continue;
      float* S = w.heads[h].S;
      const ptrdiff_t at = cached(slot, h);
      for (ptrdiff_t i = 0; i < elements(); i += W) switch (l.state_type) {
          case StateType::f32: vstore(S + i, vload((const float*)l.state + at + i)); break;
          case StateType::bf16: vstore(S + i, vload_bf16((const bf16*)l.state + at + i)); break;
          case StateType::f16: vstore(S + i, vload_fp16((const fp16*)l.state + at + i)); break;
        }
    }
  }

  void finish(int64_t slot) {
    for (int h = 0; h < heads; ++h) {
      const float* S = w.heads[h].S;
      const ptrdiff_t at = cached(slot, h);
      for (ptrdiff_t i = 0; i < elements(); i += W) {
        const vf x = w.heads[h].zero ? vzero() : vload(S + i);
        switch (l.state_type) {
          case StateType::f32: vstore((float*)l.state + at + i, x); break;
          case StateType::bf16: vstore_bf16((bf16*)l.state + at + i, x); break;
          case StateType::f16: vstore_fp16((fp16*)l.state + at + i, x); break;
        }
      }
    }
  }

  // null: it begins here.
  void begin_interior(const Mamba2Carry* carry) {
    interior = true;
    for (int h = 0; h < heads; ++h) {
      Mamba2Head& state = w.heads[h];
      state.alone_zero = !carry;
      state.log_transition = carry ? carry->log_transition[head + h] : 0;
      if (carry) copy(carry->state + (head + h) * elements(), elements(), state.alone);
    }
  }

  void pause_interior(const Mamba2Carry& carry) {
    interior = false;
    for (int h = 0; h < heads; ++h) {
      carry.log_transition[head + h] = w.heads[h].log_transition;
      copy(w.heads[h].alone, elements(), carry.state + (head + h) * elements());
    }
  }

  void record(const Mamba2Records& records, int64_t slot) {
    for (int h = 0; h < heads; ++h) {
      const ptrdiff_t index = slot * l.heads + head + h;
      const Mamba2Head& state = w.heads[h];
      records.log_transition[index] = interior ? (float)state.log_transition : -__builtin_inff();
      copy(interior ? state.alone : state.S, elements(), records.state + index * elements());
    }
    interior = false;
  }

  // The states, until `restore`.
  void keep() {
    for (int h = 0; h < heads; ++h) {
      Mamba2Head& state = w.heads[h];
      if (!(state.kept_zero = state.zero)) copy(state.S, elements(), state.kept);
    }
  }

  void restore() {
    for (int h = 0; h < heads; ++h) {
      Mamba2Head& state = w.heads[h];
      float* const S = state.kept;
      state.kept = state.S;
      state.S = S;
      state.zero = state.kept_zero;
    }
  }

  // S <- T S + record, or as `mode` says.
  void apply(const Mamba2Records& records, int64_t slot, int64_t mode, int h) {
    const ptrdiff_t index = slot * l.heads + head + h;
    Mamba2Head& state = w.heads[h];
    const float* record = records.state + index * elements();
    if (mode == compose_replace || state.zero) {
      copy(record, elements(), state.S);
    } else {
      const vf T = mode == compose_add ? vset(1) : vexp(vset(records.log_transition[index]));
      for (ptrdiff_t i = 0; i < elements(); i += W)
        vstore(state.S + i, vfma(T, vload(state.S + i), vload(record + i)));
    }
    state.zero = false;
  }
};

}  // namespace HYPIC_ISA
}  // namespace hypic
