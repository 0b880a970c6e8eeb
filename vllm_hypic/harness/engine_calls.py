"""Functions that run beside an engine, in its process: see ``engines.py``.

Their first argument is the engine's ``vllm.LLM``. vLLM and torch are imported when they run, never before:
the process that only tells engines what to do loads neither.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ask:
    """One request."""

    tokens: list[int]
    max_tokens: int = 1
    logprobs: int | None = 20
    logprobs_of: list[int] | None = None
    """Ids whose logprobs are wanted, instead of the most likely ones'."""
    extra: dict[str, Any] = field(default_factory=dict)
    """``hypic_link``, ``hypic_seam_tokens``."""
    ignore_eos: bool = True
    """Go on to ``max_tokens``, whatever the model says."""
    fresh: bool = False
    """Compute every token, also those that vLLM's prefix cache has; records are read all the same."""


@dataclass(frozen=True)
class Answer:
    """What came back, and when: ``token_s[i]`` seconds after the request, output token i was there."""

    tokens: tuple[int, ...]
    token_s: tuple[float, ...]
    logprobs: dict[int, float]
    """Of the first token."""
    prompt_tokens: int
    """As the front end counts them: separators included."""
    cached: int
    """Prompt tokens read from vLLM's prefix cache or from records."""

    @property
    def first_token_s(self) -> float:
        return self.token_s[0]

    @property
    def decode_s(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True)
class Facts:
    """What a benchmark must know of a running engine."""

    separator: int
    vocabulary: list[int]
    described: dict[str, Any]
    """Settings that a report should name, whether given or chosen by vLLM."""


def start(_: None, arguments: dict[str, Any]) -> Any:
    """Make the engine."""
    from vllm import LLM

    return LLM(**arguments)


def facts(llm: Any) -> Facts:
    import torch

    tokenizer = llm.get_tokenizer()
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    primitives = getattr(tokenizer, "hypic_ids", None)
    rows = llm.model_config.get_vocab_size()
    config = llm.llm_engine.vllm_config
    return Facts(
        -1 if primitives is None else primitives.sep,
        sorted(i for i in tokenizer.get_vocab().values() if i < rows and i not in special),
        {
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "compiled": config.compilation_config.mode.name != "NONE",
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "block_size": config.cache_config.block_size,
            "threads": torch.get_num_threads(),
        },
    )


def generate(llm: Any, asks: Sequence[Ask]) -> list[Answer]:
    """All requests at once; times count from here."""
    begin = time.perf_counter()
    ids = [add(llm, ask) for ask in asks]
    token_s: dict[str, list[float]] = {i: [] for i in ids}
    last: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        now = time.perf_counter() - begin
        for output in outputs:
            times = token_s[output.request_id]
            times += [now] * (len(output.outputs[0].token_ids) - len(times))
            last[output.request_id] = output
    return [_answer(last[i], token_s[i]) for i in ids]


def decode(llm: Any, answers: Sequence[Sequence[int]]) -> list[str]:
    """Texts of tokens, without special ones."""
    tokenizer = llm.get_tokenizer()
    return [tokenizer.decode(list(tokens), skip_special_tokens=True) for tokens in answers]


def add(llm: Any, ask: Ask) -> str:
    """Give the engine a request; its id."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    params = SamplingParams(
        temperature=0,
        max_tokens=ask.max_tokens,
        ignore_eos=ask.ignore_eos,
        skip_reading_prefix_cache=ask.fresh or None,
        logprobs=None if ask.logprobs_of is not None else ask.logprobs,
        logprob_token_ids=ask.logprobs_of,
        extra_args=dict(ask.extra) or None,
    )
    request_id = str(next(llm.request_counter))
    llm.llm_engine.add_request(request_id, tokens_input(prompt_token_ids=list(ask.tokens)), params)
    return request_id


def _answer(output: Any, token_s: Sequence[float]) -> Answer:
    [sample] = output.outputs
    first = sample.logprobs[0] if sample.logprobs else {}
    return Answer(
        tuple(sample.token_ids),
        tuple(token_s),
        {i: entry.logprob for i, entry in first.items()},
        len(output.prompt_token_ids),
        output.num_cached_tokens or 0,
    )


def reset(llm: Any) -> None:
    """Empty vLLM's prefix cache and the public pool."""
    if not llm.reset_prefix_cache(reset_connector=True):
        raise RuntimeError("a cache did not become empty")


def hypic_calls(llm: Any) -> dict[str, int]:
    """How often each operator of the plugin ran so far."""
    [calls] = llm.collective_rpc("hypic_calls")
    return dict(calls)


