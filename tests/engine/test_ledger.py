"""Counters and the log line of vLLM, which operators read, agree with ``usage``, which clients read."""

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lib.oracle.models import random_segments

from .conftest import EngineFactory
from .engines import Ask, Engine, drain, outputs_of, prompt
from .test_exactness import ranged
from .test_other_connectors import saving_args
from .test_store import MEMORY, drop_memory, empty_pool, on_disk, stored

ONE, TWO, THREE, FOUR, FIVE = random_segments([400, 260, 150, 120, 170], vocab=480, seed=71)
QUERY, PLAIN, SHORT = random_segments([300, 900, 40], vocab=480, seed=72)
BLOCK = 128
SEAMS = 2 * 8
"""Tokens of a document that no record has."""


@dataclass(frozen=True)
class Row:
    """Requests, and what is expected of them; numbers are tokens."""

    asks: tuple[Ask, ...]
    cached: dict[str, int] = field(default_factory=dict)
    """What caches have of the prompts, by vLLM's names of sources."""
    asked: int = 0
    """Tokens of prompts that records, or another connector, are asked for."""
    local: int = 0
    """Tokens that vLLM's own prefix cache has, so that no other cache is asked for them."""
    unlooked: int = 0
    """Tokens of prompts that vLLM's own prefix cache is not asked for."""
    elsewhere: int = 0
    """Tokens that another connector has."""
    created: int | None = None
    first: Callable[[Any], None] | None = None
    """Done before anything is counted."""
    at_once: bool = False


def composed(*documents: list[int], query: list[int] = QUERY, **more: Any) -> Ask:
    return Ask(prompt(*documents, query=query), **more)


def records(*documents: list[int]) -> int:
    return sum(len(document) - SEAMS for document in documents)


def usage(llm: Any, row: Row) -> Counter[str]:
    """What the server says of a row's answers, in all."""
    found: Counter[str] = Counter()
    for asks in [row.asks] if row.at_once else [(one,) for one in row.asks]:
        for output in outputs_of(llm, *asks):
            found["prompt"] += len(output.prompt_token_ids)
            found["cached"] += output.num_cached_tokens or 0
            found["created"] += output.num_cache_creation_tokens or 0
            found["completion"] += sum(len(sample.token_ids) for sample in output.outputs)
    return found


def counters(llm: Any) -> Counter[str]:
    """Counters, and sums of histograms, by name and source."""
    found: Counter[str] = Counter()
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if "source" in metric.labels:
            name += f" {metric.labels['source']}"
        found[name] += int(getattr(metric, "value", 0) or getattr(metric, "sum", 0))
    return found


