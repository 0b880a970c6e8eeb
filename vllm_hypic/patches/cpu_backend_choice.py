"""Patch: the CPU platform honours ``--attention-backend hypic``.

Target: ``vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls`` and ``check_and_update_config``.
Why: the first function ignores the named backend and returns CPU_ATTN, or one of two backends for MLA.  The
CPU and the backend's name decide between the two, but the dtype does not, though AMX_MLA takes only bf16.
In other dtypes a stock engine needs ``--attention-backend CPU_MLA``, by which the second function chooses the
block size.  The second function also switches the prefix cache off for such latent attention.  A hybrid's
states have blocks for that cache by then, so vLLM refuses the combination and ends.
Until: the CPU platform selects registered backends.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError
from .signature import require_parameters


def apply() -> None:
    """Apply the patch on the CPU platform only; repeated calls change nothing."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend

    platform: Any = type(current_platform)
    if not current_platform.is_cpu() or getattr(platform.get_attn_backend_cls, "_hypic", False):
        return
    stock_choice = platform.get_attn_backend_cls.__func__
    stock_check = platform.check_and_update_config.__func__
    require_parameters(stock_choice, "cls", "selected_backend", "attn_selector_config")
    require_parameters(stock_check, "cls", "vllm_config")

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        asked = attn_selector_config
        if selected_backend is not Backend.CUSTOM:
            return str(stock_choice(cls, selected_backend, asked, *args, **kwargs))
        refuse_sparse(asked)
        if not asked.use_mla:
            return str(Backend.CUSTOM.get_path())
        stock = None if asked.dtype == torch.bfloat16 else Backend.CPU_MLA
        path = stock_choice(cls, stock, asked, *args, **kwargs)
        name = "HypicAMXMLABackend" if path == Backend.AMX_MLA.get_path() else "HypicCPUMLABackend"
        return f"vllm_hypic.backends.attention.mla.{name}"

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        attention, model = vllm_config.attention_config, vllm_config.model_config
        named = attention.backend
        latent = named is Backend.CUSTOM and model is not None and model.use_mla
        reference = latent and model.dtype != torch.bfloat16
        try:
            attention.backend = Backend.CPU_MLA if reference else named
            stock_check(cls, vllm_config)
        finally:
            attention.backend = named
        cache = vllm_config.cache_config
        if latent and cache.mamba_cache_mode != "none" and not cache.enable_prefix_caching:
            # These are vLLM's own values for hybrids that start without the prefix cache.
            cache.mamba_cache_mode, cache.mamba_block_size = "none", model.max_model_len

    get_attn_backend_cls._hypic = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    platform.check_and_update_config = classmethod(check_and_update_config)


def refuse_sparse(asked: Any) -> None:
    """Raise :class:`ConfigError` if ``asked`` (vLLM's ``AttentionSelectorConfig``) wants sparse attention."""
    if asked.use_sparse:
        raise ConfigError(
            "--attention-backend hypic: sparse attention (an indexer, as DeepSeek-V3.2 has) is not "
            "supported: records do not hold the indexer's keys"
        )
