"""The CUDA path: refusals of engine options, and the device memory that our operators take.

Refusals come before vLLM reads weights, with a reason and a remedy.  vLLM's profile run has no composed rows,
so it does not measure our operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import vllm.envs as envs

from ..config.drafting import LOOKED_UP
from ..config.engine import config_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DTYPES = (torch.bfloat16, torch.float16)
"""The model dtypes that FlashAttention supports."""
DRAFTING_MODELS = ("draft_model", "eagle", "eagle3", "mtp")
"""The served methods of speculative decoding in which a model drafts: a subset of the CPU's methods."""
CAPABILITY = (8, 0)
"""Lowest compute capability, major and minor, that FlashAttention supports."""
FLASHINFER_HEADS = (128, 128)
"""The only head sizes of K and V that FlashInfer's prefill of gated delta nets supports."""


def refusal(config: VllmConfig) -> str | None:
    """Return the first refusal of an engine's complete configuration by the CUDA path, or ``None``.

    Properties that only a loaded model shows (soft-caps, shared caches, head sizes) are checked when
    ``attach`` links its layers.
    """
    for check in (_device, _parallelism, _model, _drafts, _caches, _execution):
        for reason in check(config):
            return reason
    return None


def _device(config: VllmConfig) -> Iterator[str]:
    from vllm.platforms import current_platform

    if not current_platform.has_device_capability(CAPABILITY[0] * 10 + CAPABILITY[1]):
        found = current_platform.get_device_capability()
        yield f"compute capability {found and found.as_version_str()}: expected 8.0 or newer"


def _parallelism(config: VllmConfig) -> Iterator[str]:
    parallel = config.parallel_config
    for name, why in (
        ("decode_context_parallel_size", "as each rank holds all tokens of a record"),
        ("prefill_context_parallel_size", "as one rank must hold all rows of a request"),
    ):
        if (given := getattr(parallel, name)) > 1:
            yield f"{name}={given}: expected 1, {why}"
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        yield (
            f"data_parallel_size={parallel.data_parallel_size} with experts: expected 1, as all replicas "
            "would run every step together; run one server per replica"
        )
    if parallel.use_ubatching:
        yield "micro-batches (--enable-dbo, --ubatch-size) are not supported: hypic composes whole passes"


def _model(config: VllmConfig) -> Iterator[str]:
    model = config.model_config
    if model.is_encoder_decoder:
        yield "encoder-decoder models are not supported"
    if model.is_mm_prefix_lm:
        yield "models with bidirectional attention inside the prompt are not supported"
    if model.rswa_window is not None:
        yield f"reference sliding window of {model.rswa_window} tokens is not supported"
    if model.dtype not in DTYPES:
        yield f"dtype={model.dtype}: expected bfloat16 or float16"
    if model.enable_sleep_mode:
        yield (
            "--enable-sleep-mode: sleep discards the pool while kept requests need it; drop the option, and "
            "pause with /pause?mode=keep&clear_cache=false (VLLM_SERVER_DEV_MODE=1)"
        )


def _drafts(config: VllmConfig) -> Iterator[str]:
    speculative, model = config.speculative_config, config.model_config
    if speculative is None or speculative.method in LOOKED_UP:
        return
    by = f"speculative decoding by {speculative.method!r}"
    if speculative.method not in DRAFTING_MODELS:
        yield (
            f"{by} is not tested with records on CUDA: "
            f"expected one of {', '.join(LOOKED_UP + DRAFTING_MODELS)}"
        )
    if model.use_mla or (model.is_hybrid and speculative.method != "mtp"):
        yield (
            f"{by} of {model.architecture} is not supported on CUDA: mtp is tested with linear layers, "
            f"other methods with full attention only; expected one of {', '.join(LOOKED_UP)}"
        )
    if config.scheduler_config.async_scheduling:
        yield (
            f"{by} with --async-scheduling is not supported: positions of composed requests depend on the "
            "number of accepted drafts, which only the GPU knows; drop --async-scheduling"
        )


