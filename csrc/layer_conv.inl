// The causal convolution of linear layers: its outputs, chunk by chunk, and the rows that its caches keep.
//
// L is a layer: it has taps, channels, weight, bias, mixed, mixed_stride, conv and its strides, and slots.
#pragma once

namespace hypic {
namespace HYPIC_ISA {

constexpr int MAX_TAPS = 4;

// `count` channels of a row as float; null: zeros.
template <class X>
static void load_channels(const X* from, ptrdiff_t stride, ptrdiff_t first, int count, float* to) {
  if (!from)
    for (int c = 0; c < count; c += W) vstore(to + c, vzero());
  else if (stride == 1)
    for (int c = 0; c < count; c += W) vstore(to + c, vload_as_float(from + first + c));
  else
    for (int c = 0; c < count; ++c) to[c] = to_float(from[(first + c) * stride]);
}

// What SiLU is taken of: the sums, or the sums rounded to the inputs' type.
enum class Sums { exact, rounded };

// Convolution and SiLU of n rows of some channels, NV vectors side by side; `context`, of rows `stride` apart, is moved
// on.  Rows in chunks of `chunk`.
template <Sums sums, int TAPS, int NV, class L, class X>
static void convolve_strip(const L& l, int chunk, const X* x, int n, ptrdiff_t channel, int width, float* context,
                           ptrdiff_t stride, float* out) {
  vf tap[TAPS][NV], past[TAPS][NV], bias[NV];
  for (int j = 0; j < NV; ++j) {
    for (int i = 0; i < TAPS; ++i) tap[i][j] = vload(l.weight + i * l.channels + channel + j * W);
    for (int i = 0; i < TAPS - 1; ++i) past[i][j] = vload(context + i * stride + j * W);
    bias[j] = l.bias ? vload(l.bias + channel + j * W) : vzero();
  }
  x += channel;
  for (int t = 0; t < n; ++t, x += l.mixed_stride) {
    // Rows are pages apart, which no hardware prefetcher follows: ask for the next chunk's now.
    _mm_prefetch((const char*)(x + chunk * l.mixed_stride), _MM_HINT_T1);
#pragma GCC unroll 2
    for (int j = 0; j < NV; ++j) {
      past[TAPS - 1][j] = vload_as_float(x + j * W);
      vf sum = vfma(past[0][j], tap[0][j], bias[j]);
#pragma GCC unroll 4
      for (int i = 1; i < TAPS; ++i) sum = vfma(past[i][j], tap[i][j], sum);
      if (sums == Sums::rounded) sum = vrounded_to(sum, x);
      vstore(out + t * width + j * W, vrounded_to(vmul(sum, vsigmoid(sum)), x));
#pragma GCC unroll 4
      for (int i = 0; i < TAPS - 1; ++i) past[i][j] = past[i + 1][j];
    }
  }
  for (int i = 0; i < TAPS - 1; ++i)
    for (int j = 0; j < NV; ++j) vstore(context + i * stride + j * W, past[i][j]);
}

// Strips are as wide as a cache line of bf16: rows are often a power of two apart, and then the lines of a strip
// push each other out of the first cache before a second strip could use them.
template <Sums sums, int TAPS, class L, class X>
static void convolve_taps(const L& l, int chunk, const X* x, int n, ptrdiff_t channel, int width, float* context,
                          ptrdiff_t stride, float* out) {
  int c = 0;
  for (; c + 2 * W <= width; c += 2 * W)
    convolve_strip<sums, TAPS, 2>(l, chunk, x, n, channel + c, width, context + c, stride, out + c);
  if (c < width) convolve_strip<sums, TAPS, 1>(l, chunk, x, n, channel + c, width, context + c, stride, out + c);
}

template <Sums sums, class L, class X>
static void convolve_rows(const L& l, int chunk, const X* x, int n, ptrdiff_t channel, int width, float* context,
                          ptrdiff_t stride, float* out) {
  switch (l.taps) {
    case 2: return convolve_taps<sums, 2>(l, chunk, x, n, channel, width, context, stride, out);
    case 3: return convolve_taps<sums, 3>(l, chunk, x, n, channel, width, context, stride, out);
    default: return convolve_taps<sums, 4>(l, chunk, x, n, channel, width, context, stride, out);
  }
}

// The rows that a convolution sees, in logical order; the last taps - 1 of them are remembered.
template <class X, class L>
struct Tail {
  const L& l;
  const X* row[MAX_TAPS];  // null: zeros
  ptrdiff_t channel[MAX_TAPS];

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

// What no head of a segment request owns: the convolution's cache, and its part of the record.
template <class X, class Segments>
static void segments_caches_of(const Segments& s, int request) {
  const auto& l = s.layer;
  const SegmentRow& r = s.rows[request];
  X* cache = (X*)l.conv + l.slots[r.batch_row] * l.conv_slot;
  Tail<X, decltype(s.layer)> tail{l, {}, {}};
  tail.push_rows(r.resumed ? cache : nullptr, l.conv_row, l.conv_channel);
  tail.push_tokens(r.first, r.end);
  if (r.ends) tail.write((X*)s.records.tail + r.slot * (l.taps - 1) * l.channels, l.channels, 1);
  tail.push_tokens(r.end, r.stop);
  tail.write(cache, l.conv_row, l.conv_channel);
}

template <class X, class Compose>
static void compose_caches_of(const Compose& s, int request) {
  const auto& l = s.layer;
  const ComposeRow& r = s.rows[request];
  X* cache = (X*)l.conv + l.slots[r.batch_row] * l.conv_slot;
  Tail<X, decltype(s.layer)> tail{l, {}, {}};
  tail.push_rows(r.resumed ? cache : nullptr, l.conv_row, l.conv_channel);
  for (int64_t i = r.first_op; i < r.stop_op; ++i) {
    const ComposeOp& op = s.ops[i];
    tail.push_tokens(op.first, op.first + op.count);
    if (applies_record(op.mode))
      tail.push_rows((const X*)s.records.tail + op.slot * (l.taps - 1) * l.channels, l.channels, 1);
  }
  tail.write(cache, l.conv_row, l.conv_channel);
}

}  // namespace HYPIC_ISA
}  // namespace hypic
