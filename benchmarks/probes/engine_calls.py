"""Engine calls that observe: functions that run in an engine's process (see ``harness/engines.py``).

They only read.  What a layer computes is seen through PyTorch's own forward hooks, which stay for one
request; recurrent states are read where vLLM keeps them, reused K and V in the public pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_hypic.harness import engine_calls
from vllm_hypic.harness.engine_calls import Ask

if TYPE_CHECKING:
    from vllm_hypic.pool.plans import StreamPlan


@dataclass(frozen=True)
class Layers:
    """Names of a model's layers, in order."""

    linear: tuple[str, ...]
    attention: tuple[str, ...]


@dataclass(frozen=True)
class AttentionObservation:
    """One full-attention layer after a prompt; positions are those of the whole prompt, in order.

    ``key`` (its rotation undone) and ``value [positions, kv_heads * head_size]`` as the tokens that follow
    find them, float32, reused ones among them; ``weights [positions]``: how much of its attention the
    question gives to each, mean over its rows and heads.
    """

    key: np.ndarray
    value: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Observation:
    """What a request left.  By layer, in order."""

    logprobs: dict[int, float]
    """The first token's, by id."""
    cached: int
    """Prompt tokens that came from records."""
    computed: int
    states: list[np.ndarray]
    """Recurrent states ``[heads, K, V]`` float32 after the prompt."""
    hidden: list[np.ndarray]
    """What the last token of the prompt carries on from each decoder layer, float32."""
    attention: list[AttentionObservation] = field(default_factory=list)


def layers(llm: Any) -> Layers:
    """The layers that take part in reuse."""
    geometry = engine_calls.scheduler_of(llm).hypic.geometry
    return Layers(
        tuple(sorted((g.layer for g in geometry.linear), key=_index)),
        tuple(sorted((a.layer for a in geometry.attention), key=_index)),
    )


def _index(name: str) -> int:
    """``model.layers.12.linear_attn`` is layer 12."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def observe(llm: Any, ask: Ask, question: int, kv: bool) -> Observation:
    """Answer one request, whose records must be resident, and look at what it left.

    ``question``: tokens at the end of the prompt; ``kv``: look at full attention, too.  Raises
    ``RuntimeError`` where not every layer could be seen.
    """
    names, static = layers(llm), llm.llm_engine.vllm_config.compilation_config.static_forward_context
    with _tapped(llm, names, kv) as taps, answered(llm, ask) as live:
        computed = len(live.stream)
        if not taps.rows or any(rows != computed for rows in taps.rows.values()):
            raise RuntimeError(
                f"layers compute {sorted(set(taps.rows.values()))} tokens, the request has "
                f"{computed}: a compiled model cannot be observed (set enforce_eager)"
            )
        return Observation(
            live.logprobs,
            live.prompt - computed,
            computed,
            [live.state(name) for name in names.linear],
            list(taps.hidden.values()),
            [_attention(static[n], taps.attention[n], live, question) for n in names.attention if kv],
        )


@dataclass(frozen=True)
class Live:
    """A request that has its first token and is not over: its state and its records are in place."""

    llm: Any
    internal: str
    logprobs: dict[int, float]
    """The first token's, by id."""
    prompt: int
    """Tokens without separators."""
    stream: np.ndarray
    """Positions of the computed ones."""
    plan: StreamPlan | None
    """``None``: an ordinary request."""

    def state(self, layer: str) -> np.ndarray:
        """Recurrent state ``[heads, K, V]`` float32 of a linear layer after the prompt."""
        scheduler = engine_calls.scheduler_of(self.llm)
        static = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        blocks = scheduler.kv_cache_manager.get_block_ids(self.internal)
        groups = scheduler.kv_cache_config.kv_cache_groups
        [ids] = [ids for g, ids in zip(groups, blocks, strict=True) if layer in g.layer_names]
        state = static[layer].kv_cache[1][ids[-1]]
        # The CPU operators keep [heads, K, V] in a buffer labelled [heads, V, K].
        found: np.ndarray = state.view(state.size(0), state.size(2), state.size(1)).float().numpy().copy()
        return found


