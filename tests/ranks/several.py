"""Runs the scripts of engines of several ranks and reads what they found."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lib import forked

CACHE = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def answers(model: Path, engine: dict[str, Any], prompts: int = 1, **options: Any) -> Any:
    """What an engine with these arguments, and these options of the plugin, answers and counts."""
    return _run(model, engine, prompts, options)


def stock_answer(model: Path, engine: dict[str, Any]) -> Any:
    """A stock engine's answer to the ordinary prompt."""
    return _run(model, engine, 0, None)["plain"]


def turns(model: Path, engine: dict[str, Any], asked: list[int], **options: Any) -> Any:
    """What such an engine answers to these turns of a conversation (``conversation_of_ranks.py``)."""
    return _run(model, engine, asked, options, "conversation_of_ranks.py")


def _run(
    model: Path,
    engine: dict[str, Any],
    prompts: int | list[int],
    options: dict[str, Any] | None,
    name: str = "engine_of_ranks.py",
) -> Any:
    script = Path(__file__).parent / name
    done = forked.run(
        [
            sys.executable,
            str(script),
            str(model),
            json.dumps(engine),
            json.dumps(prompts),
            json.dumps(options),
        ],
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **CACHE},
        timeout=800,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(found[-1].removeprefix("FOUND "))
