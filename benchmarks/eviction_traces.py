"""Traces for the replay: which segments each request asks for, and how long they are; no contents.

The file: one JSON object a line, in order of time::

    {"time": 0.8, "request": "r0", "salt": "", "segments": [["tool3", 412], ["d17", 903]]}

``time`` in seconds from the start, ``request`` an id for messages, ``salt`` the tenant (the same segment of
two tenants is two records), ``segments`` the ids and lengths in tokens, in prompt order.  What is not shared
(the question) is left out.  A segment that changes is another segment: give it another id.

Three generators, seeded; the published figures that they follow:

* **rag**: 3 % of the documents take 60 % of the requests in RAGCache's analysis (arXiv 2404.12457), which
  Zipf's law with exponent 1 gives for a corpus of this size.  Lengths are log-normal, from chunks to long
  pages.  Popularity drifts: now and then a document of the tail takes the place of a popular one.
* **conversations**: tokens a message are log-normal with the moments of WildChat (arXiv 2405.01470: users
  296 +- 1609, models 441 +- 411), turns a conversation geometric with the mean of ShareChat (arXiv
  2512.17843: 660,293 turns in 142,808).  Thinking times are log-normal: some users come back after hours.
* **agents**: no published distribution known to us; tool definitions of a few hundred tokens, shared by
  agents; memory files that grow with every session, so that their old versions are never asked for again;
  documents that a session reads once and keeps in its prompt to its end, some shared between sessions.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from .trace import TraceError, TraceSettings, document_lengths

Kind = Literal["rag", "agents", "conversations"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Segment:
    """What a request asks for: ``id`` is unique within a tenant, a length goes with it."""

    id: str
    tokens: int


@dataclass(frozen=True)
class Request:
    """``time`` in seconds from the trace's start."""

    time: float
    id: str
    salt: str
    segments: tuple[Segment, ...]

    def records(self) -> Iterator[tuple[str, int]]:
        """Names of the records that the request needs, each once, with their tokens."""
        return iter({f"{self.salt}/{s.id}": s.tokens for s in self.segments}.items())


# -- files -------------------------------------------------------------------------------------------


def save(path: Path, requests: Iterable[Request]) -> None:
    """Write a trace; :func:`load` gives it back."""
    with path.open("w", encoding="utf-8") as out:
        for r in requests:
            segments = [[s.id, s.tokens] for s in r.segments]
            line = {"time": r.time, "request": r.id, "salt": r.salt, "segments": segments}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def load(path: Path) -> list[Request]:
    """Read a trace; :class:`TraceError` names the line and what is wrong in it."""
    requests: list[Request] = []
    lengths: dict[str, int] = {}
    with path.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            if text.strip():
                request = _request(f"{path.name}:{number}", text)
                if requests and request.time < requests[-1].time:
                    raise TraceError(
                        f"{path.name}:{number}: time={request.time:g}: expected no less than before"
                    )
                for key, tokens in request.records():
                    if lengths.setdefault(key, tokens) != tokens:
                        raise TraceError(
                            f"{path.name}:{number}: segment {key!r} has {tokens} tokens and had "
                            f"{lengths[key]} before: a segment that changes needs another id"
                        )
                requests.append(request)
    if not requests:
        raise TraceError(f"{path.name}: has no requests")
    return requests


def _request(where: str, text: str) -> Request:
    try:
        line: Any = json.loads(text)
    except ValueError as e:
        raise TraceError(f"{where}: no JSON: {e}") from e
    if not isinstance(line, dict):
        raise TraceError(f"{where}: expected a JSON object")

    def field(name: str, expected: str, fine: Callable[[Any], bool]) -> Any:
        value = line.get(name)
        if not fine(value):
            raise TraceError(f"{where}: {name}={json.dumps(value)[:80]}: expected {expected}")
        return value

    segments = field("segments", "a list of [id, tokens], tokens >= 1", _are_segments)
    return Request(
        time=float(field("time", "seconds, >= 0", lambda v: _is_number(v) and v >= 0)),
        id=field("request", "a string", lambda v: isinstance(v, str)),
        salt=field("salt", "a string", lambda v: isinstance(v, str)),
        segments=tuple(Segment(name, tokens) for name, tokens in segments),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_segments(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], int)
        and not isinstance(pair[1], bool)
        and pair[1] >= 1
        for pair in value
    )


# -- generators --------------------------------------------------------------------------------------

Step = tuple[float, str, tuple[Segment, ...]]
"""A request of a session: seconds since the one before, salt, segments."""
_Waiting = tuple[float, int, Request, Iterator[Step]]


def generate(kind: Kind, requests: int, seed: int) -> list[Request]:
    """A trace of exactly so many requests, the same in every run."""
    make = {"rag": rag, "agents": agents, "conversations": conversations}[kind]
    return make(requests, np.random.default_rng([seed, KINDS.index(kind)]))


