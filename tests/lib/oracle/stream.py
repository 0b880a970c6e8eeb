"""The oracle's layout of a prompt: what a request computes itself, and where records are applied."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shown:
    """From stream token `at` on, rows `[lo, hi)` of a segment are public."""

    at: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Compose:
    """Before stream token `at`, apply the states of rows `[lo, hi)` of `tokens`, which start at `start`.

    `shown`: the parts of these rows whose K and V are read; what lies between them is an island.
    """

    at: int
    tokens: tuple[int, ...]
    start: int
    lo: int
    hi: int
    shown: tuple[Shown, ...]


WHOLE = (1 << 62, 1 << 62)
"""Islands are run whole: see `build_stream`."""


@dataclass(frozen=True)
class Piece:
    """Stream tokens up to `end`: an island's, or with a compose point behind them."""

    end: int
    island: bool = False
    compose: Compose | None = None


@dataclass(frozen=True)
class Stream:
    """What a request computes: `tokens` at logical `positions`, and its compose points in prompt order;
    `islands`: stream tokens `[begin, end)` of each, as they are run."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    composes: tuple[Compose, ...] = ()
    islands: tuple[tuple[int, int], ...] = ()

    def pieces(self) -> list[Piece]:
        """What a linear layer runs one after the other."""
        found = [(c.at, 0, Piece(c.at, compose=c)) for c in self.composes]
        for begin, end in self.islands:
            found += [(begin, 1, Piece(begin)), (begin, 2, Piece(end, island=True))]
        return [piece for *_, piece in sorted(found, key=lambda p: p[:2])] + [Piece(len(self.tokens))]


def cut_runs(begin: int, end: int, multiple: int, longest: int) -> list[tuple[int, int]]:
    """`[begin, end)` in runs that end at multiples of `multiple` and are no longer than `longest`."""
    runs: list[tuple[int, int]] = []
    for token in range(begin, end):
        if token == begin or token % multiple == 0 or token - runs[-1][0] == longest:
            runs.append((token, token))
        runs[-1] = (runs[-1][0], token + 1)
    return runs


def build_stream(
    leading: Sequence[int],
    segments: Sequence[Sequence[int]],
    query: Sequence[int],
    *,
    head: int = 8,
    tail: int = 8,
    anchor: int = 0,
    context: Sequence[int] = (),
    islands: Mapping[int, Sequence[tuple[int, int]]] = {},
    island_runs: tuple[int, int] = WHOLE,
    generated: Sequence[int] = (),
    in_stream: Iterable[int] = (),
    leading_in_stream: bool = False,
    fault: str | None = None,
) -> Stream:
    """Lay a prompt out as a stream; records are made behind `context` and the first `anchor` tokens of
    `leading`.

    `islands`: of segments, by index, the row ranges `[lo, hi)` of their interiors that the stream computes.
    In linear layers each is run from the state where its interior begins, which goes on behind it as it was:
    in runs that end at multiples of `island_runs[0]` in the stream, and after `island_runs[1]` tokens.

    `in_stream` names segments, by index, that are computed in the stream (too short, or not fitting);
    `leading_in_stream` says it of the leading segment. A segment with no interior (`n <= head + tail`) has
    nothing to reuse, and is computed there, too.
    """
    in_stream, before = set(in_stream), (*context, *leading[:anchor])
    tokens: list[int] = []
    positions: list[int] = []
    composes: list[Compose] = []
    runs: list[tuple[int, int]] = []

    def compute(ids: Sequence[int], position: int) -> None:
        tokens.extend(ids)
        positions.extend(range(position, position + len(ids)))

    position = 0
    gap = 1 if fault == "separator_positions" else 0
    if leading:
        if leading_in_stream:
            compute(leading, 0)
        else:
            whole = Shown(0, 0, len(leading))
            composes.append(Compose(0, tuple(leading), 0, 0, len(leading), (whole,)))
        position = len(leading) + gap
    for index, segment in enumerate(segments):
        n, lo, hi = len(segment), head, len(segment) - tail
        if index in in_stream or hi <= lo:
            compute(segment, position)
        else:
            compute(segment[:lo], position)
            late = tail if fault == "compose_late" else 0
            inner = (lo + (fault == "seam_off_by_one"), hi - (fault == "seam_off_by_one_tail"))
            shown, first, shift = [], inner[0], len(before)
            for begin, end in islands.get(index, ()):
                shown.append(Shown(len(tokens) + late, first + shift, begin + shift))
                runs += cut_runs(len(tokens), len(tokens) + end - begin, *island_runs)
                compute(segment[begin:end], position + begin)
                first = begin if fault == "island_counted_twice" else end
            at = len(tokens) + late
            shown.append(Shown(at, first + shift, inner[1] + shift))
            compute(segment[hi:], position + hi)
            lo, hi = (i + shift for i in inner)
            start = position - (0 if fault == "context_in_positions" else shift)
            composes.append(Compose(at, (*before, *segment), start, lo, hi, tuple(shown)))
        position += n + gap
    compute([*query, *generated], position)
    return Stream(tuple(tokens), tuple(positions), tuple(composes), tuple(runs))
