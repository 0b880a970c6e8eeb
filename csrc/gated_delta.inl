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

#include "gated_delta_math.inl"
#include "gated_delta_task.inl"

namespace hypic {
namespace HYPIC_ISA {

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
    if (op.mode == compose_restore) task.keep();
    task.run(op.first, op.first + op.count, 0);
    if (op.mode == compose_restore) task.restore();
    if (!applies_record(op.mode)) continue;
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
    if (applies_record(op.mode))
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
