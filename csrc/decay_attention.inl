// Linear attention with decays in closed form, chunk by chunk, in float.
//
// Per head, a chunk of n tokens that starts from state S [K, V], with G_t = g_1 + ... + g_t of every channel c of K:
//
//     y_t  = S^T (e^{G_t} q_t) + sum_{s <= t} (sum_c q_tc k_sc e^{G_tc - G_sc}) v_s
//     S'   = e^{G_n} S + U        U = sum_s (e^{G_n - G_s} k_s) v_s^T
//
// U does not depend on S: the record's state, which starts from zero, takes it from the same product.
//
// Where all channels decay alike by a constant g, e^{G_t - G_s} is a power of e^g, and the sums over c are one product of
// matrices.  Where each has a gate, e^{G_t - G_s} is not split into e^{G_t} and e^{-G_s}, of which the second overflows:
// each key decays by the tokens behind it as they come, elementwise, and what is left at the chunk's end is what U wants.

#include "layer_math.inl"

#include "decay_attention.h"

namespace hypic {
namespace HYPIC_ISA {

constexpr int DECAY_CHUNK = 64;

// What a task works with; rows of `keys_t` and `weights` are DECAY_CHUNK apart.
struct DecayWork {
  float *S, *alone, *kept;  // [K, V]: of the request; from zero over its interior; where `keep` was called
  float *q, *k;             // [n, K], then e^{G_t} q_t and e^{G_n - G_t} k_t
  float* v;                 // [n, V]
  float* keys_t;            // [K, chunk]
  float* weights;           // [n, chunk] of v_s in y_t, by t
  float* y;                 // [n, V]
  float* added;             // [K, V] U
  float* decay;             // [K] e^{G_n}, or what a state is multiplied by
  float* powers;            // [chunk + 1] e^{g i}
  float* descending;        // [2 chunk] the first chunk of them from behind, then zeros
  double* log_transition;   // [K] of the interior; of one decay the first
};

static DecayWork decay_carve(const DecayLayer& l, char* memory, size_t* bytes) {
  const ptrdiff_t K = l.K, V = l.V, T = DECAY_CHUNK;
  Arena arena{(char*)rounded_up((size_t)memory)};
  char* const start = arena.at;
  DecayWork w;
  w.S = arena.floats(K * V);
  w.alone = arena.floats(K * V);
  w.kept = arena.floats(K * V);
  w.q = arena.floats(T * K);
  w.k = arena.floats(T * K);
  w.v = arena.floats(T * V);
  w.keys_t = arena.floats(K * T);
  w.weights = arena.floats(T * T);
  w.y = arena.floats(T * V);
  w.added = arena.floats(K * V);
  w.decay = arena.floats(K);
  w.powers = arena.floats(T + W);
  w.descending = arena.floats(2 * T);
  w.log_transition = (double*)arena.floats(2 * K);
  if (bytes) *bytes = arena.at - start + 64;
  return w;
}

static size_t decay_scratch(const DecayLayer& l, int) {
  size_t bytes;
  decay_carve(l, nullptr, &bytes);
  return bytes;
}

// One head of one request.
template <class X>
struct DecayWalk {
  const DecayLayer& l;
  const ptrdiff_t head;
  bool interior = false;  // rows belong to an interior whose record has T
  double g = 0;           // of a head without gates of channels
  DecayWork w;

  DecayWalk(const DecayLayer& layer, int h, void* scratch)
      : l(layer), head(h), w(decay_carve(layer, (char*)scratch, nullptr)) {
    if (!l.channel_gates) powers(((const float*)l.g.data)[head]);
  }

  ptrdiff_t elements() const { return (ptrdiff_t)l.K * l.V; }
  ptrdiff_t recorded(int64_t slot) const { return slot * l.heads + head; }

