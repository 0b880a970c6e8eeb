// The selective scan of Mamba1 in float, token by token. Per channel c and element n of its state
//
//     S  <-  e^{A d} S + d x B        y = (sum_n S C + D x) silu(gate)        d = softplus(dt + dt_bias)
//
// Decays differ by channel and element, so there is no product of matrices in it: lanes are channels, and a task walks
// over tokens with the states [N, channels] of a block in its first cache.  A record's state, which starts from zero,
// moves on beside, by the same decays.

#include "layer_math.inl"

#include "mamba1.h"

namespace hypic {
namespace HYPIC_ISA {

struct Mamba1Work {
  float *S, *alone, *kept;  // [N, SCAN_CHANNELS]: of the request; from zero over its interior; where `keep` was called
  float* rate;              // [N, SCAN_CHANNELS]
  float* turned;            // [SCAN_CHANNELS, N]
  double* elapsed;          // [SCAN_CHANNELS] of the interior
};

static Mamba1Work mamba1_carve(int N, char* memory, size_t* bytes) {
  Arena arena{(char*)rounded_up((size_t)memory)};
  char* const start = arena.at;
  Mamba1Work w;
  w.S = arena.floats(N * SCAN_CHANNELS);
  w.alone = arena.floats(N * SCAN_CHANNELS);
  w.kept = arena.floats(N * SCAN_CHANNELS);
  w.rate = arena.floats(N * SCAN_CHANNELS);
  w.turned = arena.floats(N * SCAN_CHANNELS);
  w.elapsed = (double*)arena.floats(2 * SCAN_CHANNELS);
  if (bytes) *bytes = arena.at - start + 64;
  return w;
}

static size_t mamba1_scratch(const Mamba1Layer& l, int) {
  size_t bytes;
  mamba1_carve(l.N, nullptr, &bytes);
  return bytes;
}

// One block of channels of one request.
template <class X>
struct Mamba1Walk {
  const Mamba1Layer& l;
  const ptrdiff_t channel;  // its first
  bool interior = false;    // rows belong to an interior whose record has T
  Mamba1Work w;

  Mamba1Walk(const Mamba1Layer& layer, int block, void* scratch)
      : l(layer), channel((ptrdiff_t)block * SCAN_CHANNELS), w(mamba1_carve(layer.N, (char*)scratch, nullptr)) {
    turn_in(l.rate + channel * l.N, w.rate);
  }

  ptrdiff_t elements() const { return (ptrdiff_t)l.N * SCAN_CHANNELS; }
  // The block's place among states [slots, channels, N].
  ptrdiff_t recorded(int64_t slot) const { return (slot * l.channels + channel) * l.N; }

  // [SCAN_CHANNELS, N] -> [N, SCAN_CHANNELS], and back.
  void turn_in(const float* from, float* to) const { transpose(from, l.N, SCAN_CHANNELS, l.N, to, SCAN_CHANNELS); }
  void turn_out(const float* from, float* to) const { transpose(from, SCAN_CHANNELS, l.N, SCAN_CHANNELS, to, l.N); }

  void clear(float* state) const {
    for (ptrdiff_t i = 0; i < elements(); i += W) vstore(state + i, vzero());
  }

  template <bool INTERIOR>
  void scan(int64_t first, int64_t stop) {
    for (int j = 0; j < SCAN_CHANNELS; j += W) {
      const ptrdiff_t c = channel + j;
      const vf bias = vload(l.dt_bias + c), D = vload(l.D + c);
      for (int64_t t = first; t < stop; ++t) {
        const vf x = vload_as_float((const X*)l.x + t * l.x_stride + c);
        const vf d = vsoftplus(vadd(vload_as_float((const X*)l.dt + t * l.dt_stride + c), bias));
        const vf written = vmul(d, x);
        const float *B = l.B + t * l.N, *C = l.C + t * l.N;
        vf y = vmul(D, x);
        for (int n = 0; n < l.N; ++n) {
          const ptrdiff_t i = n * SCAN_CHANNELS + j;
          const vf decay = vexp(vmul(vload(w.rate + i), d)), added = vmul(written, vset(B[n]));
          const vf S = vfma(decay, vload(w.S + i), added);
          vstore(w.S + i, S);
          if (INTERIOR) vstore(w.alone + i, vfma(decay, vload(w.alone + i), added));
          y = vfma(S, vset(C[n]), y);
        }
        const vf gate = vload_as_float((const X*)l.gate + t * l.gate_stride + c);
        vstore_rounded((X*)l.out + t * l.out_stride + c, vmul(y, vmul(gate, vsigmoid(gate))));
        if (INTERIOR) {
          float steps[W];
          vstore(steps, d);
          for (int k = 0; k < W; ++k) w.elapsed[j + k] += steps[k];
        }
      }
    }
  }

