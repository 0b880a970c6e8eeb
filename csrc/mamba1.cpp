// Launchers of Mamba1's scan: checks, division into tasks, threads.

#include "mamba1.h"

#include <vector>

#include "bindings.h"
#include "dispatch.h"
#include "layer_launch.h"

namespace hypic {
namespace {

Mamba1Layer layer_of(const Tensor& x, const Tensor& dt, const Tensor& gate, const Tensor& B, const Tensor& C,
                     const Tensor& rate, const Tensor& dt_bias, const Tensor& D, const Tensor& slots,
                     const Tensor& state, const Tensor& out) {
  TORCH_CHECK_VALUE(state.dim() == 3 && packed_inside(state), "state must be [slots, channels, N], contiguous inside");
  const int64_t channels = state.size(1), N = state.size(2), rows = x.size(0);
  TORCH_CHECK_VALUE(channels % SCAN_CHANNELS == 0 && N % 4 == 0, channels, " channels with states of ", N,
                    ": expected multiples of ", SCAN_CHANNELS, " and of 4");
  check_types(x, {&dt, &gate, &out});
  for (const Tensor* t : {&x, &dt, &gate, &out}) check_rows(*t, rows, {channels}, "an input or the output");
  check_float(B, {rows, N}, "B");
  check_float(C, {rows, N}, "C");
  check_float(rate, {channels, N}, "rate");
  check_float(dt_bias, {channels}, "dt_bias");
  check_float(D, {channels}, "D");
  Mamba1Layer l{};
  take_places(l, out, slots, state);
  l.x = x.data_ptr();
  l.x_stride = x.stride(0);
  l.dt = dt.data_ptr();
  l.dt_stride = dt.stride(0);
  l.gate = gate.data_ptr();
  l.gate_stride = gate.stride(0);
  l.B = B.data_ptr<float>();
  l.C = C.data_ptr<float>();
  l.channels = channels;
  l.N = int(N);
  l.rate = rate.data_ptr<float>();
  l.dt_bias = dt_bias.data_ptr<float>();
  l.D = D.data_ptr<float>();
  l.state = state.data_ptr();
  l.state_type = state_type_of(state);
  return l;
}

Mamba1Records records_of(const Mamba1Layer& l, const Tensor& state, const Tensor& elapsed) {
  const int64_t slots = elapsed.size(0);
  check_float(elapsed, {slots, l.channels}, "record_elapsed");
  check_float(state, {slots, l.channels, l.N}, "record_state");
  return {state.data_ptr<float>(), elapsed.data_ptr<float>()};
}

template <class Args>
void run(const Args& args, int64_t requests, void (*task)(const Args&, int, int, int, void*)) {
  const int64_t blocks = args.layer.channels / SCAN_CHANNELS;
  run_tasks(args, requests, blocks, blocks, kernels().mamba1.scratch, task, +[](const Args&, int) {});
}

// See vllm_hypic/backends/ops/mamba1/__init__.py for what these compute.

void mamba1_segments(const Tensor& x, const Tensor& dt, const Tensor& gate, const Tensor& B, const Tensor& C,
                     const Tensor& rate, const Tensor& dt_bias, const Tensor& D, const Tensor& slots, Tensor state,
                     Tensor out, Tensor record_state, Tensor record_elapsed, const Tensor& rows,
                     const Tensors& carry_elapsed, const Tensors& carry_state) {
  const Tensor dense_slots = slots.contiguous();
  Mamba1Segments s{};
  s.layer = layer_of(x, dt, gate, B, C, rate, dt_bias, D, dense_slots, state, out);
  s.records = records_of(s.layer, record_state, record_elapsed);
  const Mamba1Layer& l = s.layer;
  const size_t carried = carry_elapsed.size();
  TORCH_CHECK_VALUE(carry_state.size() == carried, "lists of one length are carried");
  std::vector<Mamba1Carry> carries;
  for (size_t i = 0; i < carried; ++i) {
    check_double(carry_elapsed[i], l.channels, "carry_elapsed");
    check_float(carry_state[i], {l.channels, l.N}, "carry_state");
    carries.push_back({carry_elapsed[i].data_ptr<double>(), carry_state[i].data_ptr<float>()});
  }
  s.carries = carries.data();
  take_segments(s, rows, dense_slots, state, x.size(0), record_state.size(0), carried);
  run(s, rows.size(0), kernels().mamba1.segments);
}

void mamba1_compose(const Tensor& x, const Tensor& dt, const Tensor& gate, const Tensor& B, const Tensor& C,
                    const Tensor& rate, const Tensor& dt_bias, const Tensor& D, const Tensor& slots, Tensor state,
                    Tensor out, const Tensor& record_state, const Tensor& record_elapsed, const Tensor& rows,
                    const Tensor& ops) {
  const Tensor dense_slots = slots.contiguous();
  Mamba1Compose s{};
  s.layer = layer_of(x, dt, gate, B, C, rate, dt_bias, D, dense_slots, state, out);
  s.records = records_of(s.layer, record_state, record_elapsed);
  take_compose(s, rows, ops, dense_slots, state, x.size(0), record_state.size(0));
  run(s, rows.size(0), kernels().mamba1.compose);
}

}  // namespace

void bind_mamba1(pybind11::module_& module) {
  bind(module, "mamba1_segments", mamba1_segments);
  bind(module, "mamba1_compose", mamba1_compose);
}

}  // namespace hypic
