"""Full CUDA graphs of decode passes that hold our operators, beside vLLM's own of the same sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vllm.forward_context import BatchDescriptor

from ..pool.decoding import Decoding
from ..pool.step import StepContext

if TYPE_CHECKING:
    from ..backends.attention.cuda_decode import DecodePlans
    from ..pool.runtime import HypicRuntime


@dataclass(frozen=True)
class ComposedBatch(BatchDescriptor):
    """A batch with composed rows; equal to none without, so vLLM's wrapper of graphs keeps one for each."""

    @staticmethod
    def of(desc: BatchDescriptor) -> ComposedBatch:
        return ComposedBatch(**asdict(desc))


class ComposedGraphs:
    """Which graphs there are, and what must be written before one is replayed.

    In such a graph each attention layer launches stock's kernels and ours, over the buffers of
    :class:`~vllm_hypic.backends.attention.cuda_decode.DecodePlans`; linear layers stock's alone, as in every
    pass that decodes.
    """

    def __init__(self, plans: DecodePlans) -> None:
        self._plans = plans
        self._captured: set[ComposedBatch] = set()

    @contextmanager
    def capturing(self, desc: BatchDescriptor, runtime: HypicRuntime) -> Iterator[None]:
        """While vLLM captures what ``desc`` names, our operators are part of it; nothing is composed."""
        assert runtime.step is None
        nothing = Decoding.nothing(desc.num_tokens, runtime.pool.device)
        step = StepContext([], [], runtime.pool.device, decoding=nothing)
        if not self._plans.write(step):
            yield
            return
        # Before: it is asked for the pass that is captured.
        self._captured.add(ComposedBatch.of(desc))
        runtime.step = step
        try:
            yield
        finally:
            runtime.step = None

    def for_pass(self, desc: BatchDescriptor, step: StepContext) -> ComposedBatch | None:
        """The graph for a pass that decodes, where vLLM would replay its own of ``desc``, and all that it
        reads of ours is written; ``None``: there is none for it."""
        named = ComposedBatch.of(desc)
        return named if named in self._captured and self._plans.write(step) else None
