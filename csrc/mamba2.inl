// Mamba2 (SSD) in closed form, chunk by chunk, in float.
//
// Per head, a chunk of n tokens that starts from state S [P, N], with G_t = A (d_1 + ... + d_t):
//
//     y_t  = e^{G_t} S C_t + sum_{s <= t} e^{G_t - G_s} (C_t . B_s) d_s x_s + D x_t
//     S'   = e^{G_n} S + U        U = sum_s e^{G_n - G_s} d_s x_s B_s^T
//
// U does not depend on S: the record's state, which starts from zero, takes it from the same product.
//
// Gates enter as differences G_t - G_s <= 0 of sums taken in double: nothing overflows, and strong gates cost no
// accuracy.
//
// Convolution, SiLU and softplus of a chunk are computed on the way.  B and C are those of a group, so a task treats
// heads of one group.

#include "layer_math.inl"
#include "layer_conv.inl"

#include "mamba2_task.inl"

namespace hypic {
namespace HYPIC_ISA {

template <class X>
static void mamba2_segments_of(const Mamba2Segments& s, int request, int head, int heads, void* scratch) {
  const SegmentRow& r = s.rows[request];
  Mamba2Task<X> task(s.layer, head, heads, scratch);
  const int64_t slot = s.layer.slots[r.batch_row];
  task.start(slot, r.resumed);
  task.run(r.first, r.begin);
  if (r.begin < r.end) {
    if (!r.leading) task.begin_interior(r.begins ? nullptr : &s.carries[r.carry]);
    task.run(r.begin, r.end);
    if (r.ends)
      task.record(s.records, r.slot);
    else if (!r.leading)
      task.pause_interior(s.carries[r.carry]);
  }
  task.run(r.end, r.stop);
  task.finish(slot);
}

template <class X>
static void mamba2_compose_of(const Mamba2Compose& s, int request, int head, int heads, void* scratch) {
  const Mamba2Layer& l = s.layer;
  const ComposeRow& r = s.rows[request];
  Mamba2Task<X> task(l, head, heads, scratch);
  const int64_t slot = l.slots[r.batch_row];
  task.start(slot, r.resumed);
  for (int64_t i = r.first_op; i < r.stop_op; ++i) {
    const ComposeOp& op = s.ops[i];
    if (op.mode == compose_restore) task.keep();
    task.run(op.first, op.first + op.count);
    if (op.mode == compose_restore) task.restore();
    if (!applies_record(op.mode)) continue;
    for (int h = 0; h < heads; ++h) task.apply(s.records, op.slot, op.mode, h);
    task.load_context((const X*)s.records.tail + op.slot * (l.taps - 1) * l.channels, l.channels, 1);
  }
  task.finish(slot);
}

static void mamba2_segments(const Mamba2Segments& s, int request, int head, int heads, void* scratch) {
  const FlushSubnormals flush;
  s.layer.bf16 ? mamba2_segments_of<bf16>(s, request, head, heads, scratch)
               : mamba2_segments_of<float>(s, request, head, heads, scratch);
}

static void mamba2_segments_caches(const Mamba2Segments& s, int request) {
  s.layer.bf16 ? segments_caches_of<bf16>(s, request) : segments_caches_of<float>(s, request);
}

static void mamba2_compose(const Mamba2Compose& s, int request, int head, int heads, void* scratch) {
  const FlushSubnormals flush;
  s.layer.bf16 ? mamba2_compose_of<bf16>(s, request, head, heads, scratch)
               : mamba2_compose_of<float>(s, request, head, heads, scratch);
}

static void mamba2_compose_caches(const Mamba2Compose& s, int request) {
  s.layer.bf16 ? compose_caches_of<bf16>(s, request) : compose_caches_of<float>(s, request);
}

}  // namespace HYPIC_ISA
}  // namespace hypic
