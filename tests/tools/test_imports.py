"""What importing the package costs, and what it leaves alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_hypic

pytestmark = pytest.mark.processes


def loaded_after(code: str, *modules: str) -> dict[str, bool]:
    """Which of ``modules`` are loaded after ``code`` ran in a fresh interpreter."""
    report = f"import json, sys; print(json.dumps({{m: m in sys.modules for m in {modules!r}}}))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


PACKAGE = Path(vllm_hypic.__file__).parent
LMCACHE = ("lmcache", "lmcache_module", "lmcache_server")
"""Modules of the store that need torch."""


def modules_in(pattern: str) -> list[str]:
    """Names of the package's modules whose path matches ``pattern``."""
    paths = sorted(p for p in PACKAGE.glob(pattern) if p.stem not in ("__init__", *LMCACHE))
    return [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in paths]


BOOKS = ["vllm_hypic.connector.scheduler.directory", "vllm_hypic.config.engine"]
SEGMENTS_BY_ID = [f"vllm_hypic.cache_api.{name}" for name in ("client", "command", "expand", "handler")]
THREE = ("torch", "vllm", "transformers")
COMMANDS = ("numpy", "vllm_hypic.eval.gate.command", "vllm_hypic.segment_parallel.router")


@pytest.mark.parametrize(
    ("names", "least", "absent"),
    [
        (modules_in("primitives/*.py"), 20, (*THREE, "tokenizers", "numpy")),
        (BOOKS, 2, ("torch", "vllm")),
        # It looks at an engine's configuration, and starts engines in processes of their own.
        (modules_in("eval/gate/*.py"), 6, THREE),
        (modules_in("store/**/*.py"), 21, THREE),
        # A router runs where neither is installed.
        (modules_in("segment_parallel/**/*.py"), 11, THREE),
        (modules_in("segment_parallel/router/*.py"), 15, (*THREE, "numpy", "vllm_hypic.connector")),
        (SEGMENTS_BY_ID, 4, ("torch", "vllm")),
        (["vllm_hypic"], 1, ("torch", "vllm", "vllm_hypic.patches")),
        (["vllm_hypic.cli"], 1, COMMANDS),
    ],
    ids=[
        *("primitives", "books-and-options", "gate", "store", "segment-parallelism", "router", "ids"),
        *("package", "commands"),
    ],
)
def test_modules_load_no_more_than_they_need(names: list[str], least: int, absent: tuple[str, ...]) -> None:
    assert len(names) >= least
    found = loaded_after("import " + ", ".join(names), *absent)
    assert not any(found.values()), found


def test_registering_twice_is_harmless_and_loads_no_backend() -> None:
    """Every vLLM process calls it, also those of engines that never use the plugin."""
    code = """
import vllm_hypic
from vllm.engine.arg_utils import EngineArgs
vllm_hypic.register()
once = EngineArgs.create_engine_config
vllm_hypic.register()
assert EngineArgs.create_engine_config is once, "patched twice"
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.custom_op import op_registry_oot
assert "HypicConnector" in KVConnectorFactory._registry
assert not op_registry_oot, f"layers of other engines were replaced: {list(op_registry_oot)}"
"""
    backends = ("backends.attention.backend", "backends.linear.gdn.base", "connector.connector")
    engine = (f"engine.{name}" for name in ("scheduler", "worker", "cpu_worker", "cuda_worker"))
    found = loaded_after(code, "numba", *(f"vllm_hypic.{name}" for name in (*backends, *engine)))
    assert not any(found.values()), found
