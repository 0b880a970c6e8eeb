"""What a row of the families' table says, and the cases that rows make."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .contract import METHODS, Served

F32, BF16 = "float32", "bfloat16"
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
WHOLE, CHUNKS = 4096, 96
"""Tokens of a step: a prompt is computed at once, or in chunks."""

ByDtype = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Life:
    """How the family's requests are made to run short: ``blocks``: KV blocks that some of 24 requests do not
    get; ``grows``: requests take more blocks as they go on, so some are preempted."""

    blocks: int = 26
    grows: bool = True


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tiny model and what vLLM needs to run it on a CPU."""

    name: str
    save: Callable[[Path], Any]
    args: ByDtype = field(default_factory=dict)
    """Of every engine, by dtype."""
    mended: Callable[[], None] | None = None
    """A patch without which a stock engine does not run it."""
    stock: ByDtype = field(default_factory=dict)
    """What a stock engine needs beside, by dtype."""

    def engine_args(self, dtype: str) -> dict[str, Any]:
        return {"dtype": dtype, **self.args.get(dtype, {})}

    def stock_args(self, dtype: str) -> dict[str, Any]:
        return self.engine_args(dtype) | {"hypic": False, "mended": self.mended, **self.stock.get(dtype, {})}


@dataclass(frozen=True, kw_only=True, eq=False)
class Family(Row):
    """A whole model, its oracle, and what is shown of it.

    Distances are of logprobs of the whole vocabulary.  In float32 a row says how near the engine must come to
    the oracle in float64; in bfloat16 that is measured: about as near as ordinary requests.
    """

    oracle: Callable[[Path], Any]
    bound: float
    ordinary: float | None = None
    """Of ordinary requests and leading segments, if another."""
    rounded: float | None = None
    """Of composed ones from the oracle whose T is rounded to fp16."""
    noise: float = float("inf")
    """What bfloat16 moves logprobs by stays below it."""
    cases: tuple[tuple[str, int], ...]
    """Dtypes and tokens of a step.  The first one is fast where the family represents its kind."""
    fast: bool = False
    """The family represents a code path in ``make test``."""

    planted: Mapping[str, Mapping[str, float]]
    """By dtype: planted faults, and by how many bounds the answer to every prompt must differ from each."""
    others: tuple[type, ...] = ()
    """Changes of the oracle's class that every answer must tell from the truth, by a hundred bounds."""
    seen: Mapping[str, float] = field(default_factory=lambda: {F32: 10})
    """By dtype: the number of bounds by which every planted fault must show in at least one prompt."""
    faults: tuple[str, ...] | None = None
    """Which faults, if not all that the oracle names."""
    context_seen: float | None = None
    """By how many a record's context that counts in positions shows, where it does."""
    islands_seen: float = 20
    """By how many faults of islands show."""
    texts: int = 1
    """Prompts that a distance is averaged over."""
    kl: bool = False
    """In bfloat16 KL divergences count, too."""
    generated: int = 6
    """Tokens behind which an answer is compared."""
    methods: tuple[str, ...] = tuple(METHODS)
    without: Mapping[str, str] = field(default_factory=dict)
    """Parts of the contract that do not apply, and why: link methods, islands, second turn, faults."""
    own: tuple[Callable[[Served], None], ...] = ()
    """What is to be shown of this family alone, in the same engine."""

    compared: Mapping[str, bool] = field(default_factory=dict)
    """Dtypes in which plain requests are compared with a stock engine's, and whether that is fast."""
    prefix: tuple[str, ...] = ()
    """Dtypes in which prefix caches are."""
    life: Life | None = None

    @property
    def joins(self) -> bool:
        """Stretches of its records have to be joined: they have transitions."""
        return any("no_T" in faults for faults in self.planted.values())


@dataclass(frozen=True)
class Case:
    """A family in one dtype, with one limit on the tokens of a step."""

    family: Family
    dtype: str
    chunk: int

    def __str__(self) -> str:
        return f"{self.family.name}-{self.dtype}-{'whole' if self.chunk == WHOLE else self.chunk}"

    @property
    def fast(self) -> bool:
        return self.family.fast and (self.dtype, self.chunk) == self.family.cases[0]

    @property
    def judged(self) -> bool:
        """Held against the oracle in everything: bfloat16 leaves room for that only in averages."""
        return self.dtype == F32 or self.family.texts > 1

    def args(self) -> dict[str, Any]:
        return self.family.engine_args(self.dtype) | {"max_num_batched_tokens": self.chunk}


@dataclass(frozen=True, kw_only=True, eq=False)
class OneLayer(Row):
    """A model whose only linear layer decides the answer: its attention layers, if any, output zero."""

    bounds: Mapping[str, float]
    """By dtype: the largest distance of a composed request from the ordinary request."""
    seen: Mapping[str, float] | None = field(default_factory=lambda: {F32: 6.0, BF16: 6.0})
    """Bounds by which a request without transitions must differ; ``None``: the layer has no transition."""
    seams: tuple[int, ...] = (3, 20)
    """Widths beside the usual one at which composing is exact."""
    compiled: tuple[str, ...] = ()
    """Dtypes in which compiled engines are compared with stock ones."""
    states: str | None = None
    """``mamba_ssm_cache_dtype`` with which vLLM keeps states in bfloat16."""


@dataclass(frozen=True)
class LayerCase:
    layer: OneLayer
    dtype: str

    def __str__(self) -> str:
        return f"{self.layer.name}-{self.dtype}"


def families(kind: dict[str, Any], rows: dict[str, dict[str, Any]]) -> list[Family]:
    """Families of a kind, by name: what each has beside what all have, or instead."""
    return [Family(name=name, **kind | row) for name, row in rows.items()]


def layers(kind: dict[str, Any], rows: dict[str, Any]) -> list[OneLayer]:
    """Models of one layer, by name: how each is saved."""
    return [OneLayer(name=name, save=save, **kind) for name, save in rows.items()]
