"""Finds from a model's configuration alone whether an engine would serve each of its layers.

The engine's own code decides.  vLLM builds the model class with the plugin's layers, and with weights on the
``meta`` device, which has shapes and no numbers.  The pool's geometry takes the cache spec of each layer.
This module thus depends on no model's name.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from ..backends.attach import READS_OTHERS, attention_kind, cache_owner, layer_refusal
from ..backends.linear.base import LinearLayer
from ..config.engine import SECTION, GateConfig, HypicConfig
from ..engine.worker import HypicWorker
from ..errors import ConfigError
from ..pool.geometry import (
    AttentionGeometry,
    LatentGeometry,
    LayerGeometry,
    cache_refusal,
    divided,
    expected_space,
    layer_geometry,
    pool_bytes,
    quantised_dtype,
    unsized,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class LayerKind:
    """Layers that are served, or refused, alike."""

    layers: int
    what: str
    """Description, ``full attention, 8 KV heads of 128``, or vLLM's class of a refused layer."""
    refusal: str | None
    segment_bytes: int
    """Bytes of a segment in all these layers; 0 if the layers are refused."""
    before_window_bytes: int = 0
    """Part of ``segment_bytes`` for rows before the segment's last window."""


@dataclass(frozen=True)
class Findings:
    """Findings about a model."""

    architecture: str
    platform: str
    dtype: str
    refusal: str | None
    """Reason why the whole model is refused; ``None``: all layers are served."""
    kinds: tuple[LayerKind, ...] = ()
    segment_tokens: int = 0
    segments: int = 0
    """Number of segments of ``segment_tokens`` tokens that the pool holds."""
    pool_bytes: int = 0

    @property
    def served(self) -> bool:
        return self.refusal is None


class NotBuilt(Exception):
    """vLLM cannot build its configuration or its model; the message says why."""


def find(model: Path, config: HypicConfig, engine_args: Mapping[str, Any]) -> Findings:
    """Return the findings about ``model``, a folder with a configuration; read no weights, start no engine.

    ``config.pool_bytes`` and ``config.expected_segment_tokens`` size the pool of the findings;
    ``engine_args``: arguments of vLLM.  Call the function only once in a process, because a process can make
    vLLM's groups of ranks only once.  Raises :class:`NotBuilt`.
    """
    from vllm.platforms import current_platform

    config = dataclasses.replace(config, gate=GateConfig(require="off"))
    # Quantised weights change no cache, and this machine need not have their kernels.
    overrides = {"quantization_config": None, **engine_args.get("hf_overrides", {})}
    given = {"enforce_eager": True, **engine_args, "hf_overrides": overrides}
    platform = current_platform.device_name
    ours = {SECTION: config.to_mapping()}
    try:
        args = EngineArgs(str(model), attention_backend="hypic", additional_config=ours, **given)
        vllm_config = args.create_engine_config()
    except ConfigError as e:
        return Findings(_architecture(model), platform, "", str(e))
    except Exception as e:
        raise NotBuilt(f"vLLM cannot configure the model: {_line(e)}") from e
    model_config = vllm_config.model_config
    about = Findings(
        model_config.architecture, platform, str(model_config.dtype).removeprefix("torch."), refusal=None
    )
    try:
        layers = _layers(vllm_config)
    except ConfigError as e:
        return dataclasses.replace(about, refusal=str(e))
    except Exception as e:
        raise NotBuilt(f"vLLM cannot build {model_config.architecture} without weights: {_line(e)}") from e
    dtype = quantised_dtype(vllm_config.cache_config.cache_dtype, model_config.dtype)
    return _judged(about, layers, config, dtype)


def _architecture(model: Path) -> str:
    return ", ".join(json.loads((model / "config.json").read_text()).get("architectures") or ["?"])


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _layers(vllm_config: VllmConfig) -> dict[str, tuple[AttentionLayerBase, KVCacheSpec | None]]:
    """Return the layers by name, with cache specs; the spec of a layer that reads another's is ``None``."""
    HypicWorker._register_layers()
    with set_current_vllm_config(vllm_config), _one_rank():
        with _NoWeights(), set_default_torch_dtype(vllm_config.model_config.dtype):
            initialize_model(vllm_config=vllm_config)
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
        return {
            name: (layer, None if cache_owner(layer) else layer.get_kv_cache_spec(vllm_config))
            for name, layer in layers.items()
        }


@contextmanager
def _one_rank() -> Iterator[None]:
    """Make vLLM's groups of ranks inside the ``with`` block, as layers ask for the groups' sizes."""
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


class _NoWeights(TorchFunctionMode):
    """Puts tensors that are made without values, as weights are, on the ``meta`` device.

    Other tensors stay real, because some models read tables that they make during construction.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        device = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **device})


def _judged(
    about: Findings,
    layers: Mapping[str, tuple[AttentionLayerBase, KVCacheSpec | None]],
    config: HypicConfig,
    dtype: torch.dtype,
) -> Findings:
    served: list[LayerGeometry] = []
    kinds: Counter[tuple[str, str | None, int, int]] = Counter()
    for name, (layer, spec) in layers.items():
        reason = layer_refusal(layer, about.architecture)
        if spec is not None and reason is None:
            reason = cache_refusal(spec)
        if spec is None or reason is not None:
            reads = reason is None and cache_owner(layer)
            kinds[READS_OTHERS if reads else type(layer).__name__, reason, 0, 0] += 1
            continue
        geometry = layer_geometry(name, spec, dtype, config, conv_dim_first=is_conv_state_dim_first())
        alone = unsized([geometry], config)
        each = alone.bytes_of(expected_space(alone, config))
        kinds[_what(layer, geometry), None, each, _before_window(layer, geometry, config)] += 1
        served.append(geometry)
    found = tuple(
        LayerKind(n, what, reason, n * each, n * before) for (what, reason, each, before), n in kinds.items()
    )
    about = dataclasses.replace(about, kinds=found)
    if refused := sum(kind.layers for kind in found if kind.refusal is not None):
        return dataclasses.replace(about, refusal=f"{refused} of {len(layers)} layers are not supported")
    try:
        sized = unsized(served, config)
        pool = divided(sized, config, pool_bytes(config, 0))
    except ConfigError as e:
        return dataclasses.replace(about, refusal=str(e))
    space = expected_space(sized, config)
    return dataclasses.replace(
        about,
        segment_tokens=config.expected_segment_tokens,
        segments=pool.pages // space.pages if space.pages else pool.slots,
        pool_bytes=pool.nbytes,
    )


def _before_window(layer: AttentionLayerBase, geometry: LayerGeometry, config: HypicConfig) -> int:
    """Return the bytes of a segment's rows that neither the tail seam nor later rows see in this layer."""
    window = getattr(layer, "sliding_window", None)
    if window is None or not isinstance(geometry, AttentionGeometry):
        return 0
    return max(0, config.expected_segment_tokens - config.seam_tokens - window) * geometry.token_bytes


def _what(layer: AttentionLayerBase, geometry: LayerGeometry) -> str:
    if isinstance(geometry, LatentGeometry):
        return f"{attention_kind(layer, geometry)}, rows of {geometry.head_size}"
    if isinstance(geometry, AttentionGeometry):
        kind = attention_kind(layer, geometry)
        return f"{kind}, {geometry.kv_heads} KV heads of {geometry.head_size}"
    assert isinstance(layer, LinearLayer)
    return f"{layer.family.name}, {geometry.shape}"
