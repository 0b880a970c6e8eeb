"""The log-sum-exp of vLLM's own attention call, kept for those who merge more into its result."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class KeptLSE(threading.local):
    """Of the running thread.

    ``wanted``: an attention call that is made now shall leave its log-sum-exp; ``lse [heads, rows]`` float32:
    what it left, ``None`` where it did not.
    """

    wanted: bool = False
    lse: torch.Tensor | None = None


KEPT = KeptLSE()