def scheduler_of(llm: Any) -> Any:
    """The engine core's scheduler; on a hypic engine its ``.hypic`` is the plugin's ``SchedulerSide``."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@dataclass(frozen=True)
class Operator:
    """Time of one operator, without the operators it called, in the requests that were profiled.

    ``inside`` is the nearest custom operator of vLLM's or the plugin's that called it, or empty.
    """

    name: str
    inside: str
    self_s: float
    calls: int


@dataclass(frozen=True)
class Profile:
    """Operators of one request, and how long it took while they were recorded."""

    first_token_s: float
    operators: list[Operator]
    answer: Answer


CUSTOM = ("vllm::", "vllm_hypic::", "_C::")
"""Namespaces of custom operators: what their insides are for can be told by their name."""


def profiled(llm: Any, ask: Ask) -> Profile:
    """One request under torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        [answer] = generate(llm, [ask])
    totals: dict[tuple[str, str], list[float]] = {}
    for event in recorded.events():
        total = totals.setdefault((event.name, _inside(event)), [0.0, 0])
        total[0] += event.self_cpu_time_total / 1e6
        total[1] += 1
    operators = [Operator(name, inside, s, int(n)) for (name, inside), (s, n) in totals.items()]
    return Profile(answer.first_token_s, sorted(operators, key=lambda o: -o.self_s), answer)


def _inside(event: Any) -> str:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(CUSTOM):
            return str(parent.name)
        parent = parent.cpu_parent
    return ""


@dataclass(frozen=True)
class Usage:
    """Memory in use, by the engine's own books: vLLM's block pool and, with the plugin, the directory.

    ``blocks`` are those that requests hold: what is merely kept in the prefix cache counts as free.
    """

    running: int
    """Requests that have produced a token and are not over."""
    blocks: int
    block_bytes: int
    records: int = 0
    pinned: int = 0
    pool_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.pool_bytes


@dataclass(frozen=True)
class Crowd:
    """What concurrent requests held once all of them were generating."""

    usage: Usage
    cached: list[int]
    """Prompt tokens of each request that were read from a cache."""
    prompt_tokens: int
    preemptions: int


def crowd(llm: Any, asks: Sequence[Ask]) -> Crowd:
    """Send all requests at once and look at the memory when all are generating; then end them.

    Raises ``RuntimeError`` when a request ends before the last one starts: the cache holds too few.
    """
    ids = [add(llm, ask) for ask in asks]
    cached: dict[str, int] = {}
    prompt_tokens = preemptions = 0
    while len(cached) < len(ids):
        for output in llm.llm_engine.step():
            if output.finished:
                raise RuntimeError(
                    f"a request ended while only {len(cached)} of {len(ids)} were running: "
                    "the KV cache holds too few at once; raise --kv-gib or lower --requests"
                )
            if output.request_id not in cached:
                cached[output.request_id] = output.num_cached_tokens or 0
                prompt_tokens += len(output.prompt_token_ids)
    usage = usage_of(llm)
    preemptions = sum(r.num_preemptions for r in scheduler_of(llm).requests.values())
    llm.llm_engine.abort_request(ids, internal=False)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return Crowd(usage, [cached[i] for i in ids], prompt_tokens, preemptions)


def usage_of(llm: Any) -> Usage:
    """Memory in use now."""
    scheduler = scheduler_of(llm)
    pool = scheduler.kv_cache_manager.block_pool
    config = scheduler.kv_cache_config
    # All tensors lie in one allocation, whose size each of them names.
    block_bytes = max(t.size for t in config.kv_cache_tensors) // config.num_blocks
    running = sum(r.num_output_tokens > 0 for r in scheduler.running)
    # The null block is nobody's.
    blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    side = getattr(scheduler, "hypic", None)
    if side is None:
        return Usage(running, blocks, block_bytes)
    return Usage(
        running,
        blocks,
        block_bytes,
        records=len(side.directory),
        pinned=side.directory.pinned,
        pool_bytes=side.pool_bytes_used,
    )


@dataclass(frozen=True)
class RecordBytes:
    """Bytes that a record holds of the public pool; ``live_heads``: share of heads with a transition."""

    pages: float
    states: float
    transitions: float
    live_heads: float

    @property
    def total(self) -> float:
        return self.pages + self.states + self.transitions

    @staticmethod
    def mean(records: Sequence[RecordBytes]) -> RecordBytes:
        n = len(records)
        return RecordBytes(
            sum(r.pages for r in records) / n,
            sum(r.states for r in records) / n,
            sum(r.transitions for r in records) / n,
            sum(r.live_heads for r in records) / n,
        )


def records_held(llm: Any) -> list[RecordBytes]:
    """All resident records; none where the model has no linear-attention layers."""
    side = scheduler_of(llm).hypic
    geometry = side.geometry
    if not geometry.record_tiles:
        return []
    return [
        RecordBytes(
            len(entry.pages) * geometry.page_bytes,
            geometry.slot_bytes,
            entry.tiles * geometry.tile_bytes,
            entry.tiles / geometry.record_tiles,
        )
        for entry in side.directory.resident()
    ]