def rag(requests: int, rng: np.random.Generator) -> list[Request]:
    """Four to six of 5,000 documents a request, and one of four system prompts."""
    count, zipf = 5000, _zipf(5000, 1.0)
    # Chunks and long pages alike: a mean of about 1,700 tokens, of which a tenth makes a half.
    corpus = TraceSettings(documents=count, median_tokens=800, tail=1.2, min_tokens=64, max_tokens=32_768)
    lengths = document_lengths(corpus, rng)
    ranked = rng.permutation(count)  # ranked[r]: the document of rank r
    prompts = [Segment(f"system{i}", n) for i, n in enumerate(_lognormal(rng, 400, 0.6, 4))]
    out, now = [], 0.0
    for i in range(requests):
        now += float(rng.exponential(1.0))
        if rng.random() < 0.05:  # news
            risen, fallen = int(rng.integers(count)), int(rng.choice(count, p=zipf))
            ranked[[risen, fallen]] = ranked[[fallen, risen]]
        picked = ranked[rng.choice(count, size=int(rng.integers(4, 7)), replace=False, p=zipf)]
        documents = tuple(Segment(f"d{d}", int(lengths[d])) for d in picked)
        out.append(Request(now, f"r{i}", "", (prompts[int(rng.choice(4, p=_zipf(4, 1.0)))], *documents)))
    return out


def conversations(requests: int, rng: np.random.Generator) -> list[Request]:
    """Every turn asks for the system prompt of its application and all turns before it."""
    prompts = [Segment(f"system{i}", n) for i, n in enumerate(_lognormal(rng, 600, 0.8, 20))]
    popular = _zipf(20, 1.0)

    def session(number: int) -> Iterator[Step]:
        history = [prompts[int(rng.choice(20, p=popular))]]
        for turn in range(int(rng.geometric(1 / 4.6))):
            yield float(rng.lognormal(np.log(60), 1.5)) if turn else 0.0, "", tuple(history)
            user, model = _lognormal(rng, 53, 1.85, 1)[0], _lognormal(rng, 323, 0.79, 1)[0]
            history.append(Segment(f"s{number}t{turn}", min(user, 32_768) + min(model, 8192)))

    return _interleaved(requests, rng, 0.5, session)


def agents(requests: int, rng: np.random.Generator) -> list[Request]:
    """Sessions of 300 agents of 20 tenants: tools, memory files, and documents that come in one by one."""
    count, tenants = 300, 20
    tools = [Segment(f"tool{i}", n) for i, n in enumerate(_lognormal(rng, 350, 0.7, 200))]
    kits = [
        rng.choice(200, size=int(rng.integers(4, 13)), replace=False, p=_zipf(200, 0.8)) for _ in range(count)
    ]
    memory = [[(0, int(n)) for n in _lognormal(rng, 800, 0.8, int(rng.integers(1, 5)))] for _ in range(count)]
    shared = [_lognormal(rng, 1000, 1.0, 200) for _ in range(tenants)]  # a tenant's files
    busy, popular = _zipf(count, 0.8), _zipf(200, 0.9)

    def session(number: int) -> Iterator[Step]:
        agent = int(rng.choice(count, p=busy))
        tenant = agent % tenants
        head = [tools[i] for i in kits[agent]]
        head += [Segment(f"a{agent}m{i}v{v}", n) for i, (v, n) in enumerate(memory[agent])]
        read: dict[str, Segment] = {}
        for step in range(int(rng.geometric(1 / 12))):
            if rng.random() < 0.4:
                if rng.random() < 0.5:
                    file = int(rng.choice(200, p=popular))
                    found = Segment(f"f{file}", int(shared[tenant][file]))
                else:
                    found = Segment(f"s{number}p{step}", _lognormal(rng, 1000, 1.0, 1)[0])
                read[found.id] = found
            yield (
                float(rng.lognormal(np.log(10), 1.0)) if step else 0.0,
                f"t{tenant}",
                (*head, *read.values()),
            )
        for i, (version, tokens) in enumerate(memory[agent]):
            if rng.random() < 0.5:
                grown = tokens + _lognormal(rng, 120, 0.8, 1)[0]
                # A file that is too long is summarised.
                memory[agent][i] = (version + 1, grown if grown < 8192 else grown // 4)

    return _interleaved(requests, rng, 0.2, session)


def _interleaved(
    requests: int,
    rng: np.random.Generator,
    rate: float,
    session: Callable[[int], Iterator[Step]],
) -> list[Request]:
    """Requests of sessions that begin at ``rate`` a second, in order of time."""
    out: list[Request] = []
    begin, number = 0.0, 0
    waiting: list[_Waiting] = []

    def wait(now: float, session_number: int, steps: Iterator[Step]) -> None:
        for pause, salt, segments in steps:
            request = Request(now + pause, f"s{session_number}", salt, segments)
            heapq.heappush(waiting, (request.time, session_number, request, steps))
            return

    while len(out) < requests:
        while not waiting or begin <= waiting[0][0]:
            wait(begin, number, session(number))
            begin, number = begin + float(rng.exponential(1 / rate)), number + 1
        now, which, request, steps = heapq.heappop(waiting)
        out.append(request)
        wait(now, which, steps)
    return out


def _zipf(count: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def _lognormal(rng: np.random.Generator, median: float, sigma: float, count: int) -> list[int]:
    """Lengths in tokens, 32 to 32,768."""
    drawn = np.clip(median * np.exp(rng.normal(0.0, sigma, count)), 32, 32_768)
    return [int(n) for n in np.rint(drawn)]
