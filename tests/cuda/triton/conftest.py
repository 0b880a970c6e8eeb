"""Tests of Triton kernels: in Triton's interpreter, or on a GPU where there is one.

    TRITON_INTERPRET=1 pytest tests/cuda/triton

They need a process of their own: what ``TRITON_INTERPRET`` says when triton is imported for the first time
holds for the whole process, and vLLM imports triton.  Without the variable and without a GPU nothing here is
collected.  This folder must never become a package: its name would hide triton from all other tests.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import triton
from compilations import COMPILATIONS, SECONDS, Compilation

Run = Callable[..., subprocess.CompletedProcess[str]]
INTERPRETED = triton.knobs.runtime.interpret
RUNS = INTERPRETED or torch.cuda.is_available()

# The interpreter is slow, and slower still with a team of threads for tensors of this size.
if INTERPRETED:
    torch.set_num_threads(1)

    import interpreter

    interpreter.install()

if not RUNS:
    collect_ignore_glob = ["test_*.py"]


TABLES = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for table in config.stash.get(TABLES, []):
        terminalreporter.write_line(table)
    if not RUNS:
        terminalreporter.write_line(
            "tests/cuda/triton: not run here; without a GPU: TRITON_INTERPRET=1 pytest tests/cuda/triton"
        )


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: a GPU, or the interpreter, which takes tensors on the CPU."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="module", autouse=True)
def _rounded_once() -> Iterator[None]:
    """Mamba2's reference rounds what is convolved as vLLM does on CUDA, once."""
    from vllm_hypic.backends.ops.mamba2 import reference

    with patch.object(reference, "activated", lambda total, dtype: F.silu(total).to(dtype)):
        yield


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 columns for few rows, of 128 for many."""
    from vllm_hypic.backends.ops.span_attention import plan
    from vllm_hypic.backends.ops.span_attention.triton import operators

    for module in (plan, operators):
        monkeypatch.setattr(module, "part_columns", lambda kv_heads, block: 64 if block == 16 else 128)


@pytest.fixture(scope="session")
def run_compiling() -> Run:
    """Runs Python with these arguments and variables in a process that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def run(*arguments: str, timeout: float = 500, **more: str) -> subprocess.CompletedProcess[str]:
        command, env = [sys.executable, *arguments], environment | more
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)

    return run


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of compilations come last: kernels are compiled while others are interpreted."""
    items.sort(key=lambda item: "compiled" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session", autouse=True)
def _compiling(
    request: pytest.FixtureRequest, run_compiling: Run
) -> Iterator[dict[Compilation, Future[subprocess.CompletedProcess[str]]]]:
    """Compilations that are under way in processes of their own, if a test wants them."""
    wanted = any("compiled" in getattr(item, "fixturenames", ()) for item in request.session.items)
    with ThreadPoolExecutor(max_workers=1) as worker:
        asked = COMPILATIONS if wanted else []
        yield {one: worker.submit(run_compiling, *one.arguments, timeout=SECONDS) for one in asked}
        worker.shutdown(cancel_futures=True)


@pytest.fixture
def tables(request: pytest.FixtureRequest) -> list[str]:
    """Tables that are printed when all tests are through."""
    return request.config.stash.setdefault(TABLES, [])


@pytest.fixture
def compiled(
    _compiling: dict[Compilation, Future[subprocess.CompletedProcess[str]]],
) -> dict[Compilation, Future[subprocess.CompletedProcess[str]]]:
    """What ``python -m benchmarks.kernel_specs`` says of each operator and architecture."""
    return _compiling
