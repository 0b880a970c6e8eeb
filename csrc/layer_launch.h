// What the launchers of linear layers' operators share: checks, division into tasks, threads.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "program.h"
#include "state_type.h"

namespace hypic {

using at::Tensor;

constexpr int64_t MULTIPLE = 16;  // of the sizes of heads: lanes of the widest vector
constexpr int64_t MAX_TAPS = 4;

// Everything of a tensor but its first dimension is contiguous.
inline bool packed_inside(const Tensor& t) { return t.numel() == 0 || t[0].is_contiguous(); }

inline void check_float(const Tensor& t, at::IntArrayRef shape, const char* name) {
  TORCH_CHECK_VALUE(t.sizes() == shape, name, " is ", t.sizes(), ", expected ", shape);
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat && t.is_contiguous(), name, " must be contiguous float32");
}

inline void check_double(const Tensor& t, int64_t elements, const char* name) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kDouble && t.is_contiguous() && t.numel() == elements, name,
                    " must be contiguous float64 [", elements, "]");
}

// `t` holds at least `rows` rows of this shape, each contiguous.
inline void check_rows(const Tensor& t, int64_t rows, at::IntArrayRef shape, const char* name) {
  TORCH_CHECK_VALUE(t.dim() == int64_t(shape.size()) + 1 && t.size(0) >= rows && t.sizes().slice(1) == shape &&
                        packed_inside(t),
                    name, " is ", t.sizes(), ", expected ", rows, " rows of ", shape, ", each contiguous");
}

// Inputs are bf16 or float, and what `likewise` holds is like them.
inline void check_types(const Tensor& inputs, std::initializer_list<const Tensor*> likewise) {
  const at::ScalarType type = inputs.scalar_type();
  TORCH_CHECK_TYPE(type == at::kBFloat16 || type == at::kFloat, "inputs are ", type, ": expected bfloat16 or float32");
  for (const Tensor* t : likewise)
    TORCH_CHECK_TYPE(t->scalar_type() == type, "inputs, outputs and conv cache must have one dtype");
}

inline StateType state_type_of(const Tensor& state) {
  switch (state.scalar_type()) {
    case at::kFloat: return StateType::f32;
    case at::kBFloat16: return StateType::bf16;
    case at::kHalf: return StateType::f16;
    default: TORCH_CHECK_TYPE(false, "state is ", state.scalar_type(), ": expected float32, bfloat16 or float16");
  }
}

// What every layer has: its outputs and where its states are, but for `state` itself.
template <class Layer>
void take_places(Layer& l, const Tensor& out, const Tensor& slots, const Tensor& state) {
  TORCH_CHECK_VALUE(slots.scalar_type() == at::kInt && slots.dim() == 1 && slots.is_contiguous(),
                    "slots must be contiguous int32");
  l.bf16 = out.scalar_type() == at::kBFloat16;
  l.out = out.data_ptr();
  l.out_stride = out.stride(0);
  l.state_slot = state.stride(0);
  l.slots = slots.data_ptr<int32_t>();
}

// What a layer has that convolves `mixed [rows, channels]`.
template <class Layer>
void take_conv(Layer& l, int64_t channels, const Tensor& mixed, const Tensor& weight, const std::optional<Tensor>& bias,
               const Tensor& conv, int64_t slots) {
  const int64_t taps = weight.size(0);
  TORCH_CHECK_VALUE(2 <= taps && taps <= MAX_TAPS, "convolution of width ", taps, ": expected 2 to ", MAX_TAPS);
  check_rows(mixed, 0, {channels}, "mixed");
  TORCH_CHECK_VALUE(conv.sizes() == at::IntArrayRef({slots, taps - 1, channels}), "conv must be [", slots, ", ",
                    taps - 1, ", ", channels, "]");
  check_float(weight, {taps, channels}, "weight");
  if (bias) check_float(*bias, {channels}, "bias");
  l.mixed = mixed.data_ptr();
  l.mixed_stride = mixed.stride(0);
  l.taps = int(taps);
  l.channels = channels;
  l.weight = weight.data_ptr<float>();
  l.bias = bias ? bias->data_ptr<float>() : nullptr;
  l.conv = conv.data_ptr();
  l.conv_slot = conv.stride(0);
  l.conv_row = conv.stride(1);
  l.conv_channel = conv.stride(2);
}

template <class Layer>
void check_tail(const Layer& l, const Tensor& tail, int64_t slots) {
  const at::ScalarType type = l.bf16 ? at::kBFloat16 : at::kFloat;
  TORCH_CHECK_VALUE(tail.sizes() == at::IntArrayRef({slots, l.taps - 1, int64_t(l.channels)}) &&
                        tail.is_contiguous() && tail.scalar_type() == type,
                    "record_tail must be [", slots, ", ", l.taps - 1, ", ", l.channels,
                    "], contiguous, like the inputs");
}