  // Exponents are taken in double: a float, and what it lacks.
  void powers(double rate) {
    g = rate;
    for (int i = 0; i <= DECAY_CHUNK; i += W) {
      float high[W], low[W];
      for (int j = 0; j < W; ++j) {
        high[j] = (float)(rate * (i + j));
        low[j] = (float)(rate * (i + j) - high[j]);
      }
      vstore(w.powers + i, vmul(vexp(vload(high)), vadd(vset(1), vload(low))));
    }
    for (int i = 0; i < DECAY_CHUNK; ++i) {
      w.descending[i] = w.powers[DECAY_CHUNK - 1 - i];
      w.descending[DECAY_CHUNK + i] = 0.0f;
    }
  }

  // ---------------------------------------------------------------------------------------------- chunks

  static int columns(int n) { return (n + W - 1) / W * W; }

  void load(const HeadRows& rows, int64_t first, int n, int channels, float* to) const {
    const X* from = (const X*)rows.data + first * rows.row + head * rows.head;
    for (int t = 0; t < n; ++t)
      for (int c = 0; c < channels; c += W)
        vstore(to + (ptrdiff_t)t * channels + c, vload_as_float(from + t * rows.row + c));
  }

  static void scale(float* row, int count, float by) {
    for (int c = 0; c < count; c += W) vstore(row + c, vmul(vset(by), vload(row + c)));
  }

  // Weights, q and k decayed, and the chunk's decay: of a constant.
  void decay_by_powers(int n) {
    const int K = l.K, T = DECAY_CHUNK;
    // What is read behind row n becomes zero below.
    transpose(w.k, K, n, K, w.keys_t, T);
    if (n < columns(n))
      for (int c = 0; c < K; ++c)
        for (int s = n; s < columns(n); ++s) w.keys_t[c * T + s] = 0.0f;
    gemm<Into::set>(n, columns(n), K, w.q, K, 1, w.keys_t, T, w.weights, T);
    for (int t = 0; t < n; ++t) {
      // e^{g (t - s)}, and zeros where s > t.
      const float* const by = w.descending + T - 1 - t;
      float* const row = w.weights + t * T;
      for (int s = 0; s < columns(n); s += W) vstore(row + s, vmul(vload(by + s), vload(row + s)));
      scale(w.q + (ptrdiff_t)t * K, K, w.powers[t + 1]);
      scale(w.k + (ptrdiff_t)t * K, K, w.powers[n - 1 - t]);
    }
    for (int c = 0; c < K; c += W) vstore(w.decay + c, vset(w.powers[n]));
    if (interior) w.log_transition[0] += g * n;
  }

  // The same of gates of channels.
  void decay_by_channels(int64_t first, int n) {
    const int K = l.K;
    for (int c = 0; c < K; c += W) vstore(w.decay + c, vset(1));
    for (int t = 0; t < n; ++t) {
      const float* gates = (const float*)l.g.data + (first + t) * l.g.row + head * l.g.head;
      float *const q = w.q + (ptrdiff_t)t * K, *const row = w.weights + t * DECAY_CHUNK;
      for (int s = 0; s < DECAY_CHUNK; s += W) vstore(row + s, vzero());
      float factors[W];
      for (int c = 0; c < K; c += W) {
        const vf by = vexp(vload(gates + c)), query = vload(q + c);
        for (int s = 0; s < t; ++s) {
          float* const key = w.k + (ptrdiff_t)s * K + c;
          const vf decayed = vmul(by, vload(key));
          vstore(key, decayed);
          row[s] += vsum(vmul(query, decayed));
        }
        row[t] += vsum(vmul(query, vload(w.k + (ptrdiff_t)t * K + c)));
        const vf all = vmul(by, vload(w.decay + c));
        vstore(w.decay + c, all);
        vstore(q + c, vmul(all, query));
        if (!interior) continue;
        vstore(factors, vload(gates + c));
        for (int j = 0; j < W; ++j) w.log_transition[c + j] += factors[j];
      }
    }
  }