def _caches(config: VllmConfig) -> Iterator[str]:
    from vllm.platforms import current_platform

    cache, given = config.cache_config, f"kv_cache_dtype={config.cache_config.cache_dtype}"
    if cache.cache_dtype in ("fp8", "fp8_e4m3"):
        if config.model_config.use_mla:
            yield f"{given} of latent attention: expected auto, bfloat16 or float16"
        elif not current_platform.has_device_capability(90) or current_platform.has_device_capability(100):
            version = current_platform.get_device_capability().as_version_str()
            yield (
                f"{given} on compute capability {version}: expected auto, bfloat16 or float16, as only "
                "FlashAttention 3 reads FP8, which needs compute capability 9.0"
            )
    elif cache.cache_dtype not in ("auto", "bfloat16", "float16"):
        yield f"{given}: expected auto, bfloat16, float16, fp8 or fp8_e4m3"
    if (state := config_of(config).state_dtype) != "float32":
        yield f"hypic config: state_dtype={state}: expected float32 on CUDA"
    if cache.use_replayssm:
        yield "replayed SSM states (use_replayssm) are not supported"


def _execution(config: VllmConfig) -> Iterator[str]:
    backend = _gdn_backend(config)
    if backend not in ("auto", "triton", "flashinfer"):
        yield f"gdn_prefill_backend={backend!r}: expected 'auto', 'triton' or 'flashinfer'"
    sizes = _gdn_heads(config)
    if backend == "flashinfer" and sizes is not None and sizes != FLASHINFER_HEADS:
        yield (
            f"gdn_prefill_backend='flashinfer' with linear heads of {sizes[0]} and {sizes[1]}: the kernels "
            "need heads of 128 and write past the end of other heads; use 'triton'"
        )
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        # vLLM itself sets this variable for some models and for VLLM_BATCH_INVARIANT=1.
        yield (
            "VLLM_USE_BREAKABLE_CUDAGRAPH=1: no test runs the plugin in breakable CUDA graphs, and some "
            "operators do not break graphs; set VLLM_USE_BREAKABLE_CUDAGRAPH=0"
        )
    if envs.VLLM_ENABLE_STARTUP_PLAN:
        yield "VLLM_ENABLE_STARTUP_PLAN=1: the sizes that vLLM stores leave out the pool; unset the variable"


def choose_gdn_prefill(config: VllmConfig) -> None:
    """Make vLLM prefill gated delta nets with Triton if FlashInfer's kernels do not support the head sizes.

    By default, vLLM takes FlashInfer's kernels, made for size 128, on Hopper for any head size.  On
    Blackwell, vLLM ignores the size of V.
    """
    sizes = _gdn_heads(config)
    if sizes is not None and sizes != FLASHINFER_HEADS and _gdn_backend(config) == "auto":
        assert isinstance(config.additional_config, dict)
        config.additional_config = {**config.additional_config, "gdn_prefill_backend": "triton"}


def _gdn_backend(config: VllmConfig) -> str:
    additional = config.additional_config
    asked = additional.get("gdn_prefill_backend") if isinstance(additional, dict) else None
    return "auto" if asked is None else str(asked).strip().lower()


def _gdn_heads(config: VllmConfig) -> tuple[int, int] | None:
    """Return the sizes of K and V in the heads of gated delta nets; ``None``: the model has no such nets."""
    text = config.model_config.hf_text_config
    sizes = tuple(getattr(text, f"linear_{half}_head_dim", None) for half in ("key", "value"))
    return None if sizes == (None, None) else sizes  # type: ignore[return-value]


def scratch_bytes(layers: Iterable[object], rows: int, dtype: torch.dtype) -> int:
    """Return the most bytes that a pass of ``rows`` token rows in ``dtype`` takes beside the pool.

    Layers run one after another, so the sum has the largest working memory of a layer.  The sum also has the
    memory that interiors carry between passes in all layers.
    """
    from .attention.cuda import HypicCUDAAttentionImpl
    from .attention.cuda_mla import CUDALatentAttention
    from .linear.base import LinearLayer

    working, carried = 0, 0
    for layer in layers:
        if isinstance(layer, LinearLayer):
            own = layer.scratch(rows, dtype)
            working, carried = max(working, own.working), carried + own.carried
        elif isinstance(impl := getattr(layer, "impl", None), (HypicCUDAAttentionImpl, CUDALatentAttention)):
            working = max(working, impl.scratch_bytes(rows, dtype))
    return working + carried
