"""What prompts of the simulation consist of, and pools for it."""

from dataclasses import dataclass, replace

import torch

from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.states import LinearGeometry

from .simulated_worker import PAGE

LEADS = ((), tuple(range(10, 18)))
DOCUMENTS = tuple(tuple(range(start, start + n)) for start, n in ((100, 8), (200, 16), (300, 16), (400, 24)))
TEXT = tuple(range(500, 508))
QUERY = (900, 901)
HEADS = 2


def geometry(pages: int, slots: int, state_pages: int = 0) -> PoolGeometry:
    """A pool in which every record but one may need all of its transition blocks."""
    return PoolGeometry(
        (AttentionGeometry("layers.0", 2, 64, torch.bfloat16),),
        (LinearGeometry("layers.1", HEADS, 4, 4, 3, 8, torch.float32),),
        page_tokens=PAGE,
        pages=pages,
        slots=slots,
        transition_blocks=(slots - 1) * HEADS,
        state_pages=state_pages,
    )


@dataclass(frozen=True)
class Vocabulary:
    """What prompts consist of, and the pool for it."""

    leads: tuple[tuple[int, ...], ...]
    documents: tuple[tuple[int, ...], ...]
    geometry: PoolGeometry
    checkpoint_tokens: int = 0
    prefixes: bool = False
    """Plain prompts capture their own prefixes."""

    @property
    def stretches(self) -> int:
        """In so many a record is computed, at most."""
        longest = max(map(len, (*self.leads, *self.documents)))
        return longest // self.checkpoint_tokens if self.checkpoint_tokens else 1


def _forks(first: int, *parts: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Texts of ``n`` tokens of which the first ``common`` are the same in all: ``(common, n)`` each."""
    return tuple(
        (*range(first, first + common), *range(first + 40 * (i + 1), first + 40 * (i + 1) + n - common))
        for i, (common, n) in enumerate(parts)
    )


WHOLE = Vocabulary(LEADS, DOCUMENTS, geometry(8, 5))
FORKS = Vocabulary(
    _forks(0, (0, 8), (0, 32)),
    # Checkpoints stand at 8, 16, and so on, but not in the last 16.
    _forks(100, (40, 40), (24, 40), (24, 28), (8, 32)),
    geometry(12, 7),
    PAGE,
)
"""Documents that begin alike, of records with checkpoints."""
PREFIXES = replace(FORKS, geometry=geometry(16, 9), prefixes=True)
ONE_MEMORY = replace(FORKS, geometry=geometry(30, 15, state_pages=2), prefixes=True)
"""States lie in pages."""
