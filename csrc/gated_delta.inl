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
// Gates of channels (Kimi delta attention): every row of S decays by itself, so G_t is a vector [K], e^G k, e^G q and
// Kd are elementwise, and decays stand inside the products
//
//     L_ts = beta_t sum_c k_tc k_sc e^{G_tc - G_sc}          A_ts = sum_c q_tc k_sc e^{G_tc - G_sc}
//
// Keys decay token by token, so these are dot products of vectors that are there anyway (Kd, in the end).
//
// Convolution, SiLU, l2 norm and gates of a chunk are computed on the way.  q and k are those of a key head, so a task
// treats value heads of one key head.

#include "layer_math.inl"
#include "layer_conv.inl"

#include "gated_delta_math.inl"
#include "gated_delta_task.inl"

namespace hypic {
namespace HYPIC_ISA {

// ------------------------------------------------------------------------------------------------ one request

template <class X, Gates gates>
static void segments_of(const GdnSegments& s, int request, int head, int heads, void* scratch) {
  const SegmentRow& r = s.rows[request];
  Task<X, gates> task(s.layer, head, heads, scratch);
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

template <class X, Gates gates>
static void compose_of(const GdnCompose& s, int request, int head, int heads, void* scratch) {
  const GdnLayer& l = s.layer;
  const ComposeRow& r = s.rows[request];
  Task<X, gates> task(l, head, heads, scratch);
  const int64_t slot = l.slots[r.batch_row];
  task.start(slot, r.resumed);
  for (int64_t i = r.first_op; i < r.stop_op; ++i) {
    const ComposeOp& op = s.ops[i];
    if (op.mode == compose_restore) task.keep();
    task.run(op.first, op.first + op.count, 0);
    if (op.mode == compose_restore) task.restore();
    if (!applies_record(op.mode)) continue;
    for (int h = 0; h < heads; ++h) task.apply(s.records, op.slot, op.mode, h);
    task.load_context((const X*)s.records.tail + op.slot * (l.taps - 1) * l.channels, l.channels, 1);
  }
  task.finish(slot);
}

static void gdn_segments(const GdnSegments& s, int request, int head, int heads, void* scratch) {
  const FlushSubnormals flush;
  if (s.layer.channel_gates)
    s.layer.bf16 ? segments_of<bf16, Gates::channel>(s, request, head, heads, scratch)
                 : segments_of<float, Gates::channel>(s, request, head, heads, scratch);
  else
    s.layer.bf16 ? segments_of<bf16, Gates::head>(s, request, head, heads, scratch)
                 : segments_of<float, Gates::head>(s, request, head, heads, scratch);
}

static void gdn_segments_caches(const GdnSegments& s, int request) {
  s.layer.bf16 ? segments_caches_of<bf16>(s, request) : segments_caches_of<float>(s, request);
}

static void gdn_compose(const GdnCompose& s, int request, int head, int heads, void* scratch) {
  const FlushSubnormals flush;
  if (s.layer.channel_gates)
    s.layer.bf16 ? compose_of<bf16, Gates::channel>(s, request, head, heads, scratch)
                 : compose_of<float, Gates::channel>(s, request, head, heads, scratch);
  else
    s.layer.bf16 ? compose_of<bf16, Gates::head>(s, request, head, heads, scratch)
                 : compose_of<float, Gates::head>(s, request, head, heads, scratch);
}

static void gdn_compose_caches(const GdnCompose& s, int request) {
  s.layer.bf16 ? compose_caches_of<bf16>(s, request) : compose_caches_of<float>(s, request);
}

}  // namespace HYPIC_ISA
}  // namespace hypic
