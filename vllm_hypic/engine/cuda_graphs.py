"""Full CUDA graphs of decode passes with the plugin's operators, beside vLLM's own graphs of equal size."""

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
    """Descriptor of a batch with composed rows, unequal to every stock descriptor.
    vLLM's graph wrapper therefore keeps a separate graph for each of the two."""

    @staticmethod
    def of(desc: BatchDescriptor) -> ComposedBatch:
        return ComposedBatch(**asdict(desc))


class ComposedGraphs:
    """Records which composed graphs exist, and writes their buffers before a replay.

    In a composed graph each attention layer launches stock kernels and the plugin's kernels, over the buffers
    of :class:`~vllm_hypic.backends.attention.cuda_decode.DecodePlans`.  Linear layers launch stock kernels
    only, as in every decode pass.
    """

    def __init__(self, plans: DecodePlans) -> None:
        self._plans = plans
        self._captured: set[ComposedBatch] = set()

    @contextmanager
    def capturing(self, desc: BatchDescriptor, runtime: HypicRuntime) -> Iterator[None]:
        """Include the plugin's operators, with no record to read, in the graph that vLLM captures inside."""
        assert runtime.step is None
        nothing = Decoding.nothing(desc.num_tokens, runtime.pool.device)
        step = StepContext([], [], runtime.pool.device, decoding=nothing)
        if not self._plans.write(step):
            yield
            return
        # The entry must exist before the capture, because for_pass() is also called for the captured pass.
        self._captured.add(ComposedBatch.of(desc))
        runtime.step = step
        try:
            yield
        finally:
            runtime.step = None

    def for_pass(self, desc: BatchDescriptor, step: StepContext) -> ComposedBatch | None:
        """Write the buffers for a decode pass, and return the graph that replaces vLLM's graph of ``desc``.
        Returns ``None`` if no graph fits the pass."""
        named = ComposedBatch.of(desc)
        return named if named in self._captured and self._plans.write(step) else None
