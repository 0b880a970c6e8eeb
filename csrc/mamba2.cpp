// Launchers of Mamba2: checks, division into tasks, threads.

#include "mamba2.h"

#include <optional>
#include <vector>

#include "bindings.h"
#include "dispatch.h"
#include "layer_launch.h"

namespace hypic {
namespace {

Mamba2Layer layer_of(const Tensor& mixed, const Tensor& dt, const Tensor& weight, const std::optional<Tensor>& bias,
                     const Tensor& rate, const Tensor& dt_bias, const Tensor& D, int64_t groups, const Tensor& slots,
                     const Tensor& conv, const Tensor& state, const Tensor& out) {
  TORCH_CHECK_VALUE(state.dim() == 4 && packed_inside(state), "state must be [slots, H, P, N], contiguous inside");
  const int64_t H = state.size(1), P = state.size(2), N = state.size(3), rows = mixed.size(0);
  TORCH_CHECK_VALUE(groups > 0 && H % groups == 0, H, " heads over ", groups, " groups");
  TORCH_CHECK_VALUE(P % MULTIPLE == 0 && N % MULTIPLE == 0, "head sizes ", P, " and ", N, ": expected multiples of ",
                    MULTIPLE);
  const int64_t channels = H * P + 2 * groups * N, taps = weight.size(0);
  TORCH_CHECK_VALUE(2 <= taps && taps <= MAX_TAPS, "convolution of width ", taps, ": expected 2 to ", MAX_TAPS);
  TORCH_CHECK_TYPE(mixed.scalar_type() == at::kBFloat16 || mixed.scalar_type() == at::kFloat, "inputs are ",
                   mixed.scalar_type(), ": expected bfloat16 or float32");
  for (const Tensor* t : {&dt, &conv, &out})
    TORCH_CHECK_TYPE(t->scalar_type() == mixed.scalar_type(), "inputs, outputs and conv cache must have one dtype");
  TORCH_CHECK_VALUE(mixed.dim() == 2 && mixed.size(1) == channels && mixed.stride(1) == 1, "mixed must be [rows, ",
                    channels, "]");
  TORCH_CHECK_VALUE(dt.dim() == 2 && dt.size(0) >= rows && dt.size(1) == H && dt.stride(1) == 1,
                    "dt must be [rows, ", H, "]");
  TORCH_CHECK_VALUE(out.dim() == 3 && out.size(0) >= rows && out.size(1) == H && out.size(2) == P &&
                        packed_inside(out),
                    "out must be [rows, ", H, ", ", P, "], contiguous inside");
  TORCH_CHECK_VALUE(conv.dim() == 3 && conv.size(0) == state.size(0) && conv.size(1) == taps - 1 &&
                        conv.size(2) == channels,
                    "conv must be [slots, ", taps - 1, ", ", channels, "]");
  check_float(weight, {taps, channels}, "weight");
  if (bias) check_float(*bias, {channels}, "bias");
  check_float(rate, {H}, "rate");
  check_float(dt_bias, {H}, "dt_bias");
  check_float(D, {H}, "D");
  TORCH_CHECK_VALUE(slots.scalar_type() == at::kInt && slots.dim() == 1 && slots.is_contiguous(),
                    "slots must be contiguous int32");
  Mamba2Layer l{};
  l.bf16 = mixed.scalar_type() == at::kBFloat16;
  l.mixed = mixed.data_ptr();
  l.mixed_stride = mixed.stride(0);
  l.dt = dt.data_ptr();
  l.dt_stride = dt.stride(0);
  l.out = out.data_ptr();
  l.out_stride = out.stride(0);
  l.groups = int(groups);
  l.heads = int(H);
  l.P = int(P);
  l.N = int(N);
  l.taps = int(taps);
  l.channels = channels;
  l.weight = weight.data_ptr<float>();
  l.bias = bias ? bias->data_ptr<float>() : nullptr;
  l.rate = rate.data_ptr<float>();
  l.dt_bias = dt_bias.data_ptr<float>();
  l.D = D.data_ptr<float>();
  l.conv = conv.data_ptr();
  l.conv_slot = conv.stride(0);
  l.conv_row = conv.stride(1);
  l.conv_channel = conv.stride(2);
  l.state = state.data_ptr();
  l.state_type = state_type_of(state);
  l.state_slot = state.stride(0);
  l.slots = slots.data_ptr<int32_t>();
  return l;
}

Mamba2Records records_of(const Mamba2Layer& l, at::ScalarType inputs, const Tensor& state, const Tensor& tail,
                         const Tensor& log_transition) {
  const int64_t slots = log_transition.size(0);
  check_float(log_transition, {slots, l.heads}, "record_log_transition");
  check_float(state, {slots, l.heads, l.P, l.N}, "record_state");
  TORCH_CHECK_VALUE(tail.sizes() == at::IntArrayRef({slots, l.taps - 1, int64_t(l.channels)}) &&
                        tail.is_contiguous() && tail.scalar_type() == inputs,
                    "record_tail must be [slots, ", l.taps - 1, ", ", l.channels, "], contiguous, like the inputs");
  return {state.data_ptr<float>(), tail.data_ptr(), log_transition.data_ptr<float>()};
}

template <class Args>
void run(const Args& args, int64_t requests, void (*task)(const Args&, int, int, int, void*),
         void (*caches)(const Args&, int)) {
  const Mamba2Layer& l = args.layer;
  run_tasks(args, requests, l.heads, l.heads / l.groups, kernels().mamba2.scratch, task, caches);
}

// See vllm_hypic/backends/ops/mamba2/__init__.py for what these compute.

void mamba2_segments(const Tensor& mixed, const Tensor& dt, const Tensor& weight, const std::optional<Tensor>& bias,
                     const Tensor& rate, const Tensor& dt_bias, const Tensor& D, int64_t groups, const Tensor& slots,
                     Tensor conv, Tensor state, Tensor out, Tensor record_state, Tensor record_tail,
                     Tensor record_log_transition, const Tensor& rows, const Tensors& carry_log_transition,
                     const Tensors& carry_state) {
  const Tensor dense_slots = slots.contiguous();
  Mamba2Segments s{};
  s.layer = layer_of(mixed, dt, weight, bias, rate, dt_bias, D, groups, dense_slots, conv, state, out);
  s.records = records_of(s.layer, mixed.scalar_type(), record_state, record_tail, record_log_transition);
  s.rows = program_of<SegmentRow>(rows, "rows");
  const Mamba2Layer& l = s.layer;
  const size_t carried = carry_log_transition.size();
  TORCH_CHECK_VALUE(carry_state.size() == carried, "lists of one length are carried");
  std::vector<Mamba2Carry> carries;
  for (size_t i = 0; i < carried; ++i) {
    const Tensor& log = carry_log_transition[i];
    TORCH_CHECK_VALUE(log.scalar_type() == at::kDouble && log.is_contiguous() && log.numel() == l.heads,
                      "carry_log_transition must be contiguous float64 [", l.heads, "]");
    check_float(carry_state[i], {l.heads, l.P, l.N}, "carry_state");
    carries.push_back({log.data_ptr<double>(), carry_state[i].data_ptr<float>()});
  }
  s.carries = carries.data();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const SegmentRow& r = s.rows[i];
    check_request(dense_slots, state, r.batch_row);
    check_segment(r, i, mixed.size(0), record_state.size(0), carried);
  }
  run(s, rows.size(0), kernels().mamba2.segments, kernels().mamba2.segments_caches);
}

void mamba2_compose(const Tensor& mixed, const Tensor& dt, const Tensor& weight, const std::optional<Tensor>& bias,
                    const Tensor& rate, const Tensor& dt_bias, const Tensor& D, int64_t groups, const Tensor& slots,
                    Tensor conv, Tensor state, Tensor out, const Tensor& record_state, const Tensor& record_tail,
                    const Tensor& record_log_transition, const Tensor& rows, const Tensor& ops) {
  const Tensor dense_slots = slots.contiguous();
  Mamba2Compose s{};
  s.layer = layer_of(mixed, dt, weight, bias, rate, dt_bias, D, groups, dense_slots, conv, state, out);
  s.records = records_of(s.layer, mixed.scalar_type(), record_state, record_tail, record_log_transition);
  s.rows = program_of<ComposeRow>(rows, "rows");
  s.ops = program_of<ComposeOp>(ops, "ops");
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const ComposeRow& r = s.rows[i];
    check_request(dense_slots, state, r.batch_row);
    check_compose(r, ops.size(0));
  }
  for (int64_t i = 0; i < ops.size(0); ++i) check_op(s.ops[i], mixed.size(0), record_state.size(0));
  run(s, rows.size(0), kernels().mamba2.compose, kernels().mamba2.compose_caches);
}

}  // namespace

void bind_mamba2(pybind11::module_& module) {
  bind(module, "mamba2_segments", mamba2_segments);
  bind(module, "mamba2_compose", mamba2_compose);
}

}  // namespace hypic
