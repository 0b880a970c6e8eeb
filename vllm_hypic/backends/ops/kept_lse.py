"""The log-sum-exp of vLLM's own attention call, kept for callers that merge other results into its result."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class KeptLSE(threading.local):
    """The log-sum-exp that the running thread keeps.

    ``wanted``: the attention call made now must store its log-sum-exp; ``lse [heads, rows]`` float32: the
    stored log-sum-exp, ``None`` if the call stored none.
    """

    wanted: bool = False
    lse: torch.Tensor | None = None


KEPT = KeptLSE()
