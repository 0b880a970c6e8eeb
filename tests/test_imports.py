"""What importing the package costs, and what it leaves alone."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_hypic.primitives

pytestmark = pytest.mark.processes


def loaded_after(code: str, *modules: str) -> dict[str, bool]:
    """Which of ``modules`` are loaded after ``code`` ran in a fresh interpreter."""
    report = f"import json, sys; print(json.dumps({{m: m in sys.modules for m in {modules!r}}}))"
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=120
    )
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


def test_primitives_import_neither_torch_nor_vllm() -> None:
    names = [m.name for m in pkgutil.iter_modules(vllm_hypic.primitives.__path__)]
    assert {"plan", "keys", "policies", "tokens", "options", "builder"} <= set(names)
    code = "import " + ", ".join(f"vllm_hypic.primitives.{n}" for n in names)
    found = loaded_after(code, "torch", "vllm", "transformers", "numpy")
    assert not any(found.values()), found


def test_books_and_options_import_neither_torch_nor_vllm() -> None:
    found = loaded_after(
        "import vllm_hypic.connector.scheduler.directory, vllm_hypic.config.engine", "torch", "vllm"
    )
    assert not any(found.values()), found


def test_the_gate_imports_neither_torch_nor_vllm() -> None:
    """It looks at an engine's configuration, and starts engines in processes of their own."""
    names = [
        f"vllm_hypic.eval.gate.{p.stem}" for p in Path(vllm_hypic.__file__).parent.glob("eval/gate/[a-z]*.py")
    ]
    assert len(names) > 5
    found = loaded_after("import " + ", ".join(names), "torch", "vllm", "transformers")
    assert not any(found.values()), found


def test_commands_load_what_they_need() -> None:
    found = loaded_after(
        "from vllm_hypic.cli import main",
        "numpy",
        "vllm_hypic.eval.gate.command",
        "vllm_hypic.segment_parallel.router",
    )
    assert not any(found.values()), found


def test_the_store_imports_neither_torch_nor_vllm() -> None:
    package = Path(vllm_hypic.__file__).parent / "store"
    names = [
        ".".join(p.relative_to(package.parent.parent).with_suffix("").parts)
        for p in sorted(package.rglob("*.py"))
        if p.stem not in ("__init__", "lmcache", "lmcache_module", "lmcache_server")  # LMCache needs torch
    ]
    assert len(names) > 20
    found = loaded_after("import " + ", ".join(names), "torch", "vllm", "transformers")
    assert not any(found.values()), found


def test_segment_parallelism_imports_neither_torch_nor_vllm() -> None:
    """A router runs where neither is installed."""
    package = Path(vllm_hypic.__file__).parent / "segment_parallel"
    names = [
        ".".join(p.relative_to(package.parent.parent).with_suffix("").parts)
        for p in sorted(package.rglob("*.py"))
        if p.stem != "__init__"
    ]
    assert len(names) > 10
    found = loaded_after("import " + ", ".join(names), "torch", "vllm", "transformers")
    assert not any(found.values()), found


def test_package_itself_imports_nothing() -> None:
    found = loaded_after("import vllm_hypic", "torch", "vllm", "vllm_hypic.patches")
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
    found = loaded_after(
        code,
        "numba",
        "vllm_hypic.backends.attention.backend",
        "vllm_hypic.backends.linear.gdn.base",
        "vllm_hypic.connector.connector",
        "vllm_hypic.engine.scheduler",
        "vllm_hypic.engine.worker",
        "vllm_hypic.engine.cpu_worker",
        "vllm_hypic.engine.cuda_worker",
    )
    assert not any(found.values()), found
