"""The second client: it sends one good request again and again, and every answer must be the right one."""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from vllm_hypic.harness.client import Reply, completion

BOUND_S = 60.0
"""No answer takes longer.  Alone it takes a twentieth of a second; machines that run tests are busy."""
BETWEEN_S = 0.1


@dataclass
class WellBehaved:
    """Asks in a thread of its own while the block runs, and checks the answers at its end.

    ``tolerance``: how far logprobs may be from those of the quiet server.  Its batch has rows of others, and
    products of other sizes are rounded otherwise.
    """

    url: str
    prompt: Sequence[int]
    tolerance: float
    replies: list[Reply] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _fault: BaseException | None = None

    def ask(self, **more: Any) -> Reply:
        body = {"prompt": list(self.prompt), "max_tokens": 6, "ignore_eos": True, **more}
        return completion(self.url, body, timeout_s=BOUND_S)

    def __enter__(self) -> Self:
        """Asks twice while nobody else does: cold and warm are the same."""
        self.expected = self.ask()
        assert self.ask().same_as(self.expected)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(2 * BOUND_S)
        assert not self._thread.is_alive(), "its last request hangs"
        if exc[0] is None:
            self._check()

    def _run(self) -> None:
        try:
            for salt in map("good {}".format, itertools.count()):  # every second one is cold
                for more in ({}, {"cache_salt": salt}):
                    self.replies.append(self.ask(**more))
                    if self._over.wait(BETWEEN_S):
                        return
        except BaseException as e:
            self._fault = e

    def _check(self) -> None:
        """Every answer came, in time, and is the one that the quiet server gave."""
        if self._fault is not None:
            raise self._fault
        assert self.replies, "it never got to ask"
        for reply in self.replies:
            assert reply.tokens == self.expected.tokens
            assert self._distance(reply) <= self.tolerance
            assert reply.total_s < BOUND_S
        assert self.ask().same_as(self.expected), "alone again, its answer has other bits"

    def _distance(self, reply: Reply) -> float:
        """Largest difference of a chosen token's logprob."""
        pairs = zip(reply.tokens, reply.logprobs, self.expected.logprobs, strict=True)
        return max(abs(dict(one)[token] - dict(other)[token]) for token, one, other in pairs)
