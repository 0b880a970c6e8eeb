"""What segment-parallel prefill costs: the simulator's constants, measured or published, and where from."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .eviction_shapes import SHAPES, RecordShape


@dataclass(frozen=True)
class Costs:
    """Seconds, bytes per second.  Every field but ``records`` can be set from the command line.

    Raises ``ValueError`` for a number that is negative, or no bandwidth.
    """

    records: RecordShape
    """What the record of a segment weighs."""
    plan_s: float
    """Router, once a request: tokenise, plan, assign."""
    dispatch_s: float
    """Router, once a segment sent out."""
    admit_s: float
    """Time from the router until an idle worker computes; overlaps with the worker's other segments."""
    prefill_token_s: float
    """A worker's prefill of n tokens: ``prefill_token_s * n + prefill_pair_s * n**2 + prefill_segment_s``."""
    prefill_pair_s: float
    prefill_segment_s: float
    flops_quadratic: float
    """FLOPs of n tokens are in proportion to ``n + flops_quadratic * n^2``: what the router weighs by."""
    link_bytes_s: float
    """A worker's way out, and the combine node's way in; one transfer at a time on either."""
    ingress_bytes_s: float
    round_trip_s: float
    """Before every transfer: offer and answer."""
    first_token_s: float
    """Combine node, once a request: one step, the question, the first token."""
    compose_segment_s: float
    """Combine node, once a segment: seam rows, compose points."""
    compose_token_s: float
    """Combine node, once a cached token: attention of all seam rows to it."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_bytes_s"):
                if not value > 0:
                    raise ValueError(f"{field.name}={value}: expected a number > 0")
            elif field.name != "records" and not 0 <= value < math.inf:
                raise ValueError(f"{field.name}={value}: expected a finite number >= 0")

    def prefill_s(self, tokens: int) -> float:
        return self.prefill_token_s * tokens + self.prefill_pair_s * tokens**2 + self.prefill_segment_s

    def compose_s(self, segments: Sequence[int]) -> float:
        return (
            self.first_token_s + self.compose_segment_s * len(segments) + self.compose_token_s * sum(segments)
        )


PRESETS: Mapping[str, Costs] = {
    "cpu-169m": Costs(
        records=SHAPES["random-150m"],
        # Fits of docs/benchmarks/cpu.md, "First token" (ttft-length and ttft-segments: medians of eight
        # points), which tests/tools/benchmarks/test_scale.py fits again. Prefill: (cold - warm) / segments
        # over n, n^2; a constant would be within the drift between the two runs. Compose: warm over 1,
        # segments, tokens.
        prefill_token_s=4.586e-4,
        prefill_pair_s=2.352e-8,
        prefill_segment_s=0.0,
        # store/eviction/flops.py, for the layers of this model.
        flops_quadratic=2.75e-5,
        first_token_s=0.01352,
        compose_segment_s=0.01027,
        compose_token_s=2.757e-6,
        # Same page, "Where the warm first token goes": Python and scheduler.
        admit_s=0.0161,
        # Assumed: 10 Gbit/s Ethernet.
        link_bytes_s=1.25e9,
        ingress_bytes_s=1.25e9,
        round_trip_s=2e-4,
        # `scale --control`: 500 to 2,000 segments a second and core, with an httpx client per worker.
        plan_s=0.002,
        dispatch_s=0.002,
    ),
    "hypic-gpu": Costs(
        records=SHAPES["qwen3.5-35b-a3b"],
        # HYPIC's published figures: a segment of 1k tokens costs 40.7 ms to prefill and 2.3 ms when cached.
        # How either grows with length is not published: here linearly, and not at all.
        prefill_token_s=0.0407 / 1024,
        prefill_pair_s=0.0,
        prefill_segment_s=0.0,
        flops_quadratic=0.0,
        compose_segment_s=0.0023,
        compose_token_s=0.0,
        # Assumed, all of them: one step with a question, a server's overhead, 400 Gbit/s for each GPU.
        first_token_s=0.010,
        admit_s=0.005,
        link_bytes_s=50e9,
        ingress_bytes_s=50e9,
        round_trip_s=5e-5,
        plan_s=0.002,
        dispatch_s=0.002,
    ),
}


@dataclass(frozen=True)
class Piece:
    """A cold segment of a request."""

    tokens: int
    prefill_s: float
    nbytes: int
    """Bytes of its record."""


@dataclass(frozen=True)
class Request:
    """All of its ``pieces`` are cold."""

    arrival_s: float
    pieces: tuple[Piece, ...]
    compose_s: float

    @staticmethod
    def of(arrival_s: float, segments: Sequence[int], costs: Costs) -> Request:
        pieces = (Piece(n, costs.prefill_s(n), costs.records.value(n).nbytes) for n in segments)
        return Request(arrival_s, tuple(pieces), costs.compose_s(segments))

    @property
    def prefill_s(self) -> float:
        return sum(piece.prefill_s for piece in self.pieces)

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True)
class Lengths:
    """Lengths of segments: log-normal, cut off at both ends as documents are."""

    median: float
    sigma: float
    shortest: int = 256
    longest: int = 8192

    def draw(self, n: int, source: random.Random) -> list[int]:
        mu = math.log(self.median)
        drawn = (source.lognormvariate(mu, self.sigma) for _ in range(n))
        return [round(min(self.longest, max(self.shortest, x))) for x in drawn]


def at_once(n: int, segments: int, lengths: Lengths, costs: Costs, seed: int) -> list[Request]:
    """Requests to be looked at one by one."""
    source = random.Random(seed)
    return [Request.of(0.0, lengths.draw(segments, source), costs) for _ in range(n)]


def poisson(requests: Sequence[Request], per_s: float, seed: int) -> list[Request]:
    """The same requests, arriving at random at this mean rate."""
    source = random.Random(seed)
    now, found = 0.0, []
    for request in requests:
        now += source.expovariate(per_s)
        found.append(dataclasses.replace(request, arrival_s=now))
    return found
