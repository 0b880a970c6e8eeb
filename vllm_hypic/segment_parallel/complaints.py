"""Complaints: warnings that do not flood the log."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

logger = logging.getLogger("vllm.hypic.parallel")

_MOST_KINDS = 256


class Complaints:
    """Warnings: of each kind one per ``every_s`` seconds, with the number of those left out.

    For one thread at a time.  The least recent of more than 256 kinds is forgotten.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._kinds: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """When each kind was logged, and how often it was left out since."""

    def warn(self, kind: str, message: str, *args: object, exc_info: bool = False) -> None:
        now = time.monotonic()
        logged, left_out = self._kinds.pop(kind, (-float("inf"), 0))
        if now < logged + self._every_s:
            self._kinds[kind] = (logged, left_out + 1)
            return
        self._kinds[kind] = (now, 0)
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        if left_out:
            message, args = message + " (and %d more like this)", (*args, left_out)
        logger.warning(message, *args, exc_info=exc_info)
