"""Patch: requests with a seed survive chunked prefill on CPU.

Target: ``vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample`` and ``._bookkeeping_sync``, in a base class
of the plugin's CPU model runner; vLLM's own classes stay unchanged.
Why: a chunk that does not end the prompt samples a token that vLLM discards.  vLLM then rewinds the request's
generator by ``set_offset``, which CPU generators do not have, so the engine ends.
Until: vLLM rewinds CPU generators by their state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class SeededChunks(CPUModelRunner):
    """Mixin for model runners that rewinds generators by restoring their state."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        before = {row: generators[row].get_state() for row in self._unfinished_seeded_rows()}
        sampled = super()._sample(*args, **kwargs)
        for row, state in before.items():
            generators[row].set_state(state)
        return sampled

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        unfinished = self._unfinished_seeded_rows()
        if not unfinished:
            return super()._bookkeeping_sync(*args, **kwargs)
        batch = self.input_batch
        generators = batch.generators
        batch.generators = {row: g for row, g in generators.items() if row not in unfinished}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            batch.generators = generators

    def _unfinished_seeded_rows(self) -> list[int]:
        """Return the batch rows with a generator whose token of this step is discarded."""
        if not self.input_batch.generators:
            return []
        thrown_away = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        return [int(row) for row in thrown_away if int(row) in self.input_batch.generators]
