// Launchers of the gated delta rule: checks, division into tasks, threads.

#include "gated_delta.h"

#include <optional>
#include <vector>

#include "bindings.h"
#include "dispatch.h"
#include "layer_launch.h"

namespace hypic {
namespace {

GdnLayer layer_of(const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Tensor& rate, const Tensor& dt_bias, int64_t key_heads,
                  double eps, double largest_beta, double gate_bound, const Tensor& slots, const Tensor& conv,
                  const Tensor& state, const Tensor& out) {
  TORCH_CHECK_VALUE(state.dim() == 4 && packed_inside(state), "state must be [slots, Hv, K, V], contiguous inside");
  const int64_t Hv = state.size(1), K = state.size(2), V = state.size(3), rows = mixed.size(0);
  TORCH_CHECK_VALUE(key_heads > 0 && Hv % key_heads == 0, Hv, " value heads over ", key_heads, " key heads");
  TORCH_CHECK_VALUE(K % MULTIPLE == 0 && V % MULTIPLE == 0, "head sizes ", K, " and ", V,
                    ": expected multiples of ", MULTIPLE);
  check_types(mixed, {&a, &b, &conv, &out});
  TORCH_CHECK_TYPE(state.scalar_type() == at::kFloat, "state is ", state.scalar_type(), ": expected float32");
  const bool channel_gates = a.dim() == 3;
  channel_gates ? check_rows(a, rows, {Hv, K}, "a") : check_rows(a, rows, {Hv}, "a");
  check_rows(b, rows, {Hv}, "b");
  check_rows(out, rows, {Hv, V}, "out");
  TORCH_CHECK_VALUE(gate_bound <= 0 && (channel_gates || gate_bound == 0), "gate_bound is ", gate_bound,
                    ": expected 0 or, where channels have gates, less");
  check_float(rate, {Hv}, "rate");
  channel_gates ? check_float(dt_bias, {Hv, K}, "dt_bias") : check_float(dt_bias, {Hv}, "dt_bias");
  GdnLayer l{};
  take_places(l, out, slots, state);
  take_conv(l, 2 * key_heads * K + Hv * V, mixed, weight, bias, conv, state.size(0));
  l.a = a.data_ptr();
  l.a_stride = a.stride(0);
  l.b = b.data_ptr();
  l.b_stride = b.stride(0);
  l.key_heads = int(key_heads);
  l.value_heads = int(Hv);
  l.K = int(K);
  l.V = int(V);
  l.eps = float(eps);
  l.largest_beta = float(largest_beta);
  l.channel_gates = channel_gates;
  l.gate_bound = float(gate_bound);
  l.rate = rate.data_ptr<float>();
  l.dt_bias = dt_bias.data_ptr<float>();
  l.state = state.data_ptr<float>();
  return l;
}

GdnRecords records_of(const GdnLayer& l, const Tensor& state, const Tensor& tail, const Tensor& transitions,
                      const Tensor& block_of) {
  check_float(state, {block_of.size(0), l.value_heads, l.K, l.V}, "record_state");
  check_tail(l, tail, block_of.size(0));
  TORCH_CHECK_VALUE(transitions.sizes() == at::IntArrayRef({transitions.size(0), l.K, l.K}) &&
                        transitions.is_contiguous() && transitions.scalar_type() == at::kHalf,
                    "transitions must be contiguous float16 [blocks, ", l.K, ", ", l.K, "]");
  TORCH_CHECK_VALUE(block_of.dim() == 2 && block_of.size(1) == l.value_heads && block_of.is_contiguous() &&
                        block_of.scalar_type() == at::kInt,
                    "block_of must be contiguous int32 [slots, ", l.value_heads, "]");
  return {state.data_ptr<float>(), tail.data_ptr(), reinterpret_cast<uint16_t*>(transitions.data_ptr()),
          block_of.data_ptr<int32_t>()};
}

// Transition blocks that a record of `slot` names must exist; -1 names none.
void check_blocks(const Tensor& transitions, const Tensor& block_of, int64_t slot, int64_t least) {
  const int32_t* of = block_of.data_ptr<int32_t>() + slot * block_of.size(1);
  for (int64_t h = 0; h < block_of.size(1); ++h)
    TORCH_CHECK_INDEX(least <= of[h] && of[h] < transitions.size(0), "transition block ", of[h], " of ",
                      transitions.size(0));
}

template <class Args>
void run(const Args& args, int64_t requests, void (*task)(const Args&, int, int, int, void*),
         void (*caches)(const Args&, int)) {
  const GdnLayer& l = args.layer;
  run_tasks(args, requests, l.value_heads, l.value_heads / l.key_heads, kernels().gdn.scratch, task, caches);
}

// See vllm_hypic/backends/ops/gated_delta/__init__.py for what these compute.

void gdn_segments(const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Tensor& rate, const Tensor& dt_bias, int64_t key_heads,
                  double eps, double largest_beta, double gate_bound, const Tensor& slots, Tensor conv,
                  Tensor state, Tensor out, Tensor record_state, Tensor record_tail, Tensor transitions,
                  Tensor block_of, const Tensor& rows, const Tensors& carry_transition, const Tensors& carry_head,
                  const Tensors& carry_alive, double dead_below) {
  const Tensor dense_slots = slots.contiguous();
  GdnSegments s{};
  s.layer = layer_of(mixed, a, b, weight, bias, rate, dt_bias, key_heads, eps, largest_beta, gate_bound, dense_slots,
                     conv, state, out);
  s.records = records_of(s.layer, record_state, record_tail, transitions, block_of);
  s.dead_below = float(dead_below);
  const GdnLayer& l = s.layer;
  const size_t carried = carry_transition.size();
  TORCH_CHECK_VALUE(carry_head.size() == carried && carry_alive.size() == carried, "lists of one length are carried");
  std::vector<GdnCarry> carries;
  for (size_t i = 0; i < carried; ++i) {
    check_float(carry_transition[i], {l.value_heads, l.K, l.K}, "carry_transition");
    check_float(carry_head[i], {l.value_heads, l.K, l.V}, "carry_head");
    TORCH_CHECK_VALUE(carry_alive[i].scalar_type() == at::kInt && carry_alive[i].is_contiguous() &&
                          carry_alive[i].numel() == l.value_heads,
                      "carry_alive must be contiguous int32 [", l.value_heads, "]");
    carries.push_back({carry_transition[i].data_ptr<float>(), carry_head[i].data_ptr<float>(),
                       carry_alive[i].data_ptr<int32_t>()});
  }
  s.carries = carries.data();
  take_segments(s, rows, dense_slots, state, mixed.size(0), block_of.size(0), carried);
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const SegmentRow& r = s.rows[i];
    if (!r.leading && r.begin < r.end && r.ends) check_blocks(transitions, block_of, r.slot, 0);
  }
  run(s, rows.size(0), kernels().gdn.segments, kernels().gdn.segments_caches);
}

void gdn_compose(const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& weight,
                 const std::optional<Tensor>& bias, const Tensor& rate, const Tensor& dt_bias, int64_t key_heads,
                 double eps, double largest_beta, double gate_bound, const Tensor& slots, Tensor conv, Tensor state,
                 Tensor out, const Tensor& record_state, const Tensor& record_tail, const Tensor& transitions,
                 const Tensor& block_of, const Tensor& rows, const Tensor& ops) {
  const Tensor dense_slots = slots.contiguous();
  GdnCompose s{};
  s.layer = layer_of(mixed, a, b, weight, bias, rate, dt_bias, key_heads, eps, largest_beta, gate_bound, dense_slots,
                     conv, state, out);
  s.records = records_of(s.layer, record_state, record_tail, transitions, block_of);
  take_compose(s, rows, ops, dense_slots, state, mixed.size(0), block_of.size(0));
  for (int64_t i = 0; i < ops.size(0); ++i) {
    const ComposeOp& op = s.ops[i];
    if (op.mode == compose_transition) check_blocks(transitions, block_of, op.slot, -1);
  }
  run(s, rows.size(0), kernels().gdn.compose, kernels().gdn.compose_caches);
}

}  // namespace

void bind_gated_delta(pybind11::module_& module) {
  bind(module, "gdn_segments", gdn_segments);
  bind(module, "gdn_compose", gdn_compose);
}

}  // namespace hypic
