"""The attention backend of this platform, which vLLM imports from here by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from .cpu import HypicCPUAttentionBackend as HypicAttentionBackend
elif current_platform.is_cuda():
    from .cuda import HypicCUDAAttentionBackend as HypicAttentionBackend
else:
    from .cpu import HypicCPUAttentionBackend as HypicAttentionBackend

__all__ = ["HypicAttentionBackend", "HypicAttentionImpl"]

HypicAttentionImpl = HypicAttentionBackend.get_impl_cls()