def log_line(llm: Any) -> str:
    """What vLLM's log says now."""
    lines: list[str] = []
    logger, handler = logging.getLogger("vllm.v1.metrics.loggers"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        llm.llm_engine.do_log_stats()
    finally:
        logger.removeHandler(handler)
    return next(line for line in lines if "throughput" in line)


def rate(line: str, name: str) -> str | None:
    found = re.search(rf"(?:^|, ){name} hit rate: ([\d.]+)%", line)
    return found and found[1]


def ledger(llm: Any, row: Row) -> tuple[Counter[str], dict[str, int], Counter[str], str]:
    """Returns the usage of a row's answers, each counter's rise, the counters' values and the log line."""
    if row.first is not None:
        row.first(llm)
    drain(llm)
    before, found = counters(llm), usage(llm, row)
    drain(llm)
    after = counters(llm)
    return found, dict(after - before), after, log_line(llm)


def check(engine: Engine, name: str, row: Row) -> None:
    told, rose, values, line = engine.call(ledger, row)
    cached = sum(row.cached.values())
    external = rose.get("prompt_tokens_by_source external_kv_transfer", 0)
    wanted = {
        "prompt_tokens": told["prompt"],
        "prompt_tokens_cached": told["cached"],
        "prompt_tokens_by_source local_compute": told["prompt"] - told["cached"],
        "prompt_tokens_by_source local_cache_hit": cached - external,
        "generation_tokens": told["completion"],
        "iteration_tokens_total": told["prompt"] - told["cached"] + told["completion"],
        "request_prompt_tokens": told["prompt"],
        "request_prefill_kv_computed_tokens": told["prompt"] - told["cached"],
        "request_generation_tokens": told["completion"],
        "prefix_cache_queries": told["prompt"] - row.unlooked,
        "prefix_cache_hits": cached - external,
        "external_prefix_cache_queries": row.asked - row.local,
        "external_prefix_cache_hits": external,
        "hypic_tokens_reused": external - row.elsewhere,
        **{f"prompt_tokens_cached_by_source {source}": row.cached.get(source, 0) for source in SOURCES},
    }
    assert {counter: rose.get(counter, 0) for counter in wanted} == wanted, name
    assert told["cached"] == cached and told["prompt"] == sent(*row.asks)
    assert told["created"] <= told["prompt"] - told["cached"]
    assert row.created is None or told["created"] == row.created
    # The log's rate begins anew where vLLM's cache was emptied.
    local, total = rose if row.first is empty_pool or row.first is drop_memory else values, values
    for title, counter, of in (("Prefix", "", local), ("External prefix", "external_", total)):
        queries, hits = (of.get(f"{counter}prefix_cache_{what}", 0) for what in ("queries", "hits"))
        assert rate(line, f"{title} cache") == (f"{100 * hits / queries:.1f}" if queries else None), line


def sent(*asks: Ask) -> int:
    return sum(len(ask.tokens) for ask in asks)


def unlooked(ask: Ask) -> dict[str, int]:
    """Records are asked for all tokens, vLLM's own prefix cache for none."""
    return {"asked": sent(ask), "unlooked": sent(ask)}


SOURCES = ("device", "host", "disk", "p2p", "external_unspecified")
ASK = Ask(tuple(PLAIN))
FIRST, AGAIN = composed(ONE, TWO), composed(TWO, ONE, THREE, query=SHORT)
NAMED, WARM_UP = ranged(ONE, TWO, lead=(), query=SHORT), composed(ONE, FOUR, query=[])
FULL = composed(ONE, TWO, extra={"hypic_link": "full"})
LOGPROBS = composed(TWO, query=SHORT, sampling={"prompt_logprobs": 1})
MANY = (composed(FIVE, query=SHORT), composed(FIVE, ONE, query=SHORT), Ask(tuple(QUERY)))
STREAM = 2 * BLOCK
"""Of the stream of ``FIRST``, what vLLM's cache keeps."""
BOTH = records(ONE, TWO)

PLAIN_AND_COMPOSED = {
    "plain": Row((ASK,), created=7 * BLOCK),
    "plain, cached": Row((ASK,), {"device": 7 * BLOCK}, created=0),
    "cold": Row((FIRST,), asked=sent(FIRST), created=BOTH + STREAM),
    "warm": Row((FIRST,), {"device": BOTH + STREAM}, asked=sent(FIRST), local=STREAM, created=0),
    "partly warm": Row((AGAIN,), {"device": BOTH}, asked=sent(AGAIN), created=records(THREE)),
    "named by their places": Row((NAMED,), {"device": BOTH}, asked=sent(NAMED)),
    "computed in full": Row((FULL,)),
    "with prompt logprobs": Row((LOGPROBS,), {"device": records(TWO)}, **unlooked(LOGPROBS)),
    "warm-up": Row((WARM_UP,), {"device": records(ONE)}, **unlooked(WARM_UP), created=records(FOUR)),
    "several at once": Row(MANY, {"device": records(FIVE, ONE)}, asked=sent(*MANY[:2]), at_once=True),
}
TIERS = {
    "cold": Row((FIRST,), asked=sent(FIRST)),
    "warm": Row((FIRST,), {"device": BOTH + STREAM}, asked=sent(FIRST), local=STREAM),
    "from memory": Row((FIRST,), {"host": BOTH}, asked=sent(FIRST), first=empty_pool),
    "from disk": Row((FIRST,), {"disk": BOTH}, asked=sent(FIRST), first=drop_memory),
    "at once, from disk": Row(
        (FIRST, AGAIN), {"disk": 2 * BOTH}, asked=sent(FIRST, AGAIN), first=drop_memory, at_once=True
    ),
}
PAGE = 32
LONGER = Ask((*PLAIN, *QUERY))
BEGINS_SO = composed([*ONE[:300], *SHORT], query=SHORT)
PREFIXES = {
    "a prefix": Row((ASK,), asked=sent(ASK)),
    "again": Row((ASK,), {"device": len(PLAIN) - 1 - (len(PLAIN) - 1) % PAGE}, asked=sent(ASK)),
    "longer": Row((LONGER,), {"device": len(PLAIN) - len(PLAIN) % PAGE}, asked=sent(LONGER)),
    "cold": Row((FIRST,), asked=sent(FIRST)),
    "from a checkpoint": Row((BEGINS_SO,), {"device": 288}, asked=sent(BEGINS_SO)),
}
BESIDE = {
    "saved": Row((ASK,), **unlooked(ASK)),
    "loaded": Row((ASK,), {"external_unspecified": 896}, **unlooked(ASK), elsewhere=896),
    "cold": Row((FIRST,), **unlooked(FIRST)),
    "warm": Row((FIRST,), {"device": BOTH}, **unlooked(FIRST)),
    "computed in full": Row((FULL,), **unlooked(FULL)),
}
SPARSE = {"prefix": "sparse", "page_tokens": PAGE, "checkpoint_tokens": PAGE}
CASES: dict[str, tuple[str, dict[str, Row], Callable[[Path], dict[str, Any]]]] = {
    "attention": ("attention_model", PLAIN_AND_COMPOSED, lambda path: {}),
    "tiers": ("hybrid_model", TIERS, lambda path: {"options": stored(MEMORY, on_disk(path))}),
    "prefixes": ("hybrid_model", PREFIXES, lambda path: {"options": SPARSE}),
    "beside": ("attention_model", BESIDE, saving_args),
}


@pytest.mark.parametrize("case", CASES)
def test_counters_and_log_agree_with_usage(
    case: str, start_engine: EngineFactory, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model, rows, args = CASES[case]
    engine = start_engine(request.getfixturevalue(model), disable_log_stats=False, **args(tmp_path))
    for name, row in rows.items():
        check(engine, name, row)
