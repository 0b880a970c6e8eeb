"""Runs engines of several ranks, and reads what they found."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lib import forked


def answers(model: Path, engine: dict[str, Any], asked: int | list[int] = 1, **options: Any) -> Any:
    """What an engine with these arguments, and these options of the plugin, answers and counts
    (``engine_of_ranks.py``)."""
    return _run(model, engine, asked, options)


def stock_answer(model: Path, engine: dict[str, Any]) -> Any:
    """A stock engine's answer to the ordinary prompt."""
    return _run(model, engine, 0, None)["plain"]


def disk(folder: Path) -> dict[str, Any]:
    """Options of a store on disk."""
    return {"store": {"tiers": [{"type": "disk", "path": str(folder / "disk"), "bytes": "64MiB"}]}}


def _run(model: Path, *arguments: Any) -> Any:
    script = Path(__file__).with_name("engine_of_ranks.py")
    done = forked.run(
        [sys.executable, str(script), str(model), *map(json.dumps, arguments)],
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
        timeout=800,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(found[-1].removeprefix("FOUND "))
