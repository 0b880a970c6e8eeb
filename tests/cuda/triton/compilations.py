"""All kernels of an operator, compiled for an architecture, in a process without the interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_hypic.backends import ops
from vllm_hypic.backends.ops.kernel_spec import ARCHITECTURES

SECONDS = 400
"""Longest that one may take, on a slow machine without Triton's cache."""


@dataclass(frozen=True)
class Compilation:
    operator: str
    architecture: int

    def __str__(self) -> str:
        return f"{self.operator}-sm_{self.architecture}"

    def run(self, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """The tool's exit status, table and complaints."""
        program = [sys.executable, "-m", "vllm_hypic.backends.ops.compiled"]
        command = [*program, "--arch", str(self.architecture), self.operator]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)


COMPILATIONS = [
    Compilation(module.name, architecture)
    for module in pkgutil.iter_modules(ops.__path__)
    if Path(*ops.__path__, module.name, "triton").is_dir()
    for architecture in ARCHITECTURES
]
