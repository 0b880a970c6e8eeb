// Launchers of the gated delta rule: checks, division into tasks, threads.

#include "gated_delta.h"

#include <optional>
#include <vector>

#include "bindings.h"
#include "dispatch.h"
#include "layer_launch.h"

namespace hypic {
namespace {

using at::Tensor;

GdnLayer layer_of(const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Tensor& rate, const Tensor& dt_bias, int64_t key_heads,
                  double eps, double largest_beta, double gate_bound, const Tensor& slots, const Tensor& conv,
                  const Tensor& state, const Tensor& out) {
  TORCH_CHECK_VALUE(state.dim() == 4 && packed_inside(state), "state must be [slots, Hv, K, V], contiguous inside");
  const int64_t Hv = state.size(1), K = state.size(2), V = state.size(3), rows = mixed.size(0);
  TORCH_CHECK_VALUE(key_heads > 0 && Hv % key_heads == 0, Hv, " value heads over ", key_heads, " key heads");
  TORCH_CHECK_VALUE(K % MULTIPLE == 0 && V % MULTIPLE == 0, "head sizes ", K, " and ", V,
                    ": expected multiples of ", MULTIPLE);
  const int64_t channels = 2 * key_heads * K + Hv * V, taps = weight.size(0);
  TORCH_CHECK_VALUE(2 <= taps && taps <= MAX_TAPS, "convolution of width ", taps, ": expected 2 to ", MAX_TAPS);
  TORCH_CHECK_TYPE(mixed.scalar_type() == at::kBFloat16 || mixed.scalar_type() == at::kFloat, "inputs are ",
                   mixed.scalar_type(), ": expected bfloat16 or float32");
  for (const Tensor* t : {&a, &b, &conv, &out})
    TORCH_CHECK_TYPE(t->scalar_type() == mixed.scalar_type(), "inputs, outputs and conv cache must have one dtype");
  TORCH_CHECK_TYPE(state.scalar_type() == at::kFloat, "state is ", state.scalar_type(), ": expected float32");
  TORCH_CHECK_VALUE(mixed.dim() == 2 && mixed.size(1) == channels && mixed.stride(1) == 1, "mixed must be [rows, ",
                    channels, "]");
  const bool channel_gates = a.dim() == 3;
  TORCH_CHECK_VALUE(b.dim() == 2 && b.size(0) >= rows && b.size(1) == Hv && b.stride(1) == 1, "b must be [rows, ", Hv,
                    "]");
  TORCH_CHECK_VALUE((a.dim() == 2 || (channel_gates && a.size(2) == K)) && a.size(0) >= rows && a.size(1) == Hv &&
                        packed_inside(a),
                    "a must be [rows, ", Hv, "] or [rows, ", Hv, ", ", K, "], contiguous inside");
  TORCH_CHECK_VALUE(gate_bound <= 0 && (channel_gates || gate_bound == 0), "gate_bound is ", gate_bound,
                    ": expected 0 or, where channels have gates, less");
  TORCH_CHECK_VALUE(out.dim() == 3 && out.size(0) >= rows && out.size(1) == Hv && out.size(2) == V &&
                        packed_inside(out),
                    "out must be [rows, ", Hv, ", ", V, "], contiguous inside");
  TORCH_CHECK_VALUE(conv.dim() == 3 && conv.size(0) == state.size(0) && conv.size(1) == taps - 1 &&
                        conv.size(2) == channels,
                    "conv must be [slots, ", taps - 1, ", ", channels, "]");
  check_float(weight, {taps, channels}, "weight");
  if (bias) check_float(*bias, {channels}, "bias");
  check_float(rate, {Hv}, "rate");
  channel_gates ? check_float(dt_bias, {Hv, K}, "dt_bias") : check_float(dt_bias, {Hv}, "dt_bias");
  TORCH_CHECK_VALUE(slots.scalar_type() == at::kInt && slots.dim() == 1 && slots.is_contiguous(),
                    "slots must be contiguous int32");
  GdnLayer l{};
  l.bf16 = mixed.scalar_type() == at::kBFloat16;
  l.mixed = mixed.data_ptr();
  l.mixed_stride = mixed.stride(0);
  l.a = a.data_ptr();
  l.a_stride = a.stride(0);
  l.b = b.data_ptr();
  l.b_stride = b.stride(0);
  l.out = out.data_ptr();
  l.out_stride = out.stride(0);
  l.key_heads = int(key_heads);
  l.value_heads = int(Hv);
  l.K = int(K);
  l.V = int(V);
  l.taps = int(taps);
  l.eps = float(eps);
  l.largest_beta = float(largest_beta);
  l.channel_gates = channel_gates;
  l.gate_bound = float(gate_bound);
  l.channels = channels;
  l.weight = weight.data_ptr<float>();
  l.bias = bias ? bias->data_ptr<float>() : nullptr;
  l.rate = rate.data_ptr<float>();
  l.dt_bias = dt_bias.data_ptr<float>();
  l.conv = conv.data_ptr();
  l.conv_slot = conv.stride(0);
  l.conv_row = conv.stride(1);
  l.conv_channel = conv.stride(2);
  l.state = state.data_ptr<float>();
  l.state_slot = state.stride(0);
  l.slots = slots.data_ptr<int32_t>();
  return l;
}

GdnRecords records_of(const GdnLayer& l, at::ScalarType inputs, const Tensor& state, const Tensor& tail,
                      const Tensor& transitions, const Tensor& block_of) {
  check_float(state, {block_of.size(0), l.value_heads, l.K, l.V}, "record_state");
  TORCH_CHECK_VALUE(tail.sizes() == at::IntArrayRef({block_of.size(0), l.taps - 1, int64_t(l.channels)}) &&
                        tail.is_contiguous() && tail.scalar_type() == inputs,
                    "record_tail must be [slots, ", l.taps - 1, ", ", l.channels, "], contiguous, like the inputs");
  TORCH_CHECK_VALUE(transitions.dim() == 3 && transitions.size(1) == l.K && transitions.size(2) == l.K && transitions.is_contiguous() &&
                        transitions.scalar_type() == at::kHalf,
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
    TORCH_CHECK_INDEX(least <= of[h] && of[h] < transitions.size(0), "transition block ", of[h], " of ", transitions.size(0));
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
                  double eps, double largest_beta, double gate_bound, const Tensor& slots, Tensor conv, Tensor state, Tensor out,
                  Tensor record_state, Tensor record_tail, Tensor transitions, Tensor block_of, const Tensor& rows,
                  const Tensors& carry_transition, const Tensors& carry_head, const Tensors& carry_alive,
                  double dead_below) {
  const Tensor dense_slots = slots.contiguous();
  GdnSegments s{};
  s.layer =
      layer_of(mixed, a, b, weight, bias, rate, dt_bias, key_heads, eps, largest_beta, gate_bound, dense_slots, conv, state, out);
  s.records = records_of(s.layer, mixed.scalar_type(), record_state, record_tail, transitions, block_of);
  s.rows = program_of<SegmentRow>(rows, "rows");
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
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const SegmentRow& r = s.rows[i];
    check_request(dense_slots, state, r.batch_row);
    check_segment(r, i, mixed.size(0), block_of.size(0), carried);
    if (!r.leading && r.begin < r.end && r.ends) check_blocks(transitions, block_of, r.slot, 0);
  }
  run(s, rows.size(0), kernels().gdn.segments, kernels().gdn.segments_caches);
}

void gdn_compose(const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& weight,
                 const std::optional<Tensor>& bias, const Tensor& rate, const Tensor& dt_bias, int64_t key_heads,
                 double eps, double largest_beta, double gate_bound, const Tensor& slots, Tensor conv, Tensor state, Tensor out,
                 const Tensor& record_state, const Tensor& record_tail, const Tensor& transitions, const Tensor& block_of, const Tensor& rows,
                 const Tensor& ops) {
  const Tensor dense_slots = slots.contiguous();
  GdnCompose s{};
  s.layer =
      layer_of(mixed, a, b, weight, bias, rate, dt_bias, key_heads, eps, largest_beta, gate_bound, dense_slots, conv, state, out);
  s.records = records_of(s.layer, mixed.scalar_type(), record_state, record_tail, transitions, block_of);
  s.rows = program_of<ComposeRow>(rows, "rows");
  s.ops = program_of<ComposeOp>(ops, "ops");
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const ComposeRow& r = s.rows[i];
    check_request(dense_slots, state, r.batch_row);
    check_compose(r, ops.size(0));
  }
  for (int64_t i = 0; i < ops.size(0); ++i) {
    const ComposeOp& op = s.ops[i];
    check_op(op, mixed.size(0), block_of.size(0));
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
