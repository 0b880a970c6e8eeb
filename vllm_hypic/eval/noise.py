"""The engine that shows full recompute's own noise: stock vLLM that cuts prompts into other chunks."""

from __future__ import annotations

from typing import Any

from ..harness.engines import Engine
from ..harness.settings import EngineSettings

SEQUENCES = 64
"""Its ``max_num_seqs``: vLLM wants no more than tokens in a step, so chunks are not smaller."""


def noise_engine(settings: EngineSettings, context: int, chunk: int, **more: Any) -> Engine:
    """An engine for prompts of up to ``context`` tokens in steps of ``chunk``; ``more``: vLLM's options."""
    own = {"max_num_batched_tokens": chunk, "max_num_seqs": SEQUENCES, "enable_prefix_caching": False}
    return Engine(settings, context, hypic=False, name="noise", **{**more, **own})