  void run(int64_t first, int64_t stop) { interior ? scan<true>(first, stop) : scan<false>(first, stop); }

  void start(int64_t slot, bool resumed) {
    if (!resumed) return clear(w.S);
    const ptrdiff_t at = slot * l.state_slot + channel * l.N;
    for (ptrdiff_t i = 0; i < elements(); i += W) switch (l.state_type) {
        case StateType::f32: vstore(w.turned + i, vload((const float*)l.state + at + i)); break;
        case StateType::bf16: vstore(w.turned + i, vload_bf16((const bf16*)l.state + at + i)); break;
        case StateType::f16: vstore(w.turned + i, vload_fp16((const fp16*)l.state + at + i)); break;
      }
    turn_in(w.turned, w.S);
  }

  void finish(int64_t slot) {
    turn_out(w.S, w.turned);
    const ptrdiff_t at = slot * l.state_slot + channel * l.N;
    for (ptrdiff_t i = 0; i < elements(); i += W) switch (l.state_type) {
        case StateType::f32: vstore((float*)l.state + at + i, vload(w.turned + i)); break;
        case StateType::bf16: vstore_bf16((bf16*)l.state + at + i, vload(w.turned + i)); break;
        case StateType::f16: vstore_fp16((fp16*)l.state + at + i, vload(w.turned + i)); break;
      }
  }

  // null: it begins here.
  void begin_interior(const Mamba1Carry* carry) {
    interior = true;
    for (int k = 0; k < SCAN_CHANNELS; ++k) w.elapsed[k] = carry ? carry->elapsed[channel + k] : 0;
    carry ? turn_in(carry->state + channel * l.N, w.alone) : clear(w.alone);
  }

  void pause_interior(const Mamba1Carry& carry) {
    interior = false;
    for (int k = 0; k < SCAN_CHANNELS; ++k) carry.elapsed[channel + k] = w.elapsed[k];
    turn_out(w.alone, carry.state + channel * l.N);
  }

  void record(const Mamba1Records& records, int64_t slot) {
    for (int k = 0; k < SCAN_CHANNELS; ++k)
      records.elapsed[slot * l.channels + channel + k] = interior ? (float)w.elapsed[k] : __builtin_inff();
    turn_out(interior ? w.alone : w.S, records.state + recorded(slot));
    interior = false;
  }

  // The state, until `restore`.
  void keep() const { copy(w.S, elements(), w.kept); }
  void restore() const { copy(w.kept, elements(), w.S); }

  // S <- T S + record, or as `mode` says.
  void apply(const Mamba1Records& records, int64_t slot, int64_t mode) {
    if (mode == compose_replace) return turn_in(records.state + recorded(slot), w.S);
    turn_in(records.state + recorded(slot), w.turned);
    const float* elapsed = records.elapsed + slot * l.channels + channel;
    for (ptrdiff_t i = 0; i < elements(); i += W) {
      const vf T = mode == compose_add ? vset(1) : vexp(vmul(vload(w.rate + i), vload(elapsed + i % SCAN_CHANNELS)));
      vstore(w.S + i, vfma(T, vload(w.S + i), vload(w.turned + i)));
    }
  }
};

template <class X>
static void mamba1_segments_of(const Mamba1Segments& s, int request, int block, void* scratch) {
  const SegmentRow& r = s.rows[request];
  Mamba1Walk<X> walk(s.layer, block, scratch);
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
static void mamba1_compose_of(const Mamba1Compose& s, int request, int block, void* scratch) {
  const ComposeRow& r = s.rows[request];
  Mamba1Walk<X> walk(s.layer, block, scratch);
  const int64_t slot = s.layer.slots[r.batch_row];
  walk.start(slot, r.resumed);
  for (int64_t i = r.first_op; i < r.stop_op; ++i) {
    const ComposeOp& op = s.ops[i];
    if (op.mode == compose_restore) walk.keep();
    walk.run(op.first, op.first + op.count);
    if (op.mode == compose_restore) walk.restore();
    if (applies_record(op.mode)) walk.apply(s.records, op.slot, op.mode);
  }
  walk.finish(slot);
}

static void mamba1_segments(const Mamba1Segments& s, int request, int block, int blocks, void* scratch) {
  const FlushSubnormals flush;
  for (const int stop = block + blocks; block < stop; ++block)
    s.layer.bf16 ? mamba1_segments_of<bf16>(s, request, block, scratch)
                 : mamba1_segments_of<float>(s, request, block, scratch);
}

static void mamba1_compose(const Mamba1Compose& s, int request, int block, int blocks, void* scratch) {
  const FlushSubnormals flush;
  for (const int stop = block + blocks; block < stop; ++block)
    s.layer.bf16 ? mamba1_compose_of<bf16>(s, request, block, scratch)
                 : mamba1_compose_of<float>(s, request, block, scratch);
}

}  // namespace HYPIC_ISA
}  // namespace hypic
