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
  check_types(mixed, {&dt, &conv, &out});
  check_rows(dt, rows, {H}, "dt");
  check_rows(out, rows, {H, P}, "out");
  check_float(rate, {H}, "rate");
  check_float(dt_bias, {H}, "dt_bias");
  check_float(D, {H}, "D");
  Mamba2Layer l{};
  take_places(l, out, slots, state);
  take_conv(l, H * P + 2 * groups * N, mixed, weight, bias, conv, state.size(0));
  l.dt = dt.data_ptr();
  l.dt_stride = dt.stride(0);
  l.groups = int(groups);
  l.heads = int(H);
  l.P = int(P);
  l.N = int(N);
  l.rate = rate.data_ptr<float>();
  l.dt_bias = dt_bias.data_ptr<float>();
  l.D = D.data_ptr<float>();
  l.state = state.data_ptr();
  l.state_type = state_type_of(state);
  return l;
}

Mamba2Records records_of(const Mamba2Layer& l, const Tensor& state, const Tensor& tail,
                         const Tensor& log_transition) {
  const int64_t slots = log_transition.size(0);
  check_float(log_transition, {slots, l.heads}, "record_log_transition");
  check_float(state, {slots, l.heads, l.P, l.N}, "record_state");
  check_tail(l, tail, slots);
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
  s.records = records_of(s.layer, record_state, record_tail, record_log_transition);
  const Mamba2Layer& l = s.layer;
  const size_t carried = carry_log_transition.size();
  TORCH_CHECK_VALUE(carry_state.size() == carried, "lists of one length are carried");
  std::vector<Mamba2Carry> carries;
  for (size_t i = 0; i < carried; ++i) {
    check_double(carry_log_transition[i], l.heads, "carry_log_transition");
    check_float(carry_state[i], {l.heads, l.P, l.N}, "carry_state");
    carries.push_back({carry_log_transition[i].data_ptr<double>(), carry_state[i].data_ptr<float>()});
  }
  s.carries = carries.data();
  take_segments(s, rows, dense_slots, state, mixed.size(0), record_state.size(0), carried);
  run(s, rows.size(0), kernels().mamba2.segments, kernels().mamba2.segments_caches);
}

void mamba2_compose(const Tensor& mixed, const Tensor& dt, const Tensor& weight, const std::optional<Tensor>& bias,
                    const Tensor& rate, const Tensor& dt_bias, const Tensor& D, int64_t groups, const Tensor& slots,
                    Tensor conv, Tensor state, Tensor out, const Tensor& record_state, const Tensor& record_tail,
                    const Tensor& record_log_transition, const Tensor& rows, const Tensor& ops) {
  const Tensor dense_slots = slots.contiguous();
  Mamba2Compose s{};
  s.layer = layer_of(mixed, dt, weight, bias, rate, dt_bias, D, groups, dense_slots, conv, state, out);
  s.records = records_of(s.layer, record_state, record_tail, record_log_transition);
  take_compose(s, rows, ops, dense_slots, state, mixed.size(0), record_state.size(0));
  run(s, rows.size(0), kernels().mamba2.compose, kernels().mamba2.compose_caches);
}

}  // namespace

void bind_mamba2(pybind11::module_& module) {
  bind(module, "mamba2_segments", mamba2_segments);
  bind(module, "mamba2_compose", mamba2_compose);
}

}  // namespace hypic
