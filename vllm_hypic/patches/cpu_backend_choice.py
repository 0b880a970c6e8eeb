"""Patch: the CPU platform honours ``--attention-backend hypic``.

Target: ``vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls``.
Why: it ignores the named backend and always returns CPU_ATTN.
Until: the CPU platform selects registered backends.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .signature import require_parameters


def apply() -> None:
    """Idempotent; does nothing on other platforms."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    platform: Any = type(current_platform)
    if not current_platform.is_cpu() or getattr(platform.get_attn_backend_cls, "_hypic", False):
        return
    stock = platform.get_attn_backend_cls.__func__
    require_parameters(stock, "cls", "selected_backend", "attn_selector_config")

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if selected_backend is AttentionBackendEnum.CUSTOM:
            if attn_selector_config.use_mla or attn_selector_config.use_sparse:
                raise ConfigError(
                    "--attention-backend hypic: MLA and sparse attention are not supported on CPU"
                )
            return AttentionBackendEnum.CUSTOM.get_path()
        return stock(cls, selected_backend, attn_selector_config, *args, **kwargs)

    get_attn_backend_cls._hypic = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
