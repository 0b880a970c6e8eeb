"""Complaints: warnings at a limited rate, so that repeated faults do not flood the log."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

logger = logging.getLogger("vllm.hypic.parallel")

_EVERY_S = 10.0
_MOST_KINDS = 256


class Complaints:
    """Log at most one warning of each kind per 10 seconds, with the number of suppressed warnings.

    Only one thread at a time may use an instance.  Of more than 256 kinds, the least recent is forgotten.
    """

    def __init__(self) -> None:
        self._kinds: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Time of each kind's last log line, and the number of its warnings suppressed since."""

    def warn(self, kind: str, message: str, *args: object, exc_info: bool = False) -> None:
        now = time.monotonic()
        logged, left_out = self._kinds.pop(kind, (-float("inf"), 0))
        if now < logged + _EVERY_S:
            self._kinds[kind] = (logged, left_out + 1)
            return
        self._kinds[kind] = (now, 0)
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        if left_out:
            message, args = message + " (and %d similar warnings)", (*args, left_out)
        logger.warning(message, *args, exc_info=exc_info)
