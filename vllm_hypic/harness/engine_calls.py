"""Engine calls: functions that run in an engine's process (see ``engines.py``).

The first argument is the engine's ``vllm.LLM``. The functions import vLLM and torch when they run, never
before: the process that controls the engines loads neither.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.engine import config_of
from ..primitives.options import LinkDefaults

FORCED_TOKENS = "forced_tokens"
"""Name of the extra argument that gives a request's answer: see :mod:`.forced`."""
FORCING = "vllm_hypic.harness.forced:ForcedTokens"
"""Entry for ``logits_processors`` of an engine that takes requests with given answers."""


@dataclass(frozen=True)
class Ask:
    """A request to an engine."""

    tokens: list[int]
    max_tokens: int = 1
    logprobs: int | None = 20
    logprobs_of: list[int] | None = None
    """Token ids whose logprobs are returned, instead of the most likely tokens'."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Extra arguments, such as ``hypic_link`` and ``hypic_seam_tokens``."""
    ignore_eos: bool = True
    """Whether to generate up to ``max_tokens`` even behind an end-of-sequence token."""
    fresh: bool = False
    """Whether to compute every token, also cached tokens of vLLM's prefix cache; records are read anyway."""
    forced: tuple[int, ...] = ()
    """Given answer whose likelihood is measured; its length replaces ``max_tokens``.  The engine needs
    ``FORCING``."""
    parts: tuple[tuple[int, ...], ...] = ()
    """Parts of a chat request: the system text, the parts of the user's message, and at last the question
    with all messages behind it.  ``tokens`` is the rendered prompt.  Empty for a completion request."""


@dataclass(frozen=True)
class Answer:
    """An engine's answer; output token i came ``token_s[i]`` seconds after the request."""

    tokens: tuple[int, ...]
    token_s: tuple[float, ...]
    logprobs: dict[int, float]
    """Logprobs at the first token, by token id."""
    prompt_tokens: int
    """Tokens of the prompt as the front end counts them, separators included."""
    cached: int
    """Prompt tokens read from vLLM's prefix cache or from records."""
    forced: tuple[float, ...] = ()
    """Logprobs of a forced answer's tokens, each behind all tokens before it."""

    @property
    def first_token_s(self) -> float:
        return self.token_s[0]

    @property
    def decode_s(self) -> list[float]:
        """Return the seconds between output tokens."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True)
class Facts:
    """Facts about a running engine for reports and prompts."""

    separator: int
    vocabulary: list[int]
    link_defaults: LinkDefaults | None
    """Link options that requests have by default; ``None`` in a stock engine."""
    described: dict[str, Any]
    """Settings that a report should name, whether given or chosen by vLLM."""


def start(_: None, arguments: dict[str, Any]) -> Any:
    """Make and return the engine."""
    from vllm import LLM

    if arguments.get("attention_backend") != "hypic":
        _mend_stock()
        arguments = arguments | _latent_attention(arguments)
    return LLM(**arguments)


def _latent_attention(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that stock vLLM needs for latent attention on CPUs.  With AMX vLLM takes kernels that
    know only bfloat16, whatever the dtype.  For other kernels, and without AMX, vLLM turns the prefix cache
    off, but too late for a hybrid."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    model = EngineArgs(**arguments).create_model_config()
    if not model.use_mla or (model.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()):
        return {}
    return {"attention_backend": "CPU_MLA", "enable_prefix_caching": False}


def _mend_stock() -> None:
    """Give stock vLLM the model classes and, on CPUs, the fixes that the plugin applies for some models.
    Otherwise stock vLLM could not run these models for comparison."""
    from vllm.platforms import current_platform

    from .. import models
    from ..patches import (
        cpu_bailing_recurrence,
        cpu_kimi_recurrence,
        cpu_mamba1,
        cpu_mamba2_checkpoints,
        cpu_olmo_recurrence,
        cpu_one_token_conv,
        cpu_rope_heads,
    )

    models.register()
    if current_platform.is_cpu():
        recurrences = cpu_bailing_recurrence, cpu_kimi_recurrence, cpu_mamba1, cpu_olmo_recurrence
        for patch in (*recurrences, cpu_mamba2_checkpoints, cpu_one_token_conv, cpu_rope_heads):
            patch.apply()


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
        None if primitives is None else config_of(config).link_defaults,
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
    """Run all requests at once and return their answers; times count from the call."""
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
    if scheduler_of(llm).has_finished_requests():
        llm.llm_engine.step()  # Like a server's engine: workers hear of the end, and store records.
    return [_answer(last[i], token_s[i], ask) for i, ask in zip(ids, asks, strict=True)]


def decode(llm: Any, answers: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of tokens, without special tokens."""
    tokenizer = llm.get_tokenizer()
    return [tokenizer.decode(list(tokens), skip_special_tokens=True) for tokens in answers]


