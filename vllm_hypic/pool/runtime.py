"""The link between the worker half of the connector and the layers: one object per worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .tensors import DevicePool

if TYPE_CHECKING:
    from .step import StepContext


@dataclass
class HypicRuntime:
    """``step`` is what PIC has to do in the running forward pass, ``None`` when it has nothing to
    do: layers then run stock code only.  Written by ``WorkerSide``, read by layers."""

    pool: DevicePool
    dead_transition: float
    """See ``HypicConfig``."""
    step: StepContext | None = None
    calls: Counter[str] = field(default_factory=Counter)
    """How often each of our operators ran; plain requests must leave it untouched."""
    kept: dict[str, object] = field(default_factory=dict)
    """What layers keep from one pass for the next, and can make anew at any time."""
    carried_summaries: dict[tuple[str, str], Any] = field(default_factory=dict)
    """(segment request, layer) -> what that layer keeps of the interior so far, between prefill chunks."""

    def forget(self, request_id: str) -> None:
        """Drop what a segment request carried: it is over or starts anew."""
        for key in [k for k in self.carried_summaries if k[0] == request_id]:
            del self.carried_summaries[key]
