// Launchers of linear attention with decays: checks, division into tasks, threads.

#include "decay_attention.h"

#include <optional>
#include <vector>

#include "bindings.h"
#include "dispatch.h"
#include "layer_launch.h"

namespace hypic {
namespace {

HeadRows head_rows(const Tensor& t, at::ScalarType dtype, int64_t rows, int64_t heads, int64_t channels,
                   const char* name) {
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, name, " is ", t.scalar_type(), ": expected ", dtype);
  TORCH_CHECK_VALUE(t.dim() == 3 && t.size(0) >= rows && t.size(1) == heads && t.size(2) == channels &&
                        t.stride(2) == 1,
                    name, " must be [rows, ", heads, ", ", channels, "], channels contiguous");
  return {t.data_ptr(), t.stride(0), t.stride(1)};
}

DecayLayer layer_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& slots,
                    const Tensor& state, const Tensor& out) {
  TORCH_CHECK_VALUE(state.dim() == 4 && packed_inside(state), "state must be [slots, H, K, V], contiguous inside");
  const int64_t H = state.size(1), K = state.size(2), V = state.size(3), rows = q.size(0);
  TORCH_CHECK_VALUE(K % MULTIPLE == 0 && V % MULTIPLE == 0, "head sizes ", K, " and ", V, ": expected multiples of ",
                    MULTIPLE);
  const at::ScalarType dtype = q.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kBFloat16 || dtype == at::kFloat, "inputs are ", dtype,
                   ": expected bfloat16 or float32");
  TORCH_CHECK_VALUE(slots.scalar_type() == at::kInt && slots.dim() == 1 && slots.is_contiguous(),
                    "slots must be contiguous int32");
  DecayLayer l{};
  l.bf16 = dtype == at::kBFloat16;
  l.q = head_rows(q, dtype, rows, H, K, "q");
  l.k = head_rows(k, dtype, rows, H, K, "k");
  l.v = head_rows(v, dtype, rows, H, V, "v");
  l.out = head_rows(out, dtype, rows, H, V, "out");
  l.channel_gates = g.dim() == 3;
  if (l.channel_gates) {
    l.g = head_rows(g, at::kFloat, rows, H, K, "g");
  } else {
    check_float(g, {H}, "g");
    l.g.data = g.data_ptr();
  }
  l.heads = int(H);
  l.K = int(K);
  l.V = int(V);
  l.state = state.data_ptr();
  l.state_type = state_type_of(state);
  l.state_slot = state.stride(0);
  l.slots = slots.data_ptr<int32_t>();
  return l;
}

DecayRecords records_of(const DecayLayer& l, const Tensor& state, const Tensor& log_transition) {
  const int64_t slots = state.size(0);
  check_float(state, {slots, l.heads, l.K, l.V}, "record_state");
  if (l.channel_gates)
    check_float(log_transition, {slots, l.heads, l.K}, "record_log_transition");
  else
    check_float(log_transition, {slots, l.heads}, "record_log_transition");
  return {state.data_ptr<float>(), log_transition.data_ptr<float>()};
}

template <class Args>
void run(const Args& args, int64_t requests, void (*task)(const Args&, int, int, int, void*)) {
  const int64_t heads = args.layer.heads;
  run_tasks(args, requests, heads, heads, kernels().decay.scratch, task, +[](const Args&, int) {});
}

// See vllm_hypic/backends/ops/decay_attention/__init__.py for what these compute.

void decay_attention_segments(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& slots,
                              Tensor state, Tensor out, Tensor record_state, Tensor record_log_transition,
                              const Tensor& rows, const Tensors& carry_log_transition, const Tensors& carry_state) {
  const Tensor dense_slots = slots.contiguous();
  DecaySegments s{};
  s.layer = layer_of(q, k, v, g, dense_slots, state, out);
  s.records = records_of(s.layer, record_state, record_log_transition);
  const DecayLayer& l = s.layer;
  const size_t carried = carry_log_transition.size();
  TORCH_CHECK_VALUE(carry_state.size() == carried, "lists of one length are carried");
  std::vector<DecayCarry> carries;
  for (size_t i = 0; i < carried; ++i) {
    check_double(carry_log_transition[i], int64_t(l.heads) * l.decays(), "carry_log_transition");
    check_float(carry_state[i], {l.heads, l.K, l.V}, "carry_state");
    carries.push_back({carry_log_transition[i].data_ptr<double>(), carry_state[i].data_ptr<float>()});
  }
  s.carries = carries.data();
  take_segments(s, rows, dense_slots, state, q.size(0), record_state.size(0), carried);
  run(s, rows.size(0), kernels().decay.segments);
}

DecayRelocation relocation_of(const DecayLayer& l, const Tensor& shifts, const Tensor& table, bool neighbours,
                              int64_t ops) {
  TORCH_CHECK_VALUE(!l.channel_gates, "shifts: expected none where channels decay apart");
  TORCH_CHECK_VALUE(shifts.scalar_type() == at::kLong && shifts.is_contiguous() && shifts.numel() == ops,
                    "shifts must be contiguous int64 [", ops, "]");
  TORCH_CHECK_VALUE(table.dim() == 2 && table.size(1) % 2 == 0 && table.size(1) <= l.K, "table is ", table.sizes(),
                    ": expected [positions, an even number up to ", l.K, "]");
  check_float(table, table.sizes(), "table");
  const int64_t* by = shifts.data_ptr<int64_t>();
  for (int64_t i = 0; i < ops; ++i)
    TORCH_CHECK_INDEX(-table.size(0) < by[i] && by[i] < table.size(0), "shift by ", by[i], " in a table of ",
                      table.size(0), " positions");
  return {by, table.data_ptr<float>(), int(table.size(1)), neighbours};
}

void decay_attention_compose(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& slots,
                             Tensor state, Tensor out, const Tensor& record_state, const Tensor& record_log_transition,
                             const Tensor& rows, const Tensor& ops, const std::optional<Tensor>& shifts,
                             const std::optional<Tensor>& table, bool neighbours) {
  const Tensor dense_slots = slots.contiguous();
  DecayCompose s{};
  s.layer = layer_of(q, k, v, g, dense_slots, state, out);
  s.records = records_of(s.layer, record_state, record_log_transition);
  take_compose(s, rows, ops, dense_slots, state, q.size(0), record_state.size(0));
  if (shifts) {
    TORCH_CHECK_VALUE(table.has_value(), "shifts without a table");
    s.relocation = relocation_of(s.layer, *shifts, *table, neighbours, ops.size(0));
  }
  run(s, rows.size(0), kernels().decay.compose);
}

}  // namespace

void bind_decay_attention(pybind11::module_& module) {
  bind(module, "decay_attention_segments", decay_attention_segments);
  bind(module, "decay_attention_compose", decay_attention_compose);
}

}  // namespace hypic