def add(llm: Any, ask: Ask) -> str:
    """Give the engine a request, and return the request's id."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    extra = dict(ask.extra)
    if ask.forced:
        extra[FORCED_TOKENS] = list(ask.forced)
    params = SamplingParams(
        temperature=0,
        max_tokens=len(ask.forced) or ask.max_tokens,
        ignore_eos=ask.ignore_eos or bool(ask.forced),
        skip_reading_prefix_cache=ask.fresh or None,
        logprobs=None if ask.logprobs_of is not None else ask.logprobs,
        logprob_token_ids=ask.logprobs_of,
        extra_args=extra or None,
    )
    request_id = str(next(llm.request_counter))
    prompt = tokens_input(prompt_token_ids=list(ask.tokens)) if not ask.parts else _chat(llm, ask)
    llm.llm_engine.add_request(request_id, prompt, params)
    return request_id


def _chat(llm: Any, ask: Ask) -> Any:
    """Return the prompt of a chat request in the form of the plugin's renderer."""
    from vllm.inputs import tokens_input

    from ..engine.renderer import CHAT
    from ..primitives.messages import messages_of
    from ..primitives.structure import Chat
    from ..primitives.token_texts import special_tokens

    tokenizer = llm.get_tokenizer()

    def read(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    system, *documents, end = ask.parts
    found = messages_of(end, lambda start, stop: read(end[start:stop]), special_tokens(tokenizer))
    question, *behind = (read(end[message.start : message.stop]) for message in found)
    content = [{"type": "text", "text": text} for text in [*map(read, documents), question]]
    messages = [{"role": "system", "content": read(system)}, {"role": "user", "content": content}]
    for message, text in zip(found[1:], behind, strict=True):
        messages.append({"role": "assistant" if message.answers else "tool", "content": text})
    return {**tokens_input(list(ask.tokens), prompt=read(ask.tokens)), CHAT: Chat(messages)}


def found_segments(llm: Any, asks: Sequence[Ask]) -> list[tuple[tuple[int, int], ...]]:
    """Return the spans of the segments that the engine's front end finds in requests that name a mode."""
    from ..engine.segments import SegmentFinder
    from ..primitives.options import SEGMENT

    finder = SegmentFinder(llm.llm_engine.vllm_config)
    return [
        finder.found(ask.tokens, ask.extra[SEGMENT], _chat(llm, ask) if ask.parts else None).spans
        for ask in asks
    ]


def _answer(output: Any, token_s: Sequence[float], ask: Ask) -> Answer:
    [sample] = output.outputs
    first = sample.logprobs[0] if sample.logprobs else {}
    forced: tuple[float, ...] = ()
    if ask.forced:
        if tuple(sample.token_ids) != ask.forced:
            raise RuntimeError("the engine did not give the forced answer: it was started without FORCING")
        forced = tuple(at[t].logprob for t, at in zip(ask.forced, sample.logprobs, strict=True))
    return Answer(
        tuple(sample.token_ids),
        tuple(token_s),
        {i: entry.logprob for i, entry in first.items()},
        len(output.prompt_token_ids),
        output.num_cached_tokens or 0,
        forced,
    )


def reset(llm: Any) -> None:
    """Empty vLLM's prefix cache and the public pool."""
    if not llm.reset_prefix_cache(reset_connector=True):
        raise RuntimeError("a cache did not become empty")


def forget_streams(llm: Any) -> None:
    """Empty vLLM's prefix cache, which holds the last request's stream; records stay."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM's prefix cache did not become empty")


def scheduler_of(llm: Any) -> Any:
    """Return the engine core's scheduler; in a hypic engine ``.hypic`` is the ``SchedulerConnector``."""
    return llm.llm_engine.engine_core.engine_core.scheduler
