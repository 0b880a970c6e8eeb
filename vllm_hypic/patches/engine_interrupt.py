"""Patch: a server that gets SIGTERM or Ctrl-C while its engine starts, ends.

Target: ``zmq_socket_ctx``, as ``vllm.v1.engine.utils`` calls it.
Why: the signals raise ``KeyboardInterrupt`` in the front end, which waits for the engine at that time.  vLLM
drops the exception with the socket, and the server starts as if no signal had come.
Until: ``zmq_socket_ctx`` lets ``KeyboardInterrupt`` through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .signature import replaces


def apply() -> None:
    """Apply the patch for all engines that this process starts from now on; repeated calls change nothing."""
    from vllm.v1.engine import utils

    @replaces(utils, utils.zmq_socket_ctx, "path", "socket_type")
    @contextmanager
    def socket(stock: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        interrupt = None
        with stock(*args, **kwargs) as found:
            try:
                yield found
            except KeyboardInterrupt as e:
                interrupt = e
                raise
        if interrupt is not None:
            raise interrupt