  // S <- decay S + U
  void move(float* S) const {
    for (int c = 0; c < l.K; ++c) {
      const vf by = vset(w.decay[c]);
      for (ptrdiff_t i = (ptrdiff_t)c * l.V, end = i + l.V; i < end; i += W)
        vstore(S + i, vfma(by, vload(S + i), vload(w.added + i)));
    }
  }

  // Outputs of rows [first, first + n), and the states moved on.
  void advance(int64_t first, int n) {
    const int K = l.K, V = l.V;
    load(l.q, first, n, K, w.q);
    load(l.k, first, n, K, w.k);
    load(l.v, first, n, V, w.v);
    l.channel_gates ? decay_by_channels(first, n) : decay_by_powers(n);
    gemm<Into::set>(n, V, K, w.q, K, 1, w.S, V, w.y, V);
    add_triangular(n, V, w.weights, DECAY_CHUNK, 1, w.v, V, w.y, V);
    X* out = (X*)l.out.data + first * l.out.row + head * l.out.head;
    for (int t = 0; t < n; ++t)
      for (int j = 0; j < V; j += W) vstore_rounded(out + t * l.out.row + j, vload(w.y + (ptrdiff_t)t * V + j));
    gemm<Into::set>(K, V, n, w.k, 1, K, w.v, V, w.added, V);
    move(w.S);
    if (interior) move(w.alone);
  }

  void run(int64_t first, int64_t stop) {
    for (; first < stop; first += DECAY_CHUNK)
      advance(first, stop - first < DECAY_CHUNK ? (int)(stop - first) : DECAY_CHUNK);
  }

  // ---------------------------------------------------------------------------------------------- caches, records

  void clear(float* state) const {
    for (ptrdiff_t i = 0; i < elements(); i += W) vstore(state + i, vzero());
  }

  void start(int64_t slot, bool resumed) {
    if (!resumed) return clear(w.S);
    const ptrdiff_t at = slot * l.state_slot + head * elements();
    for (ptrdiff_t i = 0; i < elements(); i += W) switch (l.state_type) {
        case StateType::f32: vstore(w.S + i, vload((const float*)l.state + at + i)); break;
        case StateType::bf16: vstore(w.S + i, vload_bf16((const bf16*)l.state + at + i)); break;
        case StateType::f16: vstore(w.S + i, vload_fp16((const fp16*)l.state + at + i)); break;
      }
  }

  void finish(int64_t slot) const {
    const ptrdiff_t at = slot * l.state_slot + head * elements();
    for (ptrdiff_t i = 0; i < elements(); i += W) switch (l.state_type) {
        case StateType::f32: vstore((float*)l.state + at + i, vload(w.S + i)); break;
        case StateType::bf16: vstore_bf16((bf16*)l.state + at + i, vload(w.S + i)); break;
        case StateType::f16: vstore_fp16((fp16*)l.state + at + i, vload(w.S + i)); break;
      }
  }

  // null: it begins here.
  void begin_interior(const DecayCarry* carry) {
    interior = true;
    for (int c = 0; c < l.decays(); ++c)
      w.log_transition[c] = carry ? carry->log_transition[head * l.decays() + c] : 0;
    carry ? copy(carry->state + head * elements(), elements(), w.alone) : clear(w.alone);
  }

  void pause_interior(const DecayCarry& carry) {
    interior = false;
    for (int c = 0; c < l.decays(); ++c) carry.log_transition[head * l.decays() + c] = w.log_transition[c];
    copy(w.alone, elements(), carry.state + head * elements());
  }

  void record(const DecayRecords& records, int64_t slot) {
    float* const log = records.log_transition + recorded(slot) * l.decays();
    for (int c = 0; c < l.decays(); ++c) log[c] = interior ? (float)w.log_transition[c] : -__builtin_inff();
    copy(interior ? w.alone : w.S, elements(), records.state + recorded(slot) * elements());
    interior = false;
  }

  // The state, until `restore`.
  void keep() const { copy(w.S, elements(), w.kept); }
  void restore() const { copy(w.kept, elements(), w.S); }

