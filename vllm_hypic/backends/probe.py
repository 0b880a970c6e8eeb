"""Start-up probe: which rotary embedding does each attention layer really use?

A layer may have a rope attribute without using it, share a rope, or rotate other parts.  So the whole
model runs on a few tokens, twice at positions 0 and once at scattered positions.  The probe zeroes attention
outputs, so nothing but rotations depends on positions.  Two equal runs may differ, for instance by the
atomics of some MoE kernels; "equals" between runs allows a difference of that size.  For every layer:

* K(p) equals K(0): the layer is NoPE;
* K(p) is its rope's output, and our rotation and its inverse map the rope's input to K(p) and back: the probe
  links the rope;
* in any other case, the layer is refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ConfigError
from .ops.span_attention.eager import rotate, unrotate
from .rope import RopeTap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .attention.base import LinkedAttention

PROBE_TOKENS = 8
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
"""Largest error of our rotation and its inverse, relative to the largest element: the dtype's rounding."""

_NOISE = 4
"""Largest difference of two equal runs, in units of the tolerance.  A rotation by scattered positions changes
K by about the size of K."""
_SPREAD = 4
"""Largest difference between a run and an equal run, in units of the difference of two other equal runs."""


@dataclass(frozen=True)
class _Call:
    """One attention call: its K and, if a rope ran just before the call, that rope's raw and rotated K."""

    key: torch.Tensor
    rope: RopeTap | None
    raw: torch.Tensor | None
    rotated: torch.Tensor | None


class Unsupported(ConfigError):
    """The error for a model that PIC cannot serve; its message names the layer and the reason."""


def link_ropes(
    runner: Any, impls: Mapping[str, LinkedAttention[Any]], readers: Mapping[str, LinkedAttention[Any]]
) -> dict[str, RopeTap | None]:
    """Return the rope of every attention layer of ``impls`` (``None``: NoPE).  Raises :class:`Unsupported`.

    ``readers``: the layers that read other layers' caches, and whose own K no rope rotates.
    """
    ropes = [m for model in _models(runner) for m in model.modules() if isinstance(m, RopeTap)]
    limit = min([runner.max_model_len, *(len(r.cos_sin_cache) for r in ropes if hasattr(r, "cos_sin_cache"))])
    positions = torch.linspace(0, limit - 1, PROBE_TOKENS).long()
    watched = {**impls, **readers}
    nowhere = torch.zeros_like(positions)
    zero, again, moved = (_observe(runner, watched, ropes, at) for at in (nowhere, nowhere, positions))
    return {name: _link(name, zero.get(name), again.get(name), moved.get(name), positions) for name in impls}


def _observe(
    runner: Any, impls: Mapping[str, LinkedAttention[Any]], ropes: list[RopeTap], positions: torch.Tensor
) -> dict[str, _Call]:
    """Run the model once and return the attention call of each layer that received K."""
    observer = _Observer()
    for rope in ropes:
        rope.hypic_probe = observer.rope
    layers = runner.compilation_config.static_forward_context
    ends = [impl.watch(layers[name], partial(observer.attention, name)) for name, impl in impls.items()]
    try:
        run_model(runner, positions, skip_compiled=True)  # compiled graphs do not call the probe
    finally:
        for rope in ropes:
            rope.hypic_probe = None
        for end in ends:
            end()
    return observer.calls


def _models(runner: Any) -> list[torch.nn.Module]:
    """Return the loaded model, and the draft model if there is one."""
    drafting = getattr(getattr(runner, "drafter", None), "model", None)
    return [runner.get_model(), *([] if drafting is None else [drafting])]


def run_model(runner: Any, positions: torch.Tensor, *, skip_compiled: bool) -> None:
    """Run the loaded models on :data:`PROBE_TOKENS` tokens at ``positions [PROBE_TOKENS]``, without attention
    metadata: the models neither read nor write caches and states."""
    from vllm.forward_context import set_forward_context

    input_ids = torch.arange(PROBE_TOKENS, device=runner.device) % runner.model_config.get_vocab_size()
    positions = positions.to(runner.device)
    if runner.uses_mrope:
        positions = positions.expand(3, -1).contiguous()
    context = set_forward_context(
        None, runner.vllm_config, num_tokens=PROBE_TOKENS, skip_compiled=skip_compiled
    )
    # An engine with LoRA adapters needs an adapter mapping for each pass: no probe token has an adapter.
    no_adapters = runner.maybe_select_dummy_loras(runner.lora_config, np.array([PROBE_TOKENS]))
    with torch.inference_mode(), context, no_adapters:
        runner.get_model()(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=_from_stage_before(runner),
            inputs_embeds=None,
        )
        for drafting in _models(runner)[1:]:
            more = {}
            if runner.drafter.pass_hidden_states_to_model:
                more["hidden_states"] = runner.drafter.hidden_states[:PROBE_TOKENS]
            drafting(input_ids=input_ids, positions=positions, inputs_embeds=None, **more)


