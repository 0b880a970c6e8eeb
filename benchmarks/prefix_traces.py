"""Traces for prefix reuse: what each request's prompt consists of, and what it is answered; no contents.

A piece of a prompt is a :class:`Segment`: the first ``tokens`` tokens of what its id stands for, so that two
prompts with the same pieces before share the shorter of two pieces with one id.  Generated: the traces of
:mod:`.eviction_traces` with questions and answers, and documents that grow and are edited.  From files: those
traces, ShareGPT's JSON (tokens estimated as 4 characters each), and vLLM's timed traces (``hash_ids``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from . import eviction_traces
from .eviction_traces import Request, Segment
from .trace import TraceError

PrefixKind = Literal["conversations", "agents", "rag", "edits"]
PREFIX_KINDS: tuple[PrefixKind, ...] = get_args(PrefixKind)
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Turn:
    """One request: of all its ``pieces`` the first ``prompt`` tokens are computed or resumed, the rest is the
    answer; ``salt``: nothing is shared between two of them."""

    salt: str
    pieces: tuple[Segment, ...]
    prompt: int

    @classmethod
    def of(cls, salt: str, prompt: Sequence[Segment], answer: Segment) -> Turn:
        return cls(salt, (*prompt, answer), sum(p.tokens for p in prompt))


def generate(kind: PrefixKind, requests: int, seed: int) -> list[Turn]:
    """A trace of so many requests, the same in every run."""
    rng = np.random.default_rng([seed, 100 + PREFIX_KINDS.index(kind)])
    if kind == "edits":
        return list(_edits(requests, rng))
    trace = eviction_traces.generate(kind, requests, seed)
    return list(_chat(trace) if kind == "conversations" else _asked(trace, rng))


def _chat(trace: Sequence[Request]) -> Iterator[Turn]:
    """The piece that a session's next request adds is this one's question and answer, 2 to 3."""
    added: dict[str, Segment] = {}
    turns = []
    for i, r in reversed(list(enumerate(trace))):
        new = added.get(r.id, Segment(f"end{i}", 700))
        before = sum(s.tokens for s in r.segments)
        turns.append(Turn(r.salt, (*r.segments, new), before + max(1, new.tokens * 2 // 5)))
        added[r.id] = r.segments[-1]
    return reversed(turns)


def _asked(trace: Sequence[Request], rng: np.random.Generator) -> Iterator[Turn]:
    """A question and an answer of its own behind each request's segments."""
    for i, r in enumerate(trace):
        question, answer = (int(n) for n in 1 + rng.lognormal([4.0, 5.5], 0.8))
        yield Turn.of(r.salt, (*r.segments, Segment(f"q{i}", question)), Segment(f"a{i}", answer))


def _edits(requests: int, rng: np.random.Generator) -> Iterator[Turn]:
    """200 files and logs, popular by Zipf's law: questions about one as it is (half), after lines were
    added (a quarter), or after a change somewhere, more likely far behind (a quarter), which is another
    text from there.
    """
    weights = 1 / np.arange(1, 201)
    files = [
        [Segment(f"f{i}", int(n))] for i, n in enumerate(np.clip(rng.lognormal(8.7, 0.9, 200), 500, 10**5))
    ]
    for i in range(requests):
        pieces = files[int(rng.choice(200, p=weights / weights.sum()))]
        length = sum(p.tokens for p in pieces)
        chance = rng.random()
        if chance < 0.25:
            pieces.append(Segment(f"v{i}", 1 + int(length * rng.uniform(0.002, 0.03))))
        elif chance < 0.5:
            kept = int(length * rng.beta(3, 1))
            pieces[:] = [*_first(pieces, kept), Segment(f"v{i}", max(1, length - kept))]
        question, answer = (int(n) for n in 1 + rng.lognormal([4.0, 5.5], 0.8))
        yield Turn.of("", (*pieces, Segment(f"q{i}", question)), Segment(f"a{i}", answer))


def _first(pieces: Sequence[Segment], tokens: int) -> Iterator[Segment]:
    for piece in pieces:
        if tokens > 0:
            yield Segment(piece.id, min(tokens, piece.tokens))
        tokens -= piece.tokens


# -- files -------------------------------------------------------------------------------------------


def load(path: Path, chunk: int, seed: int) -> list[Turn]:
    """A trace file of any of the three forms; ``chunk``: tokens of a hash of timed traces.
    ``TraceError``."""
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            turns = _sharegpt(json.loads(text), np.random.default_rng(seed))
        elif "hash_ids" in text.partition("\n")[0]:
            turns = [
                _timed(i, json.loads(line), chunk) for i, line in enumerate(text.splitlines()) if line.strip()
            ]
        else:
            turns = list(_asked(eviction_traces.load(path), np.random.default_rng(seed)))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise TraceError(f"{path.name}: neither ShareGPT's JSON nor a timed trace: {e!r}") from e
    if not turns:
        raise TraceError(f"{path.name}: has no requests")
    return turns


def _sharegpt(entries: list[dict[str, Any]], rng: np.random.Generator) -> list[Turn]:
    """Conversations begin every two seconds or so; a turn follows after a log-normal time of median 60 s."""
    timed: list[tuple[float, int, Turn]] = []
    begin = 0.0
    for entry in entries:
        now = begin
        said: list[Segment] = []
        for message in entry.get("conversations", ()):
            text = message["value"]
            piece = Segment(
                blake2b(text.encode(), digest_size=8).hexdigest(), 1 + len(text) // CHARACTERS_PER_TOKEN
            )
            if message["from"] in ("gpt", "assistant", "chatgpt", "bing", "bard") and said:
                timed.append((now, len(timed), Turn.of("", said, piece)))
                now += float(rng.lognormal(np.log(60), 1.5))
            said.append(piece)
        begin += float(rng.exponential(2.0))
    return [turn for _, _, turn in sorted(timed, key=lambda t: t[:2])]


def _timed(number: int, line: dict[str, Any], chunk: int) -> Turn:
    left = int(line["input_length"])
    pieces: list[Segment] = []
    for name in line["hash_ids"]:
        if left > 0:
            # As vLLM expands them: the last, shorter chunk is a text of its own.
            pieces.append(Segment(str(name) if left >= chunk else f"{name}:{left}", min(chunk, left)))
        left -= chunk
    if not pieces:
        raise ValueError("a request without tokens")
    return Turn.of("", pieces, Segment(f"a{number}", max(1, int(line["output_length"]))))
