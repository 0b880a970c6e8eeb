"""Start-up: this module checks that PIC can serve every layer, and links layers, ropes and pool."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CompilationMode
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase

from ..pool.families import FAMILIES
from ..pool.geometry import FP8, AttentionGeometry, LatentGeometry
from .attention.base import AttentionLink, LinkedAttention
from .linear.base import LinearLayer
from .ops import extension, span_attention
from .probe import PROBE_TOKENS, Unsupported, link_ropes, run_model
from .rope import RopeTap

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..pool.geometry import PoolGeometry
    from ..pool.runtime import HypicRuntime

logger = init_logger("vllm.hypic.attach")

READS_OTHERS = "attention over the KV of another layer"
"""The name in the log and in ``vllm-hypic check`` for layers that have no KV cache themselves."""


def attach(runner: Any, geometry: PoolGeometry, start: Callable[[torch.device], HypicRuntime]) -> str:
    """Link a loaded model to the pool that ``start`` allocates; return a line that counts the layers by kind.

    Raises :class:`Unsupported`, with the first layer that PIC cannot serve and the reason.
    """
    layers = runner.compilation_config.static_forward_context
    architecture = runner.model_config.architecture
    for name, layer in layers.items():
        if isinstance(layer, AttentionLayerBase) and (reason := layer_refusal(layer, architecture)):
            raise Unsupported(f"hypic: layer {name}: {reason} is not supported; serve without hypic")
    impls = {a.layer: layers[a.layer].impl for a in geometry.attention}
    readers = {name: layer.impl for name, layer in layers.items() if cache_owner(layer)}
    _require_own_graph(runner, geometry)
    ropes = link_ropes(runner, impls, readers)
    runtime = start(runner.device)
    _link(runner, layers, impls, ropes, runtime)
    for impl in readers.values():
        # The owner of the cache wrote K and V and rotated K by its own rope, so readers share its link.
        impl.link = impls[impl.kv_sharing_target_layer_name].link
    kinds = Counter(
        f"{attention_kind(layers[a.layer], a)} ({_rope_kind(ropes[a.layer])})" for a in geometry.attention
    )
    kinds.update(layers[g.layer].family.name for g in geometry.linear)
    kinds.update([READS_OTHERS] * len(readers))
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items())


def cache_owner(layer: object) -> str | None:
    """Return the name of the other layer whose KV cache ``layer`` reads; ``None``: no other layer's."""
    owner: str | None = getattr(layer, "kv_sharing_target_layer_name", None)
    return owner


def attention_kind(layer: AttentionLayerBase, geometry: AttentionGeometry) -> str:
    """Return the kind of a served layer, for the log and ``vllm-hypic check``: full, windowed or latent."""
    if isinstance(geometry, LatentGeometry):
        return "latent attention"
    window = getattr(layer, "sliding_window", None)
    return "full attention" if window is None else f"attention in a window of {window}"


def layer_refusal(layer: AttentionLayerBase, architecture: str) -> str | None:
    """Return why PIC cannot serve this layer of a model of class ``architecture``, or ``None``.

    :func:`attach` checks every layer that has a cache or reads another layer's cache.
    """
    kind = type(layer).__name__
    if isinstance(layer, LinearLayer):
        if architecture in (served := layer.family.architectures):
            return layer.refusal()
        return (
            f"{layer.family.name} in {architecture} (the model may keep other states; "
            f"served: {', '.join(sorted(served))})"
        )
    if isinstance(layer, MambaBase):
        return f"linear attention {kind} (supported: {', '.join(s for f in FAMILIES for s in f.stock)})"
    impl = getattr(layer, "impl", None)
    if isinstance(impl, LinkedAttention):
        return impl.refusal(layer)
    backend = getattr(layer, "attn_backend", None)
    if backend is not None:
        return f"{kind} by {backend.get_name()} (the model itself chooses this backend)"
    return f"{kind} without the hypic backend"


def _require_own_graph(runner: Any, geometry: PoolGeometry) -> None:
    """Raise :class:`Unsupported` if the compiled model came from stock vLLM's compile cache and omits our
    linear layers."""
    if runner.compilation_config.mode == CompilationMode.NONE or not geometry.linear:
        return
    layers = runner.compilation_config.static_forward_context
    if not any(layers[g.layer].hypic_reached for g in geometry.linear):
        # vLLM's own warm-up compiles the model, but options can disable this warm-up.
        run_model(runner, torch.zeros(PROBE_TOKENS, dtype=torch.int64), skip_compiled=False)
    passed_by = [g.layer for g in geometry.linear if not layers[g.layer].hypic_reached]
    if passed_by:
        raise Unsupported(
            f"hypic: the compiled model does not run layer {passed_by[0]}; delete vLLM's compile cache "
            "(torch_compile_cache in VLLM_CACHE_ROOT) or serve with --enforce-eager"
        )


def _link(
    runner: Any,
    layers: Any,
    impls: dict[str, LinkedAttention[Any]],
    ropes: dict[str, RopeTap | None],
    runtime: HypicRuntime,
) -> None:
    device = runner.device.type
    for name, impl in impls.items():
        if runtime.pool.kv[name].key.dtype == FP8:
            runtime.pool.scale(name, layers[name]._k_scale_float, layers[name]._v_scale_float)
        impl.connect(layers[name], AttentionLink(runtime, runtime.pool.kv[name], ropes[name]))
        if device == "cpu":  # on other devices, `refusal` has checked the kernels
            _warn_of_refusal("attention", span_attention.refuses(impl.head_size, device))
    for name in runtime.pool.linear:
        reason = layers[name].kernel_refusal()
        if device == "cpu":
            _warn_of_refusal(layers[name].family.name, reason)
        elif reason is not None:
            raise Unsupported(f"hypic: layer {name}: {reason} is not supported; serve without hypic")
        layers[name].connect(runtime)
    for name in list(runtime.pool.linear)[:1]:
        layers[name].warm_up(runtime)


def _warn_of_refusal(kind: str, reason: str | None) -> None:
    """Log once per ``kind`` of layer and ``reason`` that the C++ kernels refuse such layers.

    If the kernels are missing altogether, the log line of ``extension.describe`` reports that instead.
    """
    if reason is not None and reason != extension.missing():
        logger.warning_once("hypic: %s runs in PyTorch, several times slower: %s", kind, reason)


def _rope_kind(rope: RopeTap | None) -> str:
    return "NoPE" if rope is None else type(rope).__name__.removeprefix("Hypic")