template <class Row>
const Row* program_of(const Tensor& t, const char* name) {
  constexpr int64_t columns = sizeof(Row) / sizeof(int64_t);
  TORCH_CHECK_VALUE(t.scalar_type() == at::kLong && t.dim() == 2 && t.size(1) == columns && t.is_contiguous(), name,
                    " must be contiguous int64 [n, ", columns, "]");
  return reinterpret_cast<const Row*>(t.data_ptr<int64_t>());
}

inline void check_request(const Tensor& slots, const Tensor& state, int64_t batch_row) {
  TORCH_CHECK_INDEX(0 <= batch_row && batch_row < slots.size(0), "batch row ", batch_row, " of ", slots.size(0));
  const int64_t slot = slots.data_ptr<int32_t>()[batch_row];
  TORCH_CHECK_INDEX(0 <= slot && slot < state.size(0), "batch row ", batch_row, " in slot ", slot, " of ",
                    state.size(0));
}

// A segment request's row `index` of a pass over `rows` token rows; `slots` records, `carried` carries.
inline void check_segment(const SegmentRow& r, int64_t index, int64_t rows, int64_t slots, size_t carried) {
  TORCH_CHECK_INDEX(0 <= r.first && r.first <= r.begin && r.begin <= r.end && r.end <= r.stop && r.stop <= rows,
                    "rows ", r.first, " <= ", r.begin, " <= ", r.end, " <= ", r.stop, " of ", rows);
  TORCH_CHECK_INDEX(0 <= r.slot && r.slot < slots, "record ", r.slot, " of ", slots);
  TORCH_CHECK_VALUE(r.begin < r.end || !r.ends, "an empty interior has no record");
  const bool whole = r.begins && r.ends;
  TORCH_CHECK_INDEX(r.leading || r.begin == r.end || whole || (0 <= r.carry && r.carry < int64_t(carried)), "request ",
                    index, " carries number ", r.carry, " of ", carried);
}

inline void check_compose(const ComposeRow& r, int64_t ops) {
  TORCH_CHECK_INDEX(0 <= r.first_op && r.first_op <= r.stop_op && r.stop_op <= ops, "ops ", r.first_op, " to ",
                    r.stop_op, " of ", ops);
}

inline void check_op(const ComposeOp& op, int64_t rows, int64_t slots) {
  TORCH_CHECK_INDEX(0 <= op.first && 0 <= op.count && op.first + op.count <= rows, "rows ", op.first, " to ",
                    op.first + op.count, " of ", rows);
  TORCH_CHECK_VALUE(compose_none <= op.mode && op.mode <= compose_restore, "mode ", op.mode);
  TORCH_CHECK_INDEX(!applies_record(op.mode) || (0 <= op.slot && op.slot < slots), "record ", op.slot, " of ", slots);
}

// The program of segment requests, over so many token rows, records and carries.
template <class Args>
void take_segments(Args& s, const Tensor& program, const Tensor& slots, const Tensor& state, int64_t rows,
                   int64_t records, size_t carried) {
  s.rows = program_of<SegmentRow>(program, "rows");
  for (int64_t i = 0; i < program.size(0); ++i) {
    check_request(slots, state, s.rows[i].batch_row);
    check_segment(s.rows[i], i, rows, records, carried);
  }
}

// The program of composed requests.
template <class Args>
void take_compose(Args& s, const Tensor& program, const Tensor& ops, const Tensor& slots, const Tensor& state,
                  int64_t rows, int64_t records) {
  s.rows = program_of<ComposeRow>(program, "rows");
  s.ops = program_of<ComposeOp>(ops, "ops");
  for (int64_t i = 0; i < program.size(0); ++i) {
    check_request(slots, state, s.rows[i].batch_row);
    check_compose(s.rows[i], ops.size(0));
  }
  for (int64_t i = 0; i < ops.size(0); ++i) check_op(s.ops[i], rows, records);
}

// The `group` heads that share work make one task; with too few tasks for the threads they are divided.
template <class Args, class Layer>
void run_tasks(const Args& args, int64_t requests, int64_t all_heads, int64_t group,
               size_t (*scratch_of)(const Layer&, int), void (*task)(const Args&, int, int, int, void*),
               void (*caches)(const Args&, int)) {
  if (!requests) return;
  const int64_t threads = at::get_num_threads();
  int64_t heads = group;
  while (heads > 1 && (group % heads != 0 || requests * all_heads / heads < threads)) --heads;
  const int64_t per_request = all_heads / heads, tasks = requests * per_request;
  const int64_t used = std::min(threads, tasks);
  const int64_t scratch = int64_t(scratch_of(args.layer, int(heads)));
  Tensor memory = at::empty({used, scratch}, at::kByte);
  char* base = static_cast<char*>(memory.data_ptr());
#pragma omp parallel num_threads(used)
  {
    char* mine = base + omp_get_thread_num() * scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i)
      task(args, int(i / per_request), int(i % per_request * heads), int(heads), mine);
    // Only now: tasks read what this overwrites.
#pragma omp for
    for (int64_t i = 0; i < requests; ++i) caches(args, int(i));
  }
}

}  // namespace hypic
