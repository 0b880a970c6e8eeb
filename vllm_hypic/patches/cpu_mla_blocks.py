"""Patch: latent attention in float32 runs beside layers that keep states, on CPU.

Target: ``vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend.supports_block_size``.
Why: the backend's kernel reads blocks of 16 tokens, and a hybrid's blocks hold multiples of 128.  vLLM's
model runner cuts such blocks into blocks of 16.  But start-up asks whether the backend takes blocks of 128,
and the backend says no.
Until: vLLM accepts multiples of the block size that a backend's kernel takes.
"""

from __future__ import annotations

from typing import Any

from .signature import require_parameters


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    stock = CPUMLABackend.supports_block_size
    if getattr(stock, "_hypic", False):
        return
    require_parameters(stock, "block_size")
    (of_kernel,) = CPUMLABackend.get_supported_kernel_block_sizes()
    assert isinstance(of_kernel, int)

    def supports_block_size(cls: Any, block_size: int | None) -> bool:
        return block_size is None or block_size % of_kernel == 0

    supports_block_size._hypic = True  # type: ignore[attr-defined]
    CPUMLABackend.supports_block_size = classmethod(supports_block_size)
