"""Specs of the package's Triton kernels: :func:`all_specs`, by operator.

``python -m benchmarks.kernel_specs`` compiles the kernels without a GPU and checks what they need.
"""

from __future__ import annotations

import importlib
import pkgutil

from vllm_hypic.backends import ops

from . import gated_delta, linear_layer, mamba2, span_attention
from .spec import KernelSpec

_OPERATORS = (gated_delta, linear_layer, mamba2, span_attention)


def all_specs() -> dict[str, tuple[KernelSpec, ...]]:
    """Return the specs of each operator.  Raise ``ValueError`` for a kernel of the package without a spec:
    a function of a module in a folder ``triton`` whose name ends in ``_kernel``."""
    found = {module.__name__.rpartition(".")[2]: module.SPECS for module in _OPERATORS}
    specified = {id(spec.function) for specs in found.values() for spec in specs}
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        if ".triton." not in module.name:
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            kernel = name.endswith("_kernel") and hasattr(value, "arg_names")
            if kernel and id(value) not in specified:
                raise ValueError(f"{module.name}.{name}: a kernel without a KernelSpec")
    return found