@contextmanager
def answered(llm: Any, ask: Ask) -> Iterator[Live]:
    """``ask`` at its first token, alone in the engine; ends it afterwards."""
    request_id = engine_calls.add(llm, replace(ask, max_tokens=2, ignore_eos=True))
    try:
        output = _first_token(llm)
        scheduler = engine_calls.scheduler_of(llm)
        if len(scheduler.requests) != 1:
            raise RuntimeError(f"{len(scheduler.requests)} requests are running: expected exactly 1")
        (internal,) = scheduler.requests
        plan = scheduler.hypic.views.stream_plan(internal)
        ids = llm.get_tokenizer().hypic_ids
        prompt = sum(t not in (ids.sep, ids.pdep, ids.pad) for t in ask.tokens)
        yield Live(
            llm,
            internal,
            {i: entry.logprob for i, entry in output.outputs[0].logprobs[0].items()},
            prompt,
            np.arange(prompt) if plan is None else plan.positions,
            plan,
        )
    finally:
        llm.llm_engine.abort_request([request_id], internal=False)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()


def _first_token(llm: Any) -> Any:
    while True:
        for output in llm.llm_engine.step():
            if output.outputs[0].token_ids:
                return output


@dataclass
class _Taps:
    """What the layers of one request were seen to do, chunk by chunk."""

    hidden: dict[str, np.ndarray] = field(default_factory=dict)
    """Last token of the latest chunk, by decoder layer."""
    rows: dict[str, int] = field(default_factory=dict)
    """Tokens so far, by decoder layer."""
    attention: dict[str, list[tuple[Any, Any, Any]]] = field(default_factory=dict)
    """Query, key and value of each chunk, the first two rotated, by full-attention layer."""


@contextmanager
def _tapped(llm: Any, names: Layers, kv: bool) -> Iterator[_Taps]:
    """Hooks on all decoder layers and, with ``kv``, on full attention; gone afterwards."""
    import torch

    static = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    taps, handles = _Taps(), []

    def after_decoder(name: str) -> Any:
        def hook(module: Any, args: Any, result: Any) -> None:
            parts = result if isinstance(result, tuple) else (result,)  # (hidden, residual)
            taps.hidden[name] = sum(p[-1].float() for p in parts if p is not None).numpy().copy()
            taps.rows[name] = taps.rows.get(name, 0) + len(parts[0])

        return hook

    def before_attention(name: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            taps.attention.setdefault(name, []).append(
                tuple(x.to(torch.float32, copy=True) for x in args[:3])
            )

        return hook

    ours = {id(static[name]) for name in (*names.linear, *names.attention)}
    [model] = llm.collective_rpc("get_model")  # itself: the engine core runs in this process
    for name, module in model.named_modules():
        decoder = name.rpartition(".")[2].isdigit() and any(id(m) in ours for m in module.modules())
        if decoder:
            handles.append(module.register_forward_hook(after_decoder(name)))
    for name in names.attention if kv else ():
        handles.append(static[name].register_forward_pre_hook(before_attention(name)))
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def _attention(
    layer: Any, chunks: list[tuple[Any, Any, Any]], live: Live, question: int
) -> AttentionObservation:
    """Put computed and reused K and V in the order of the prompt, and attend to them from the question."""
    import torch

    from vllm_hypic.backends.ops.span_attention.eager import rotate, unrotate

    link, size = layer.impl.link, layer.head_size
    query, key, value = (torch.cat(parts).unflatten(-1, (-1, size)) for parts in zip(*chunks, strict=True))
    positions, table = torch.from_numpy(live.stream), link.table()
    raw = unrotate(key, table, positions, link.neox)
    if (plan := live.plan) is not None:
        slots = torch.from_numpy(plan.slot_mapping)
        raw = torch.cat([raw, link.public.key[slots].float()])
        value = torch.cat([value, link.public.value[slots].float()])
        positions = torch.cat([positions, torch.from_numpy(plan.kv_positions)])
    order = positions.argsort()
    if not torch.equal(positions[order], torch.arange(live.prompt)):
        raise RuntimeError("reused and computed tokens do not make up the prompt")
    raw, value = raw[order], value[order]
    rotated = rotate(raw, None if table is None else table[: len(raw)], link.neox)
    weights = _weights(query[-question:], rotated, layer.impl.scale)
    return AttentionObservation(raw.flatten(1).numpy(), value.flatten(1).numpy(), weights.numpy())


def _weights(query: Any, key: Any, scale: float) -> Any:
    """Mean attention weight ``[keys]`` that the last rows give to each of all keys, causally."""
    import torch

    rows, heads, _ = query.shape
    key = key.repeat_interleave(heads // key.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    ahead = torch.ones(rows, len(key), dtype=torch.bool).triu(len(key) - rows + 1)
    return scores.masked_fill(ahead, float("-inf")).softmax(-1).mean((0, 1))
