"""Room for the frames of Python's functions, taken once a step.

CPython keeps frames in chunks of 16 KB.  It asks the kernel for one whenever a call crosses the end of the
last, and gives it back when that call returns; where that is a call that each layer makes, every layer pays
for two system calls and for the other threads' cores being told (60 to 100 us a layer were measured with two
threads).  One frame that is larger than a chunk has CPython take a chunk of more than twice its size, which
holds what is called from it, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_SLOTS = 1 << 15
"""Stack slots of 8 bytes in the roomy frame, never touched: calls below it find at least as many."""

P = ParamSpec("P")
T = TypeVar("T")


def with_room(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, called by a frame that brings room for about 256 KB of frames below it."""

    def roomy(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    roomy.__code__ = roomy.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(roomy)
