"""The settings of an engine that determine the bytes of its records; no other module decides this.

A namespace always holds the settings in :func:`namespace_of`.  A setting in :data:`NON_DEFAULT` joins only if
it differs from an ordinary engine's, so that new entries do not rename the records of ordinary engines.  A
test checks vLLM's configuration against both, and lists all other fields with reasons.

The last bits of a record do not count: as in stock vLLM's KV cache, machine, kernels, compilation and chunk
ends of the prefill change them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.utils.torch_utils import get_kv_cache_torch_dtype
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from ..config.drafting import BY_A_MODEL
from ..config.engine import SECTION, config_of
from ..fingerprint import contents, fingerprint, weights_digest
from ..pool.geometry import PoolGeometry
from ..primitives.keys import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Rule = Callable[[Any, "VllmConfig"], object]
"""Maps a field's value to its entry in the namespace; ``None``: the field is as in an ordinary engine."""


def _unless(ordinary: object) -> Rule:
    return lambda value, _: None if value == ordinary else _plain(value)


def _overrides(value: Any, vllm_config: VllmConfig) -> object:
    """Return the overrides; for a function, which has no lasting name, the configuration that it made."""
    if not callable(value):
        return value or None
    made = vllm_config.model_config.hf_config.to_dict()
    # The library's version, the files' path, and a field that vLLM changes when it loads weights.
    for name in ("transformers_version", "_name_or_path", "tie_word_embeddings"):
        made.pop(name, None)
    return made


def _config_path(value: str | None, vllm_config: VllmConfig) -> object:
    return value and contents(value, vllm_config.model_config._hf_config_revision, ("*.json",))


def _max_model_len(value: int, vllm_config: VllmConfig) -> object:
    """Return the context length for LongRoPE, whose long factors apply to every token in a long context."""
    return value if "longrope" in json.dumps(_rope(vllm_config), default=str) else None


def _cache_dtype(value: str, _: VllmConfig) -> object:
    """Return a quantised type, in which segments read their own K and V; the geometry has the records'."""
    return value if is_quantized_kv_cache(value) else None


def _ssm_dtype(value: str, vllm_config: VllmConfig) -> object:
    """Return the type of states in vLLM's cache, through which they pass between chunks; ``None``: float32.

    A plugin option sets the records' type.  ``auto`` is float32 on CPUs with AVX512-BF16, where vLLM sets it,
    and the convolution's type elsewhere.
    """
    model = vllm_config.model_config
    if value == "auto":
        dtype = get_kv_cache_torch_dtype(vllm_config.cache_config.mamba_cache_dtype, model.dtype)
        value = str(dtype).removeprefix("torch.")
    return None if value == "float32" or not model.is_hybrid else value


def _lora_dtype(value: object, vllm_config: VllmConfig) -> object:
    return None if value in ("auto", None, vllm_config.model_config.dtype) else str(value)


def _images(value: Any, vllm_config: VllmConfig) -> object:
    """Return the engine's settings that change images on their way to the model.  A record's key has a digest
    of the image and of its request's settings."""
    if value is None:
        return None
    model = vllm_config.model_config
    told = {name: _plain(getattr(value, name)) for name in IMAGES}
    folder = vllm_config.load_config.download_dir
    files = contents(model.model, model.revision, ("*processor_config.json",), folder)
    return {name: one for name, one in told.items() if one != IMAGES[name]} | {"files": files}


IMAGES: Mapping[str, object] = {
    "media_io_kwargs": {},
    "mm_processor_kwargs": None,
    "mm_device_do_normalize": True,
    "mm_encoder_attn_dtype": None,
    "mm_encoder_fp8_scale_path": None,
    "video_pruning_rate": None,
    "video_pruning_method": "evs",
}
"""Fields of vLLM's ``MultiModalConfig`` that join the namespace if not ordinary, and their ordinary values.
All other fields set how inputs travel, where they are kept, and which kernels run."""


def _drafting(value: Any, vllm_config: VllmConfig) -> object:
    """Return the identity of a drafting model, as records also hold K and V for it; else ``None``."""
    if value is None or value.method not in BY_A_MODEL:
        return None
    model = value.draft_model_config
    weights = weights_digest(model.model, model.revision, vllm_config.load_config.download_dir)
    return [weights, str(model.dtype), model.quantization]


