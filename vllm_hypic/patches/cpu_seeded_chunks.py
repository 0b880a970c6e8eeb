"""Patch: requests with a seed survive chunked prefill on CPU.

Target: ``vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample`` and ``._bookkeeping_sync``, by the class
that our CPU model runner inherits from; vLLM's own classes stay as they are.
Why: a chunk that does not end the prompt draws a token that is thrown away, and vLLM winds the request's
generator back by ``set_offset``, which CPU generators do not have: the engine dies.
Until: vLLM winds CPU generators back by their state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class SeededChunks(CPUModelRunner):
    """Winds generators back by their state."""

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
        """Rows with a generator whose token of this step is thrown away."""
        if not self.input_batch.generators:
            return []
        thrown_away = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        return [int(row) for row in thrown_away if int(row) in self.input_batch.generators]
