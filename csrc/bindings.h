// The Python module `vllm_hypic._C`: functions of tensors, bound one by one.
//
// They are no operators of torch.ops: what finds one of those, and boxes its arguments, takes 100 us a call where the
// caches are cold, as between the layers of a step that decodes; this takes 30.  Nor need they be traced: layers call
// them from within operators of vLLM that are opaque to the compiler.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace hypic {

using Tensors = std::vector<at::Tensor>;

// `function` runs without Python's lock; what TORCH_CHECK_* finds is raised as the exception that it names.
template <class F>
void bind(pybind11::module_& module, const char* name, F function) {
  module.def(name, torch::wrap_pybind_function_no_gil(function));
}

void bind_span_attention(pybind11::module_& module);
void bind_gated_delta(pybind11::module_& module);
void bind_decay_attention(pybind11::module_& module);
void bind_mamba1(pybind11::module_& module);
void bind_mamba2(pybind11::module_& module);
void bind_frame_chunks(pybind11::module_& module);

}  // namespace hypic