def _load_strategy(value: str | None, _: VllmConfig) -> object:
    """Return the one strategy that changes weights; all other strategies only set how files are read."""
    return value if value == "torchao" else None


def _additional(value: Any, _: VllmConfig) -> object:
    """Return options of platform plugins; :data:`NON_DEFAULT_OPTIONS` has this plugin's options."""
    if not isinstance(value, Mapping):
        return value.compute_hash()
    return {name: one for name, one in value.items() if name != SECTION} or None


NON_DEFAULT: Mapping[str, Mapping[str, Rule]] = {
    "model_config": {
        "model_weights": _unless(""),
        "hf_overrides": _overrides,
        "hf_config_path": _config_path,
        "config_format": _unless("auto"),
        "code_revision": _unless(None),
        "trust_remote_code": _unless(False),
        "quantization_config": _unless(None),
        "model_impl": _unless("auto"),
        "model_class_overrides": _unless({}),
        "disable_sliding_window": _unless(False),
        "max_model_len": _max_model_len,
        "multimodal_config": _images,
    },
    "load_config": {
        "model_loader_extra_config": _unless({}),
        "ignore_patterns": _unless(["original/**/*"]),
        "safetensors_load_strategy": _load_strategy,
    },
    "cache_config": {
        "cache_dtype": _cache_dtype,
        "mamba_ssm_cache_dtype": _ssm_dtype,
        "kv_cache_dtype_skip_layers": _unless([]),
        "kv_sharing_fast_prefill": _unless(False),
    },
    "lora_config": {
        "lora_dtype": _lora_dtype,
        "target_modules": _unless(None),
        "enable_tower_connector_lora": _unless(False),
    },
    "attention_config": {"use_prefill_query_quantization": _unless(False)},
    "mamba_config": {
        "enable_stochastic_rounding": _unless(False),
        "stochastic_rounding_philox_rounds": _unless(0),
    },
    # Some backends quantise activations, or weights once more.
    "kernel_config": {
        "moe_backend": _unless("auto"),
        "linear_backend": _unless("auto"),
        "linear_backend_per_quant": _unless(None),
    },
    "vllm_config": {"additional_config": _additional, "speculative_config": _drafting},
}
"""Fields that join the namespace if they are not ordinary, by the part of ``VllmConfig`` that has them."""

NON_DEFAULT_OPTIONS = {"dummy_token": None, "state_dtype": "float32"}
"""The plugin's options that join the namespace if not ordinary, and their ordinary values;
``dead_transition`` always joins.  All other options set where records are, or are in a record's key."""


def namespace_of(vllm_config: VllmConfig, geometry: PoolGeometry) -> Namespace:
    """Return the namespace of all settings of the engine that change a record's bytes."""
    model, text = vllm_config.model_config, vllm_config.model_config.hf_text_config
    return Namespace.from_config(
        {
            "model": model.model,
            "revision": model.revision,
            "weights": fingerprint(vllm_config),
            "dtype": str(model.dtype),
            "quantization": model.quantization,
            "attention": [str(a) for a in geometry.attention],
            "linear": [str(layer) for layer in geometry.linear],
            "dead_transition": config_of(vllm_config).dead_transition,
            "layer_types": getattr(text, "layer_types", None),
            "rope": _rope(vllm_config),
            **({"stages": geometry.stages} if geometry.stages else {}),
            **non_default(vllm_config),
        }
    )


def non_default(vllm_config: VllmConfig) -> dict[str, object]:
    """Return the settings that differ from an ordinary engine's, by ``part.field``."""
    found: dict[str, object] = {}
    for part, rules in NON_DEFAULT.items():
        config = vllm_config if part == "vllm_config" else getattr(vllm_config, part)
        for name, rule in rules.items() if config is not None else ():
            if (value := rule(getattr(config, name), vllm_config)) is not None:
                found[f"{part}.{name}"] = value
    options = config_of(vllm_config)
    for name, ordinary in NON_DEFAULT_OPTIONS.items():
        if (value := getattr(options, name)) != ordinary:
            found[f"{SECTION}.{name}"] = value
    return found


def _rope(vllm_config: VllmConfig) -> object:
    text = vllm_config.model_config.hf_text_config
    return getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)


def _plain(value: Any) -> object:
    """Return a value with the same text in every process, without addresses of objects."""
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_instance else value
