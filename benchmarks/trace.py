"""RAG traces: a corpus, and requests that ask about a few of its documents each; seeded, and kept as JSONL.

A request is the system prompt, ``k`` documents and a question that no other request has.  The defaults are
meant to look like a retrieval deployment:

* **Popularity** follows Zipf's law with exponent 1, as page views and queries do: of 300 documents the first
  is in most prompts, and half of them are rarely asked for.
* **Lengths** are log-normal, median 700 tokens and sigma 0.7, clipped to 64..4096: chunks and short pages,
  and a few long ones that pull the mean to about 880.
* **Number and order**: 4 to 6 documents, as retrievers return.  Their order changes from request to request,
  as relevance does; ``popular-first`` is the order that suits a prefix cache best.
* **Arrivals** are Poisson: exponential gaps, so there are bursts.
* **Question and answer**: 32 tokens, and 8 to 16 tokens: short answers.  On CPUs longer ones would measure
  decoding, which a cache of prompts does not change.

Every request is drawn from a random stream of its own: a longer trace starts with the shorter one.

The file: a header, then documents, then requests, one JSON object a line::

    {"kind": "trace", "version": 1, "rate": 1.0, "system": [5, 6], "settings": {...}}
    {"kind": "document", "id": "d0", "content": [7, 8, 9]}
    {"kind": "request", "arrival_s": 0.8, "documents": ["d0"], "question": [10], "output_tokens": 12}

Contents are lists of token ids or, in all places alike, texts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

VERSION = 1
FIRST_WORD = 4
"""Ids below are special tokens of the benchmark's random models."""

Content = tuple[int, ...] | str
"""Token ids, or text."""
Order = Literal["shuffled", "popular-first"]
Lengths = Literal["lognormal", "pareto"]
Form = Literal["tokens", "text"]


class TraceError(ValueError):
    """A trace that cannot be used; the message says where (file, line, field) and what is expected."""


