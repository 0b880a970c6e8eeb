"""All kernels of an operator, compiled for an architecture, in a process without the interpreter."""

import pkgutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kernel_specs.spec import ARCHITECTURES
from vllm_hypic.backends import ops

SECONDS = 400
"""Longest that one may take, on a slow machine without Triton's cache."""


@dataclass(frozen=True)
class Compilation:
    operator: str
    architecture: int

    def __str__(self) -> str:
        return f"{self.operator}-sm_{self.architecture}"

    @property
    def arguments(self) -> list[str]:
        """Python's, for the tool that says a status, a table and complaints."""
        return ["-m", "benchmarks.kernel_specs", "--arch", str(self.architecture), self.operator]


COMPILATIONS = [
    Compilation(module.name, architecture)
    for module in pkgutil.iter_modules(ops.__path__)
    if Path(*ops.__path__, module.name, "triton").is_dir()
    for architecture in ARCHITECTURES
]