  // Into `w.added` a record's state, moved by so many positions.
  void move_record(const float* record, const DecayRelocation& relocation, int64_t shift) const {
    copy(record, elements(), w.added);
    if (!shift) return;
    const int half = relocation.rotated / 2, V = l.V;
    const float* const cosines = relocation.table + (shift < 0 ? -shift : shift) * relocation.rotated;
    for (int i = 0; i < half; ++i) {
      const vf cos = vset(cosines[i]), sin = vset(shift < 0 ? -cosines[half + i] : cosines[half + i]);
      float* const a = w.added + (ptrdiff_t)(relocation.neighbours ? 2 * i : i) * V;
      float* const b = a + (ptrdiff_t)(relocation.neighbours ? 1 : half) * V;
      for (int j = 0; j < V; j += W) {
        const vf x = vload(a + j), y = vload(b + j);
        vstore(a + j, vsub(vmul(x, cos), vmul(y, sin)));
        vstore(b + j, vfma(y, cos, vmul(x, sin)));
      }
    }
  }

  // S <- T S + record, or as `mode` says.
  void apply(const DecayRecords& records, int64_t slot, int64_t mode, const DecayRelocation& relocation, int64_t shift) {
    move_record(records.state + recorded(slot) * elements(), relocation, shift);
    if (mode == compose_replace) return copy(w.added, elements(), w.S);
    const float* const log = records.log_transition + recorded(slot) * l.decays();
    for (int c = 0; c < l.K; c += W) {
      const vf logs = l.channel_gates ? vload(log + c) : vset(log[0]);
      vstore(w.decay + c, mode == compose_add ? vset(1) : vexp(logs));
    }
    move(w.S);
  }
};

template <class X>
static void decay_segments_of(const DecaySegments& s, int request, int head, void* scratch) {
  const SegmentRow& r = s.rows[request];
  DecayWalk<X> walk(s.layer, head, scratch);
  const int64_t slot = s.layer.slots[r.batch_row];
  walk.start(slot, r.resumed);
  walk.run(r.first, r.begin);
  if (r.begin < r.end) {
    if (!r.leading) walk.begin_interior(r.begins ? nullptr : &s.carries[r.carry]);
    walk.run(r.begin, r.end);
    if (r.ends)
      walk.record(s.records, r.slot);
    else if (!r.leading)
      walk.pause_interior(s.carries[r.carry]);
  }
  walk.run(r.end, r.stop);
  walk.finish(slot);
}

template <class X>
static void decay_compose_of(const DecayCompose& s, int request, int head, void* scratch) {
  const ComposeRow& r = s.rows[request];
  DecayWalk<X> walk(s.layer, head, scratch);
  const int64_t slot = s.layer.slots[r.batch_row];
  walk.start(slot, r.resumed);
  for (int64_t i = r.first_op; i < r.stop_op; ++i) {
    const ComposeOp& op = s.ops[i];
    if (op.mode == compose_restore) walk.keep();
    walk.run(op.first, op.first + op.count);
    if (op.mode == compose_restore) walk.restore();
    const int64_t shift = s.relocation.shifts ? s.relocation.shifts[i] : 0;
    if (applies_record(op.mode)) walk.apply(s.records, op.slot, op.mode, s.relocation, shift);
  }
  walk.finish(slot);
}

static void decay_segments(const DecaySegments& s, int request, int head, int heads, void* scratch) {
  const FlushSubnormals flush;
  for (const int stop = head + heads; head < stop; ++head)
    s.layer.bf16 ? decay_segments_of<bf16>(s, request, head, scratch)
                 : decay_segments_of<float>(s, request, head, scratch);
}

static void decay_compose(const DecayCompose& s, int request, int head, int heads, void* scratch) {
  const FlushSubnormals flush;
  for (const int stop = head + heads; head < stop; ++head)
    s.layer.bf16 ? decay_compose_of<bf16>(s, request, head, scratch)
                 : decay_compose_of<float>(s, request, head, scratch);
}

}  // namespace HYPIC_ISA
}  // namespace hypic
