"""Patch: the CUDA platform honours ``--attention-backend hypic`` for latent attention (MLA).

Target: ``vllm.platforms.cuda.CudaPlatformBase.get_attn_backend_cls``.
Why: a backend's name stands for one class for all layers of a model.  But latent attention has several
classes, and the GPU decides which class is best.  The patch therefore asks vLLM for its own choice, and
returns the plugin's class derived from that choice.
Until: vLLM lets a backend choose the class by a layer's needs.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .cpu_backend_choice import refuse_sparse
from .signature import require_parameters

SERVED = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA")
"""vLLM's backends whose caches in the model's dtype hold one row ``[latent | key]`` per token."""


def apply() -> None:
    """Apply the patch on the CUDA platform only; repeated calls change nothing."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        apply_to(type(current_platform))


def apply_to(platform: Any) -> None:
    """Apply the patch to the platform class ``platform``; repeated calls change nothing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend

    if getattr(platform.get_attn_backend_cls, "_hypic", False):
        return
    stock_choice = platform.get_attn_backend_cls.__func__
    require_parameters(stock_choice, "cls", "selected_backend", "attn_selector_config", "num_heads")

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        asked = attn_selector_config
        if selected_backend is not Backend.CUSTOM or not asked.use_mla:
            return str(stock_choice(cls, selected_backend, asked, num_heads))
        refuse_sparse(asked)
        path = stock_choice(cls, None, asked, num_heads)
        name = path.rpartition(".")[2]
        if path not in {Backend[served].get_path() for served in SERVED}:
            raise ConfigError(
                f"--attention-backend hypic: latent attention by {name}, vLLM's choice, is not supported: "
                f"expected {', '.join(SERVED)}"
            )
        return f"vllm_hypic.backends.attention.cuda_mla.Hypic{name}"

    get_attn_backend_cls._hypic = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
