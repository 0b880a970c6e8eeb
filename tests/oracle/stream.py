"""The oracle's layout of a prompt: what a request computes itself, and where records are applied."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Compose:
    """Before stream token `at`, apply rows `[lo, hi)` of segment `tokens`, which starts at `start`."""

    at: int
    tokens: tuple[int, ...]
    start: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Stream:
    """What a request computes: `tokens` at logical `positions`, and its compose points in prompt order."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    composes: tuple[Compose, ...] = ()


def build_stream(
    leading: Sequence[int],
    segments: Sequence[Sequence[int]],
    query: Sequence[int],
    *,
    head: int = 8,
    tail: int = 8,
    anchor: int = 0,
    generated: Sequence[int] = (),
    in_stream: Iterable[int] = (),
    leading_in_stream: bool = False,
    fault: str | None = None,
) -> Stream:
    """Lay a prompt out as a stream; records are made behind the first `anchor` tokens of `leading`.

    A segment with no interior (`n <= head + tail`) has nothing to reuse: it is computed in the stream like
    the segments named in `in_stream`.
    """
    in_stream, before = set(in_stream), tuple(leading[:anchor])
    tokens: list[int] = []
    positions: list[int] = []
    composes: list[Compose] = []

    def compute(ids: Sequence[int], position: int) -> None:
        tokens.extend(ids)
        positions.extend(range(position, position + len(ids)))

    position = 0
    gap = 1 if fault == "separator_positions" else 0
    if leading:
        if leading_in_stream:
            compute(leading, 0)
        else:
            composes.append(Compose(0, tuple(leading), 0, 0, len(leading)))
        position = len(leading) + gap
    for index, segment in enumerate(segments):
        n, lo, hi = len(segment), head, len(segment) - tail
        if index in in_stream or hi <= lo:
            compute(segment, position)
        else:
            compute(segment[:lo], position)
            at = len(tokens) + (tail if fault == "compose_late" else 0)
            compute(segment[hi:], position + hi)
            inner = (lo + (fault == "seam_off_by_one"), hi - (fault == "seam_off_by_one_tail"))
            lo, hi = (i + len(before) for i in inner)
            composes.append(Compose(at, (*before, *segment), position - len(before), lo, hi))
        position += n + gap
    compute([*query, *generated], position)
    return Stream(tuple(tokens), tuple(positions), tuple(composes))
