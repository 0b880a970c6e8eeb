"""Engine calls: functions that run in an engine's process (see ``engines.py``).

Their first argument is the engine's ``vllm.LLM``. vLLM and torch are imported when they run, never before:
the process that only tells engines what to do loads neither.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.engine import config_of
from ..primitives.options import LinkDefaults

FORCED_TOKENS = "forced_tokens"
"""Extra argument of a request whose answer is given: see :mod:`.forced`."""
FORCING = "vllm_hypic.harness.forced:ForcedTokens"
"""Goes into ``logits_processors`` of an engine that is to take such requests."""


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
    forced: tuple[int, ...] = ()
    """The answer, where its likelihood is asked for; ``max_tokens`` is then its length.  The engine needs
    ``FORCING``."""
    parts: tuple[tuple[int, ...], ...] = ()
    """Not empty: a chat request, of which ``tokens`` is the rendered prompt: its system text, the parts of
    its user's message, and at last the question with all messages behind it."""


@dataclass(frozen=True)
class Answer:
    """What came back, and when: ``token_s[i]`` seconds after the request, output token i was there."""

    tokens: tuple[int, ...]
    token_s: tuple[float, ...]
    logprobs: dict[int, float]
    """The first token's, by id."""
    prompt_tokens: int
    """Tokens as the front end counts them: separators included."""
    cached: int
    """Prompt tokens read from vLLM's prefix cache or from records."""
    forced: tuple[float, ...] = ()
    """Logprobs of the tokens of a forced answer, behind everything before each."""

    @property
    def first_token_s(self) -> float:
        return self.token_s[0]

    @property
    def decode_s(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True)
class Facts:
    """What reports and prompts need to know of a running engine."""

    separator: int
    vocabulary: list[int]
    link_defaults: LinkDefaults | None
    """``None`` in a stock engine."""
    described: dict[str, Any]
    """Settings that a report should name, whether given or chosen by vLLM."""


def start(_: None, arguments: dict[str, Any]) -> Any:
    """Make the engine."""
    from vllm import LLM

    if arguments.get("attention_backend") != "hypic":
        _mend_stock()
        arguments = arguments | _latent_attention(arguments)
    return LLM(**arguments)


def _latent_attention(arguments: dict[str, Any]) -> dict[str, Any]:
    """What stock vLLM must be told of latent attention on CPUs: with AMX it takes kernels that know bfloat16
    alone, whatever the dtype; for the others, and without AMX, it switches the prefix cache off, too late for
    a hybrid."""
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
    """Give stock vLLM what it lacks of some models, as the plugin does: model classes, and on CPUs what keeps
    it from running others.  There would be nothing to compare them with."""
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
    if scheduler_of(llm).has_finished_requests():
        llm.llm_engine.step()  # As a server's engine does: workers are told, and store what is kept.
    return [_answer(last[i], token_s[i], ask) for i, ask in zip(ids, asks, strict=True)]


def decode(llm: Any, answers: Sequence[Sequence[int]]) -> list[str]:
    """Texts of tokens, without special ones."""
    tokenizer = llm.get_tokenizer()
    return [tokenizer.decode(list(tokens), skip_special_tokens=True) for tokens in answers]


def add(llm: Any, ask: Ask) -> str:
    """Give the engine a request; its id."""
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
    """The prompt of a chat request as our renderer makes it."""
    from vllm.inputs import tokens_input

    from ..engine.renderer import CHAT
    from ..primitives.messages import messages_of
    from ..primitives.structure import Chat
    from ..primitives.token_texts import special_ids

    tokenizer = llm.get_tokenizer()

    def read(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    system, *documents, end = ask.parts
    found = messages_of(end, lambda start, stop: read(end[start:stop]), special_ids(tokenizer))
    question, *behind = (read(end[message.start : message.stop]) for message in found)
    content = [{"type": "text", "text": text} for text in [*map(read, documents), question]]
    messages = [{"role": "system", "content": read(system)}, {"role": "user", "content": content}]
    for message, text in zip(found[1:], behind, strict=True):
        messages.append({"role": "assistant" if message.answers else "tool", "content": text})
    return {**tokens_input(list(ask.tokens), prompt=read(ask.tokens)), CHAT: Chat(messages)}


def found_segments(llm: Any, asks: Sequence[Ask]) -> list[tuple[tuple[int, int], ...]]:
    """Where the engine's front end finds the segments of requests that name a mode."""
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


def hypic_calls(llm: Any) -> dict[str, int]:
    """How often each operator of the plugin ran so far."""
    [calls] = llm.collective_rpc("hypic_calls")
    return dict(calls)


def scheduler_of(llm: Any) -> Any:
    """The engine core's scheduler; on a hypic engine its ``.hypic`` is the plugin's ``SchedulerSide``."""
    return llm.llm_engine.engine_core.engine_core.scheduler
