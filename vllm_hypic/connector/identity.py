"""What of an engine's configuration determines the bytes of its records: the one place that says so.

A namespace always holds what :func:`namespace_of` names.  What :data:`NON_DEFAULT` lists joins it only where
it is not as in an ordinary engine, so that new entries leave the records of ordinary ones where they are.
All other fields are listed with their reasons beside the test that holds vLLM's configuration against both.

The last bits of a record do not count: they depend on the machine, kernels, compilation and on where prefill
chunks end, as those of stock vLLM's KV cache do.
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
"""From a field's value to what is told of it; ``None``: it is as in an ordinary engine."""


def _unless(ordinary: object) -> Rule:
    return lambda value, _: None if value == ordinary else _plain(value)


def _overrides(value: Any, vllm_config: VllmConfig) -> object:
    """A function has no name that lasts: what it made of the configuration is told."""
    if not callable(value):
        return value or None
    made = vllm_config.model_config.hf_config.to_dict()
    # The library's version, where the files are, and what vLLM changes when weights are loaded.
    for name in ("transformers_version", "_name_or_path", "tie_word_embeddings"):
        made.pop(name, None)
    return made


def _config_path(value: str | None, vllm_config: VllmConfig) -> object:
    return value and contents(value, vllm_config.model_config._hf_config_revision, ("*.json",))


def _max_model_len(value: int, vllm_config: VllmConfig) -> object:
    """LongRoPE takes its long factors for every token where the engine's context is long."""
    return value if "longrope" in json.dumps(_rope(vllm_config), default=str) else None


def _cache_dtype(value: str, _: VllmConfig) -> object:
    """What records make of it is told by the geometry; what segments see of themselves is here."""
    return value if is_quantized_kv_cache(value) else None


def _ssm_dtype(value: str, vllm_config: VllmConfig) -> object:
    """States pass through vLLM's cache between chunks; what records keep of them is an option of ours.

    ``auto`` is float32 on CPUs with AVX512-BF16, where vLLM says so, and the convolution's type elsewhere.
    """
    model = vllm_config.model_config
    if value == "auto":
        dtype = get_kv_cache_torch_dtype(vllm_config.cache_config.mamba_cache_dtype, model.dtype)
        value = str(dtype).removeprefix("torch.")
    return None if value == "float32" or not model.is_hybrid else value


def _lora_dtype(value: object, vllm_config: VllmConfig) -> object:
    return None if value in ("auto", None, vllm_config.model_config.dtype) else str(value)


def _images(value: Any, vllm_config: VllmConfig) -> object:
    """What images become on their way to the model.  A digest of what one shows, and of what its request says
    of the way, stands in a record's key; this is what the engine says."""
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
"""Fields of vLLM's ``MultiModalConfig`` that are told where they are not ordinary, and their ordinary values.
Others say how inputs travel, where they are kept, and which kernels run."""


def _drafting(value: Any, vllm_config: VllmConfig) -> object:
    """Records hold what a model that drafts reads, too."""
    if value is None or value.method not in BY_A_MODEL:
        return None
    model = value.draft_model_config
    weights = weights_digest(model.model, model.revision, vllm_config.load_config.download_dir)
    return [weights, str(model.dtype), model.quantization]


def _load_strategy(value: str | None, _: VllmConfig) -> object:
    """The others only say how files are read."""
    return value if value == "torchao" else None


def _additional(value: Any, _: VllmConfig) -> object:
    """Options of platforms' plugins; our own are those of :data:`NON_DEFAULT_OPTIONS`."""
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
    # Some quantise activations, or weights once more.
    "kernel_config": {
        "moe_backend": _unless("auto"),
        "linear_backend": _unless("auto"),
        "linear_backend_per_quant": _unless(None),
    },
    "vllm_config": {"additional_config": _additional, "speculative_config": _drafting},
}
"""Fields that are told where they are not ordinary, by the part of ``VllmConfig`` that has them."""

NON_DEFAULT_OPTIONS = {"dummy_token": None, "state_dtype": "float32"}
"""The plugin's own options that are told, and their ordinary values; ``dead_transition`` always is.  Others
say where records are, or stand in a record's key."""


def namespace_of(vllm_config: VllmConfig, geometry: PoolGeometry) -> Namespace:
    """Everything of the engine that changes a record's bytes."""
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
    """What is not as in an ordinary engine, by ``part.field``."""
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
    """The same text in every process: no object's address."""
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_instance else value
