// What the launchers of linear layers' operators share: checks, division into tasks, threads.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>

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

inline StateType state_type_of(const Tensor& state) {
  switch (state.scalar_type()) {
    case at::kFloat: return StateType::f32;
    case at::kBFloat16: return StateType::bf16;
    case at::kHalf: return StateType::f16;
    default: TORCH_CHECK_TYPE(false, "state is ", state.scalar_type(), ": expected float32, bfloat16 or float16");
  }
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
  TORCH_CHECK_INDEX(0 <= r.first && r.first <= r.begin && r.begin <= r.end && r.end <= r.stop && r.stop <= rows, "rows ",
                    r.first, " <= ", r.begin, " <= ", r.end, " <= ", r.stop, " of ", rows);
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
