// The Python module `vllm_hypic._C`: importing it loads the operators of `torch.ops.vllm_hypic`.

#include <Python.h>
#include <torch/library.h>

#include "dispatch.h"

TORCH_LIBRARY_FRAGMENT(vllm_hypic, m) {
  m.def("isa() -> str", [] { return std::string(hypic::kernels().name); });
}

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
