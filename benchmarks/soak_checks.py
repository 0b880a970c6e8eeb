"""What a soak judges by: answers against references, errors against faults, levels over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .lib.stats import slope
from .soak_faults import Fault, FaultKind


@dataclass(frozen=True)
class Tokens:
    """A greedy answer: for each token its id, its logprob, and how far the most likely two were apart."""

    ids: tuple[str, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


class Verdict(StrEnum):
    """How an answer compares with its reference."""

    SAME = "same tokens, same logprobs to the last bit"
    CLOSE = "same tokens, rounded otherwise"
    TIE = "another token, where rounding decides between two"
    WRONG = "wrong"


ROUNDING = 0.25
"""By so much may logprobs differ where other passes computed them: four steps of bf16 between logits of 8
and 16.  A request that is computed again after ``reset_running_requests`` prefills what it had decoded."""


def judge(answer: Tokens, reference: Tokens) -> tuple[Verdict, float]:
    """The verdict, and by how much the logprobs of the tokens before a difference differ at most."""
    distance = 0.0
    for i, (one, other) in enumerate(zip(answer.ids, reference.ids, strict=False)):
        if one != other:
            tie = max(distance, reference.margins[i]) <= ROUNDING
            return (Verdict.TIE if tie else Verdict.WRONG), distance
        distance = max(distance, abs(answer.logprobs[i] - reference.logprobs[i]))
    if len(answer.ids) != len(reference.ids) or distance > ROUNDING:
        return Verdict.WRONG, distance
    return (Verdict.CLOSE if distance else Verdict.SAME), distance


@dataclass(frozen=True)
class Failure:
    """A request that got no answer."""

    kind: str
    """Of traffic."""
    url: str
    status: int | None
    """Of HTTP; ``None``: the connection broke, or the answer was cut off."""
    message: str
    begin_s: float
    end_s: float


CUT_OFF = "finish_reason: abort"
"""Message of an answer that the server ended itself."""
GIVEN_UP = "finish reason 'abort'"
"""In the message of a command of the cache API that it ended."""


def excuse(failure: Failure, faults: Iterable[Fault]) -> str | None:
    """Why the documents allow this failure, if they do."""

    def during(*kinds: FaultKind) -> bool:
        return any(f.kind in kinds and f.overlaps(failure.begin_s, failure.end_s) for f in faults)

    if (CUT_OFF in failure.message or GIVEN_UP in failure.message) and during(FaultKind.PAUSE_ABORT):
        return "ended by /pause?mode=abort"
    if failure.kind != "cache API":
        return None
    if failure.status == 404:
        return "404: another client deleted the id, or it expired"
    if failure.status == 409:
        return "409: no room to pin"
    if failure.status == 503 and during(FaultKind.DISK):
        return "503: the disk with the segment registry fails"
    return None


@dataclass(frozen=True)
class Trend:
    """A level over the second half of a run; the first half warms up."""

    start: float
    end: float
    per_hour: float

    @staticmethod
    def of(times: Sequence[float], values: Sequence[float]) -> Trend:
        """``times`` in seconds; start and end are means of a tenth.  ``ValueError`` below 4 samples."""
        if len(times) < 4:
            raise ValueError(f"a trend needs 4 samples at least, got {len(times)}")
        x, y = times[len(times) // 2 :], values[len(values) // 2 :]
        tenth = max(1, len(y) // 10)
        return Trend(sum(y[:tenth]) / tenth, sum(y[-tenth:]) / tenth, 3600 * slope(x, y))

    def grows(self, seconds: float, share: float, least: float) -> bool:
        """Whether it grows in half of ``seconds`` by more than this share of its start, and ``least``."""
        return self.per_hour * seconds / 7200 > max(share * self.start, least)
