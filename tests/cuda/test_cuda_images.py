"""The GPU model runner serves models that see and hear, on the CPU: what they do moves text, and records.

Behind one layer of attention composing is exact (``tests/engine/test_images.py``): ordinary requests are the
yardstick.  See ``served/gpu_runner.py`` for what is a stand-in.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from lib import forked

PROGRAM = Path(__file__).parent / "served" / "gpu_images.py"
BOUND = 1e-4
"""On logprobs of the whole vocabulary, in float32."""
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
Logprobs = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]


def serve(model: str, folder: Path, *fault: str) -> Logprobs:
    """By prompt: ordinary, composed cold and warm, and cached tokens."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(PROGRAM), model, str(folder), *fault]
    done = forked.run(command, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: (*map(torch.tensor, given), cached) for name, (*given, cached) in found.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Logprobs:
    return serve("qwen2-vl", tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize("name", ["lead-and-query", "segment", "reordered", "video"])
def test_composed_is_full_recompute(served: Logprobs, name: str) -> None:
    hold(*served[name])


def hold(plain: torch.Tensor, cold: torch.Tensor, warm: torch.Tensor, cached: int) -> None:
    assert float((cold - plain).abs().max()) <= BOUND
    assert torch.equal(cold, warm) and cached > 0


@pytest.mark.slow
def test_audio_too(tmp_path: Path) -> None:
    found = serve("qwen2-audio", tmp_path)
    assert len(found) == 3
    for answers in found.values():
        hold(*answers)


@pytest.mark.slow
def test_positions_that_are_not_rewritten_show(tmp_path: Path) -> None:
    for plain, cold, _, _ in serve("qwen2-vl", tmp_path, "positions").values():
        assert float((cold - plain).abs().max()) > 100 * BOUND