@dataclass(frozen=True)
class TraceSettings:
    """What a generated trace looks like.  Lengths are in tokens; raises :class:`TraceError`."""

    requests: int = 400
    rate: float = 1.0
    """Mean arrivals per second."""
    documents: int = 300
    zipf: float = 1.0
    """The document of rank r is drawn with weight r ** -zipf; 0: all alike."""
    lengths: Lengths = "lognormal"
    median_tokens: int = 700
    tail: float = 0.7
    """Log-normal: sigma of the logarithm.  Pareto: 1 / alpha.  Larger is heavier."""
    min_tokens: int = 64
    max_tokens: int = 4096
    per_request: tuple[int, int] = (4, 6)
    """Documents in a request, from and to."""
    order: Order = "shuffled"
    system_tokens: int = 256
    question_tokens: int = 32
    output_tokens: tuple[int, int] = (8, 16)
    vocabulary: int = 30_000
    """Ids are drawn from ``FIRST_WORD`` up to here, exclusive."""
    form: Form = "tokens"
    """``text`` writes the word ``w<id>`` for each id: a token each for the random models' tokenizer."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("documents", "min_tokens", "median_tokens", "system_tokens", "question_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "an integer >= 1")
        for name in ("requests", "zipf", "seed", "tail"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "a number >= 0")
        _require(self.rate > 0, "rate", self.rate, "a number > 0")
        _require(self.lengths in get_args(Lengths), "lengths", self.lengths, " or ".join(get_args(Lengths)))
        _require(self.order in get_args(Order), "order", self.order, " or ".join(get_args(Order)))
        _require(self.form in get_args(Form), "form", self.form, " or ".join(get_args(Form)))
        _require(
            self.min_tokens <= self.median_tokens <= self.max_tokens,
            "median_tokens",
            self.median_tokens,
            f"a length between min_tokens={self.min_tokens} and max_tokens={self.max_tokens}",
        )
        for name in ("per_request", "output_tokens"):
            low, high = getattr(self, name)
            _require(1 <= low <= high, name, (low, high), "two integers, 1 <= from <= to")
        _require(
            self.per_request[1] <= self.documents,
            "per_request",
            self.per_request,
            f"at most documents={self.documents}",
        )
        _require(self.vocabulary > FIRST_WORD, "vocabulary", self.vocabulary, f"an integer > {FIRST_WORD}")


@dataclass(frozen=True)
class TraceRequest:
    """One request.  ``arrival_s`` counts from the trace's start, ``documents`` are ids in prompt order."""

    arrival_s: float
    documents: tuple[str, ...]
    question: Content
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """A corpus and requests in order of arrival.

    ``rate`` is the trace's nominal rate in requests per second, ``settings`` what it was generated with
    (for the record; empty for traces from elsewhere).
    """

    system: Content
    documents: Mapping[str, Content]
    requests: tuple[TraceRequest, ...]
    rate: float
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def form(self) -> Form:
        return "text" if isinstance(self.system, str) else "tokens"

    def parts(self, request: TraceRequest) -> list[Content]:
        """System prompt, documents, question."""
        return [self.system, *(self.documents[i] for i in request.documents), request.question]

    def prompt(self, request: TraceRequest, separator: int | str | None) -> list[int] | str:
        """The request's prompt, with the separator between its parts or (``None``) without.

        Apart from the separators both have the same content: ids are put one after the other, and a text
        that does not end in white space gets an empty line, separator or not.  A separator is an id in a
        trace of token ids and a text in a trace of texts; ``TraceError`` for the other kind.
        """
        parts = self.parts(request)
        if self.form == "tokens":
            if isinstance(separator, str):
                raise TraceError(f"separator {separator!r}: a trace of token ids needs the separator's id")
            between = [] if separator is None else [separator]
            ids: list[Any] = [*parts[0]]
            for part in parts[1:]:
                ids += [*between, *part]
            return ids
        if isinstance(separator, int):
            raise TraceError(f"separator {separator}: a trace of texts needs the separator's text")
        texts = [str(part) for part in parts]
        spaced = [text if text[-1:].isspace() else text + "\n\n" for text in texts[:-1]]
        return (separator or "").join([*spaced, texts[-1]])

    def window(self, first: int, count: int, rate: float) -> list[tuple[float, TraceRequest]]:
        """``count`` requests from number ``first`` on, with arrival times in seconds from the window's start
        at ``rate`` requests per second.

        Times are stretched so that the window's last request arrives after exactly ``count / rate`` seconds:
        a Poisson process given its count still is one, and the window's own luck does not become a rate.
        Past its end the trace starts again.
        """
        if not self.requests:
            raise TraceError("the trace has no requests")
        picked = [self.requests[(first + i) % len(self.requests)] for i in range(count)]
        gaps = [self._gap((first + i) % len(self.requests)) for i in range(count)]
        total = sum(gaps)
        times = np.cumsum(gaps) * (count / rate / total) if total else np.zeros(count)
        return [(float(at), request) for at, request in zip(times, picked, strict=True)]

    def _gap(self, i: int) -> float:
        return self.requests[i].arrival_s - (self.requests[i - 1].arrival_s if i else 0.0)

    def longest(self, count_tokens: Callable[[Content], int] = len) -> int:
        """Tokens of the longest prompt and its answer, without separators."""
        return max(sum(count_tokens(part) for part in self.parts(r)) + r.output_tokens for r in self.requests)

    def save(self, path: Path) -> None:
        """Write the trace; :func:`load` gives it back."""
        with path.open("w", encoding="utf-8") as out:
            for line in self._lines():
                out.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        yield {
            "kind": "trace",
            "version": VERSION,
            "rate": self.rate,
            "system": self.system,
            "settings": dict(self.settings),
        }
        for name, content in self.documents.items():
            yield {"kind": "document", "id": name, "content": content}
        for request in self.requests:
            yield {"kind": "request", **dataclasses.asdict(request)}


# -- generate ----------------------------------------------------------------------------------------


def generate(settings: TraceSettings) -> Trace:
    """The trace of these settings; the same in every run."""
    s = settings
    corpus = np.random.default_rng([s.seed, 0])
    lengths = document_lengths(s, corpus)
    system = _content(s, corpus, s.system_tokens)
    names = [f"d{i}" for i in range(s.documents)]
    documents = {name: _content(s, corpus, int(n)) for name, n in zip(names, lengths, strict=True)}
    weights = np.arange(1, s.documents + 1, dtype=np.float64) ** -s.zipf  # documents are numbered by rank
    weights /= weights.sum()
    requests, now = [], 0.0
    for i in range(s.requests):
        rng = np.random.default_rng([s.seed, 1, i])
        now += float(rng.exponential(1 / s.rate))
        k = int(rng.integers(s.per_request[0], s.per_request[1], endpoint=True))
        ranks = rng.choice(s.documents, size=k, replace=False, p=weights)
        ranks = np.sort(ranks) if s.order == "popular-first" else rng.permutation(ranks)
        requests.append(
            TraceRequest(
                arrival_s=now,
                documents=tuple(names[r] for r in ranks),
                question=_content(s, rng, s.question_tokens),
                output_tokens=int(rng.integers(s.output_tokens[0], s.output_tokens[1], endpoint=True)),
            )
        )
    recorded = json.loads(json.dumps(dataclasses.asdict(s)))  # as a file gives it back
    return Trace(system, documents, tuple(requests), s.rate, recorded)


def document_lengths(s: TraceSettings, rng: np.random.Generator) -> np.ndarray:
    """Lengths of all documents in tokens, ``int64 [documents]``, clipped."""
    if s.lengths == "lognormal":
        drawn = s.median_tokens * np.exp(rng.normal(0.0, s.tail, s.documents))
    else:  # a Pareto variable with this median: minimum median / 2^(1/alpha)
        drawn = s.median_tokens * 2.0**-s.tail * rng.uniform(0.0, 1.0, s.documents) ** -s.tail
    return np.clip(np.rint(drawn), s.min_tokens, s.max_tokens).astype(np.int64)