def _from_stage_before(runner: Any) -> Any:
    """Return the inputs of a pipeline stage without embeddings; ``None`` for the first stage.

    Rows differ from each other; every rank and every call gets the same values."""
    from vllm.distributed import get_pp_group

    if get_pp_group().is_first_rank:
        return None
    tensors = runner.get_model().make_empty_intermediate_tensors(
        batch_size=PROBE_TOKENS, dtype=runner.model_config.dtype, device=runner.device
    )
    rng = torch.Generator().manual_seed(0)
    for tensor in tensors.tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=rng))
    return tensors


class _Observer:
    """A recorder that pairs the K of each attention layer with the rope call just before that layer."""

    def __init__(self) -> None:
        self.calls: dict[str, _Call] = {}
        self._last: tuple[RopeTap, torch.Tensor, torch.Tensor] | None = None

    def rope(self, rope: RopeTap, raw: torch.Tensor, rotated: torch.Tensor) -> None:
        self._last = (rope, raw, rotated)

    def attention(self, name: str, key: torch.Tensor | None) -> None:
        rope, raw, rotated = self._last or (None, None, None)
        self._last = None
        if key is not None:
            self.calls[name] = _Call(key, rope, raw, rotated)


def _link(
    name: str, zero: _Call | None, again: _Call | None, moved: _Call | None, positions: torch.Tensor
) -> RopeTap | None:
    """Return the layer's rope, or ``None`` for NoPE.  Raises :class:`Unsupported`.

    ``zero``, ``again``: calls of two equal runs at position 0; ``moved``: the call at ``positions``."""
    if zero is None or again is None or moved is None:
        raise Unsupported(
            f"hypic: the start-up probe did not reach layer {name}, so its rotary embedding is unknown"
        )
    tolerance = _TOLERANCE[moved.key.dtype]
    if not (noise := _error(again.key, zero.key)) <= _NOISE * tolerance:
        raise Unsupported(
            f"hypic: layer {name}: K of two equal runs differs by {noise:.1e}, too much to detect a rotary "
            "embedding"
        )
    if _alike(moved.key, zero.key, again.key):
        return None  # NoPE: K does not depend on positions, even if a rope ran before the layer
    rope, raw, rotated = moved.rope, moved.raw, moved.rotated
    if rope is None or raw is None or rotated is None:
        raise Unsupported(f"hypic: layer {name} rotates K by a rotary embedding that hypic cannot observe")
    kind, shape = type(rope).__name__.removeprefix("Hypic"), moved.key.shape
    if not torch.equal(rotated.view(shape), moved.key):
        raise Unsupported(f"hypic: layer {name} changes K after {kind}, so K cannot be stored unrotated")
    assert zero.raw is not None and again.raw is not None
    if not _alike(raw, zero.raw, again.raw):
        raise Unsupported(f"hypic: layer {name}: K depends on positions before {kind} rotates it")
    table = getattr(rope, "cos_sin_cache", None)
    if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.shape[1] > shape[-1]:
        raise Unsupported(f"hypic: layer {name}: {kind} has no table of one angle per pair of elements")
    positions, neox = positions.to(table.device), bool(getattr(rope, "is_neox_style", True))
    error = _error(rotate(raw.view(shape), table.index_select(0, positions), neox), moved.key)
    if not error <= tolerance:
        raise Unsupported(
            f"hypic: layer {name}: {kind} is not the plain rotation of its table (error {error:.1e})"
        )
    error = _error(unrotate(moved.key, table, positions, neox), raw.view(shape))
    if not error <= tolerance:
        raise Unsupported(f"hypic: layer {name}: the rotation by {kind} cannot be undone (error {error:.1e})")
    return rope


def _alike(moved: torch.Tensor, zero: torch.Tensor, again: torch.Tensor) -> bool:
    """Return whether ``moved`` differs from ``zero`` by at most :data:`_SPREAD` times the difference between
    ``again`` and ``zero``."""
    return torch.equal(moved, zero) or _error(moved, zero) <= _SPREAD * _error(again, zero)


def _error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest absolute difference, relative to the largest absolute element of ``wanted``."""
    difference = (ours.float() - wanted.float()).abs().max()
    return float(difference / wanted.float().abs().max().clamp_min(1e-6))
