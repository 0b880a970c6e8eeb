// One task of the gated delta rule: its scratch memory, and a walk over token rows for the value heads of one key head.
// See gated_delta.inl for the equations.

namespace hypic {
namespace HYPIC_ISA {

// ------------------------------------------------------------------------------------------------ scratch memory

enum class Gates { head, channel };  // what decays alike: all of a head's state, or a row of it

enum class Transition { none, identity, full, dead };  // identity: nothing was multiplied in yet

struct HeadState {
  float *S, *T, *before;  // panels; `before`: S where the interior began, or where `keep` was called
  bool zero, kept_zero;   // S is zero, whatever its memory holds; it was so where `keep` was called
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
  // Of channels, which decay apart: decays of each token [chunk, K] and of all so far [K]; keys and queries times the
  // latter [2 n, K].
  float *decay, *end, *decayed;
  float* context;  // [taps - 1, channels of this task]
  float* spare;    // [K, max(K, V)]
  float* T;        // [K, K] a record's transition
  HeadState* heads;
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
  const ptrdiff_t apart = l.channel_gates ? K : 0;
  w.decay = arena.floats(C * apart);
  w.end = arena.floats(apart);
  w.decayed = arena.floats(2 * C * apart);
  w.context = arena.floats((MAX_TAPS - 1) * (2 * K + heads * V));
  w.spare = arena.floats(K * most);
  w.T = arena.floats(K * K);
  for (int h = 0; h < heads; ++h) {
    float *S = arena.floats(K * V), *T = arena.floats(K * K), *before = arena.floats(K * V);
    if (memory) w.heads[h] = {S, T, before, true, true, Transition::none};
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
template <class X, Gates gates>
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

  void convolve(const X* x, int n, ptrdiff_t channel, int width, float* context, float* out) const {
    convolve_rows<Sums::exact>(l, GDN_CHUNK, x, n, channel, width, context, context_stride(), out);
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
    if (gates == Gates::channel) return;  // their products are each value head's own
    const int columns = (n + W - 1) / W * W;
    // What is read behind row n becomes zero below.
    transpose(k, K, n, K, w.keys_t, GDN_CHUNK);
    if (n < columns)
      for (int c = 0; c < K; ++c)
        for (int t = n; t < columns; ++t) w.keys_t[c * GDN_CHUNK + t] = 0.0f;
    gemm<Into::set>(2 * n, columns, K, w.keys, K, 1, w.keys_t, GDN_CHUNK, w.gram, GDN_CHUNK);
  }

  // beta of value head h.
  void write_strengths(int64_t first, int n, int h) {
    const X* b = (const X*)l.b + first * l.b_stride + head + h;
    for (int t = 0; t < GDN_CHUNK; ++t) w.beta[t] = t < n ? to_float(b[t * l.b_stride]) : 0.0f;
    for (int t = 0; t < n; t += W) vstore(w.beta + t, vmul(vset(l.largest_beta), vsigmoid(vload(w.beta + t))));
  }

  // G (a float and what it lacks), e^G of value head h.
  void head_gates(int64_t first, int n, int h) {
    const X* a = (const X*)l.a + first * l.a_stride + head + h;
    float steps[GDN_CHUNK] __attribute__((aligned(64)));
    for (int t = 0; t < GDN_CHUNK; ++t) steps[t] = t < n ? to_float(a[t * l.a_stride]) : 0.0f;
    const vf rate = vset(l.rate[head + h]), bias = vset(l.dt_bias[head + h]);
    for (int t = 0; t < n; t += W) vstore(steps + t, vmul(rate, vsoftplus(vadd(vload(steps + t), bias))));
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
  void head_triangles(int n) {
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

  // Decays of each token of value head h's channels.
  void channel_gates(int64_t first, int n, int h) {
    const ptrdiff_t K = l.K, at = (head + h) * K;
    const vf rate = vset(l.rate[head + h]), bound = vset(l.gate_bound);
    const X* a = (const X*)l.a + first * l.a_stride + at;
    for (int t = 0; t < n; ++t, a += l.a_stride)
      for (int c = 0; c < K; c += W) {
        const vf x = vadd(vload_as_float(a + c), vload(l.dt_bias + at + c));
        const vf g =
            l.gate_bound < 0 ? vmul(bound, vsigmoid(vsub(vzero(), vmul(rate, x)))) : vmul(rate, vsoftplus(x));
        vstore(w.decay + t * K + c, vexp(g));
      }
  }

  // L, A, Kd, and what stands for e^G, of the value head whose gates are set.  Row s of Kd is key s, which decays by the
  // tokens behind it as they come: products of numbers up to 1, of which none is divided by another.
  void channel_triangles(int n) {
    const ptrdiff_t K = l.K;
    for (int t = 0; t < n; ++t) {
      const float *decay = w.decay + t * K, *k = w.keys + t * K, *q = w.keys + (n + t) * K;
      float *L = w.L + t * GDN_CHUNK, *A = w.A + t * GDN_CHUNK;
      for (int s = 0; s < GDN_CHUNK; s += W) vstore(A + s, vzero());
      int s = 0;
      for (; s + 4 <= t; s += 4) decay_rows<4>(K, decay, w.Kd + s * K, k, q, w.beta[t], L + s, A + s);
      for (; s < t; ++s) decay_rows<1>(K, decay, w.Kd + s * K, k, q, w.beta[t], L + s, A + s);
      vf by_q = vzero();
      for (int c = 0; c < K; c += W) {
        const vf kc = vload(k + c), qc = vload(q + c), d = vload(decay + c);
        const vf end = t ? vmul(d, vload(w.end + c)) : d;
        vstore(w.Kd + t * K + c, kc);
        vstore(w.end + c, end);
        vstore(w.decayed + t * K + c, vmul(end, kc));
        vstore(w.decayed + (n + t) * K + c, vmul(end, qc));
        by_q = vfma(qc, kc, by_q);
      }
      A[t] = vsum(by_q);
      w.eG[t] = 1.0f;  // `decayed` has it
    }
  }

  // ---------------------------------------------------------------------------------------------- chunk: states

  // Keys, then queries, of the chunk: where channels decay apart, times e^G.
  const float* readers() const { return gates == Gates::channel ? w.decayed : w.keys; }

  // e^G of channel c behind the chunk's n tokens.
  float end_of(int n, int c) const { return gates == Gates::channel ? w.end[c] : w.eG[n - 1]; }

  // A panel of S or T: e^G panel + Kd^T D.
  void move_on(int n, int width, const float* D, float* panel) const {
    const int K = l.K;
    if (gates == Gates::head) return gemm<Into::decay>(K, width, n, w.Kd, 1, K, D, width, panel, width, w.eG[n - 1]);
    for (int c = 0; c < K; ++c)
      for (int j = 0; j < width; j += W) {
        float* const at = panel + c * width + j;
        vstore(at, vmul(vset(w.end[c]), vload(at)));
      }
    gemm<Into::add>(K, width, n, w.Kd, 1, K, D, width, panel, width);
  }

  // Outputs of rows [first, first + n), and S moved on.
  void advance_state(int64_t first, int n, int h) {
    const int K = l.K, V = l.V;
    HeadState& state = w.heads[h];
    float* S = state.S;
    for (int c = 0; c < V; c += GDN_PANEL) {
      const int width = panel_width(V, c);
      float *D = w.KQS, *o = w.KQS + n * width;
      if (!state.zero) gemm<Into::set>(2 * n, width, K, readers(), K, 1, S, width, w.KQS, width);
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
      add_triangular(n, width, w.A, GDN_CHUNK, 1, D, width, o, width);
      X* out = (X*)l.out + first * l.out_stride + (ptrdiff_t)(head + h) * V + c;
      for (int t = 0; t < n; ++t)
        for (int j = 0; j < width; j += W) vstore_rounded(out + t * l.out_stride + j, vload(o + t * width + j));
      if (state.zero)
        gemm<Into::set>(K, width, n, w.Kd, 1, K, D, width, S, width);
      else
        move_on(n, width, D, S);
      S += K * width;
    }
    state.zero = false;
  }

  // T moved on by the same chunk.
  void advance_transition(int n, int h, float dead_below) {
    const int K = l.K;
    HeadState& state = w.heads[h];
    const bool identity = state.transition == Transition::identity;
    float* T = state.T;
    for (int c = 0; c < K; c += GDN_PANEL) {
      const int width = panel_width(K, c);
      float* D = w.KQS;
      if (!identity) gemm<Into::set>(n, width, K, readers(), K, 1, T, width, D, width);
      for (int t = 0; t < n; ++t) {
        const vf factor = vset(-w.beta[t] * w.eG[t]);
        const float* from = identity ? readers() + t * K + c : D + t * width;
        for (int j = 0; j < width; j += W) vstore(D + t * width + j, vmul(factor, vload(from + j)));
      }
      solve(n, width, w.L, D, width);
      if (identity) {
        gemm<Into::set>(K, width, n, w.Kd, 1, K, D, width, T, width);
        for (int j = 0; j < width; ++j) T[(c + j) * width + j] += end_of(n, c + j);
      } else {
        move_on(n, width, D, T);
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
        write_strengths(first, n, h);
        if (gates == Gates::channel) {
          channel_gates(first, n, h);
          channel_triangles(n);
        } else {
          head_gates(first, n, h);
          head_triangles(n);
        }
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
    int32_t& block = records.block_of[index];
    if (!alive) {
      block = -1;
      return;
    }
    const float* T = state.T;
    fp16* stored = records.transitions + block * K * K;
    for (int c = 0; c < K; c += GDN_PANEL) {
      const int width = panel_width((int)K, c);
      for (int i = 0; i < K; ++i, T += width)
        for (int j = 0; j < width; j += W) vstore_fp16(stored + i * K + c + j, vload(T + j));
    }
  }

  // The states, until `restore`.
  void keep() {
    for (int h = 0; h < heads; ++h) {
      HeadState& state = w.heads[h];
      if (!(state.kept_zero = state.zero)) copy(state.S, l.K * l.V, state.before);
    }
  }

  void restore() {
    for (int h = 0; h < heads; ++h) {
      HeadState& state = w.heads[h];
      float* const S = state.before;
      state.before = state.S;
      state.S = S;
      state.zero = state.kept_zero;
    }
  }

  // S <- T S + record, or as `mode` says.
  void apply(const GdnRecords& records, int64_t slot, int64_t mode, int h) {
    const ptrdiff_t K = l.K, V = l.V;
    HeadState& state = w.heads[h];
    const ptrdiff_t index = slot * l.value_heads + head + h;
    const float* record = records.state + index * K * V;
    const int32_t block = mode == compose_transition ? records.block_of[index] : -1;
    const bool forget = mode == compose_replace || (mode == compose_transition && block < 0);
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
      const fp16* T = records.transitions + block * K * K;
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

}  // namespace HYPIC_ISA
}  // namespace hypic
