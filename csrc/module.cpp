#include "bindings.h"
#include "dispatch.h"

PYBIND11_MODULE(_C, module) {
  hypic::bind(module, "isa", [] { return std::string(hypic::kernels().name); });
  hypic::bind_span_attention(module);
  hypic::bind_gated_delta(module);
  hypic::bind_decay_attention(module);
  hypic::bind_mamba1(module);
  hypic::bind_mamba2(module);
  hypic::bind_frame_chunks(module);
}