def _content(s: TraceSettings, rng: np.random.Generator, n: int) -> Content:
    ids = rng.integers(FIRST_WORD, s.vocabulary, n).tolist()
    return " ".join(f"w{i}" for i in ids) if s.form == "text" else tuple(ids)


# -- load --------------------------------------------------------------------------------------------


def load(path: Path) -> Trace:
    """Read a trace file; :class:`TraceError` names the line and the field that is wrong."""
    header: dict[str, Any] | None = None
    form: type | None = None
    documents: dict[str, Content] = {}
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            line = _Line(f"{path.name}:{number}", text)
            kind = line.choice("kind", ("trace", "document", "request"))
            if header is None:
                line.check(kind == "trace", "kind", "the header (kind trace) first")
                line.check(line.raw("version") == VERSION, "version", str(VERSION))
                header = {
                    "system": line.content("system", None),
                    "rate": line.number("rate", 1.0),
                    "settings": line.mapping("settings"),
                }
                form = type(header["system"])
                line.check(header["rate"] > 0, "rate", "a number > 0")
            elif kind == "trace":
                line.refuse("kind", "only one header")
            elif kind == "document":
                name = line.text("id")
                line.check(name not in documents, "id", "an id that no other document has")
                documents[name] = line.content("content", form)
            else:
                requests.append(_request(line, documents, form, requests))
    if header is None:
        raise TraceError(f"{path.name}: is empty; expected a header line (kind trace)")
    if not requests:
        raise TraceError(f"{path.name}: has no requests (lines of kind request)")
    return Trace(documents=documents, requests=tuple(requests), **header)


def _request(
    line: _Line, documents: Mapping[str, Content], form: type | None, before: Sequence[TraceRequest]
) -> TraceRequest:
    arrival = line.number("arrival_s")
    least = before[-1].arrival_s if before else 0.0
    line.check(arrival >= least, "arrival_s", f"at least {least:g}, the preceding arrival")
    names = line.raw("documents")
    line.check(isinstance(names, list) and bool(names), "documents", "a list of document ids, not empty")
    for name in names:
        line.check(
            isinstance(name, str) and name in documents, "documents", "ids of documents on earlier lines"
        )
    output = line.raw("output_tokens")
    line.check(
        isinstance(output, int) and not isinstance(output, bool) and output >= 1,
        "output_tokens",
        "an integer >= 1",
    )
    return TraceRequest(arrival, tuple(names), line.content("question", form), output)


class _Line:
    """One line of a file and its fields; whatever is wrong raises :class:`TraceError`."""

    def __init__(self, where: str, text: str) -> None:
        self._where = where
        try:
            value = json.loads(text)
        except ValueError as e:
            raise TraceError(f"{where}: no JSON: {e}") from e
        if not isinstance(value, dict):
            raise TraceError(f"{where}: expected a JSON object, got {_shown(value)}")
        self._fields: dict[str, Any] = value

    def refuse(self, name: str, expected: str) -> None:
        raise TraceError(f"{self._where}: {name}={_shown(self._fields.get(name))}: expected {expected}")

    def check(self, fine: bool, name: str, expected: str) -> None:
        if not fine:
            self.refuse(name, expected)

    def raw(self, name: str) -> Any:
        if name not in self._fields:
            raise TraceError(f"{self._where}: {name} is missing")
        return self._fields[name]

    def text(self, name: str) -> str:
        value = self.raw(name)
        self.check(isinstance(value, str) and bool(value), name, "a text")
        return str(value)

    def choice(self, name: str, known: Sequence[str]) -> str:
        value = self.raw(name)
        self.check(value in known, name, f"one of {', '.join(known)}")
        return str(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw(name) if default is None else self._fields.get(name, default)
        fine = isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value)
        self.check(bool(fine), name, "a number")
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._fields.get(name, {})
        self.check(isinstance(value, dict), name, "an object")
        return dict(value)

    def content(self, name: str, form: type | None) -> Content:
        """Token ids or text, not empty; of ``form`` where one is given."""
        value = self.raw(name)
        if isinstance(value, str):
            found: Content = value
        else:
            ids = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
            self.check(ids, name, "a text or a list of token ids >= 0")
            found = tuple(value)
        self.check(bool(found), name, "a value that is not empty")
        if form is not None and type(found) is not form:
            self.refuse(name, f"{'a text' if form is str else 'token ids'}, as in the header")
        return found


def _require(fine: bool, name: str, value: object, expected: str) -> None:
    if not fine:
        raise TraceError(f"{name}={value!r}: expected {expected}")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
