"""Start-up probe: which rotary embedding does each attention layer really use?

A rope attribute does not mean that a layer uses it, layers share ropes, some rotate other parts.  So
the whole model runs twice on a few tokens, attention outputs zeroed, at positions 0 and at scattered
positions.  With zeroed attention outputs nothing else depends on positions, hence for every layer

* K(p) equals K(0) and no rope was called:  NoPE;
* K(p) is what its rope returned and equals our rotation of the tapped raw K:  linked;
* anything else: refused, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..config import ConfigError
from .ops.span_attention.torch_ops import rotate
from .rope import RopeTap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .attention import HypicAttentionImpl

_TOKENS = 8
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
"""Allowed error of our rotation relative to the largest element: rounding of the dtype."""


@dataclass(frozen=True)
class _Call:
    """One attention call: the K it got and, if a rope ran just before it, that rope's raw and rotated K."""

    key: torch.Tensor
    rope: RopeTap | None
    raw: torch.Tensor | None
    rotated: torch.Tensor | None


class Unsupported(ConfigError):
    """A model that PIC cannot serve: the message says which layer and why."""


def link_ropes(runner: Any, impls: Mapping[str, HypicAttentionImpl]) -> dict[str, RopeTap | None]:
    """The rope of every attention layer (``None``: NoPE).  Raises :class:`Unsupported`."""
    ropes = [m for m in runner.get_model().modules() if isinstance(m, RopeTap)]
    limit = min([runner.max_model_len, *(len(r.cos_sin_cache) for r in ropes if hasattr(r, "cos_sin_cache"))])
    positions = torch.linspace(0, limit - 1, _TOKENS).long()
    at_zero = _observe(runner, impls, ropes, torch.zeros_like(positions))
    scattered = _observe(runner, impls, ropes, positions)
    return {name: _link(name, at_zero.get(name), scattered.get(name), positions) for name in impls}


def _observe(
    runner: Any, impls: Mapping[str, HypicAttentionImpl], ropes: list[RopeTap], positions: torch.Tensor
) -> dict[str, _Call]:
    """Run the model once and record what reached each attention layer."""
    from vllm.forward_context import set_forward_context

    rope_calls: list[tuple[RopeTap, torch.Tensor, torch.Tensor]] = []
    found: dict[str, _Call] = {}
    taps = {name: _LayerTap(name, rope_calls, found) for name in impls}
    for rope in ropes:
        rope.hypic_probe = rope_calls
    for name, impl in impls.items():
        impl.hypic_probe = taps[name]
    try:
        vocabulary = runner.model_config.get_vocab_size()
        input_ids = torch.arange(_TOKENS, device=runner.device) % vocabulary
        positions = positions.to(runner.device)
        if runner.uses_mrope:
            positions = positions.expand(3, -1).contiguous()
        with torch.inference_mode(), set_forward_context(None, runner.vllm_config, num_tokens=_TOKENS):
            runner.get_model()(input_ids=input_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
    finally:
        for tapped in [*ropes, *impls.values()]:
            tapped.hypic_probe = None
    return found


class _LayerTap(list):  # type: ignore[type-arg]
    """Receives the K of one attention layer and pairs it with the rope call before it."""

    def __init__(self, name: str, rope_calls: list[Any], found: dict[str, _Call]) -> None:
        super().__init__()
        self.name, self.rope_calls, self.found = name, rope_calls, found

    def append(self, key: torch.Tensor) -> None:
        rope, raw, rotated = self.rope_calls[-1] if self.rope_calls else (None, None, None)
        self.rope_calls.clear()
        self.found[self.name] = _Call(key, rope, raw, rotated)


def _link(name: str, zero: _Call | None, moved: _Call | None, positions: torch.Tensor) -> RopeTap | None:
    if zero is None or moved is None:
        raise Unsupported(f"hypic: layer {name} was not reached by the start-up probe, its rotary embedding is unknown")
    shape = moved.key.shape
    if torch.equal(zero.key, moved.key):
        if moved.rope is not None and moved.rotated is not None and torch.equal(moved.rotated.view(shape), moved.key):
            return None if moved.raw is not None and torch.equal(moved.raw.view(shape), moved.key) else _refuse_still(name)
        return None
    rope, raw, rotated = moved.rope, moved.raw, moved.rotated
    if rope is None or raw is None or rotated is None:
        raise Unsupported(f"hypic: layer {name} rotates K by a rotary embedding that the plugin cannot tap")
    if not torch.equal(rotated.view(shape), moved.key):
        raise Unsupported(f"hypic: layer {name} changes K after {type(rope).__name__}; its K cannot be stored unrotated")
    assert zero.raw is not None
    if not torch.equal(zero.raw, raw):
        raise Unsupported(f"hypic: layer {name}: K depends on positions before {type(rope).__name__} rotates it")
    table: torch.Tensor = rope.cos_sin_cache  # type: ignore[attr-defined]
    ours = rotate(raw.view(shape), table.index_select(0, positions.to(table.device)), bool(getattr(rope, "is_neox_style", True)))
    error = (ours.float() - moved.key.float()).abs().max() / moved.key.float().abs().max().clamp_min(1e-6)
    if not error <= _TOLERANCE[moved.key.dtype]:
        raise Unsupported(
            f"hypic: layer {name}: {type(rope).__name__} is not the plain rotation of its table (error {float(error):.1e})"
        )
    return rope


def _refuse_still(name: str) -> None:
    raise Unsupported(f"hypic: layer {name}: its rotary embedding changes K but ignores positions")
