"""Out-of-tree rotary embeddings: stock code that the start-up probe can watch.

Each descendant of ``RotaryEmbeddingBase`` has one subclass, because vLLM looks replacements up by exact class
name.  Stock code does the rotation: the plugin rewrites positions at the model's input, so stock code rotates
every row correctly.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

REFUSED = frozenset({"DualChunkRotaryEmbedding"})
"""Names of classes that the plugin does not tap, because these return several rotated copies of K at once."""


class RopeTap:
    """Mixin that reports K before and after the stock rotation while the start-up probe runs.

    Without a probe, ``forward`` calls stock code alone, so compiled graphs contain nothing else.
    """

    hypic_probe: Callable[[RopeTap, torch.Tensor, torch.Tensor], None] | None = None
    """Function that the probe sets; it receives (rope, unrotated K, rotated K) outside compiled graphs."""

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.hypic_probe is not None and key is not None:
            raw = key.clone()
            result = super().forward(positions, query, key, *args, **kwargs)  # type: ignore[misc]
            self.hypic_probe(self, raw, result[1].clone())
            return result
        return super().forward(positions, query, key, *args, **kwargs)  # type: ignore[misc]


def register_rope_taps() -> None:
    """Register one tapped subclass per rotary class.  Repeated calls are safe."""
    import vllm.model_executor.layers.rotary_embedding as package
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for cls in _descendants(RotaryEmbeddingBase):
        if cls.__name__ in op_registry_oot or cls.__name__ in REFUSED or issubclass(cls, RopeTap):
            continue
        # vLLM keys CustomOp's configuration by the class attribute ``name``; register_oot would
        # overwrite it with the class name and so disable the op in eager mode.
        op_name = getattr(cls, "name", None)
        tapped = type(f"Hypic{cls.__name__}", (RopeTap, cls), {"__module__": __name__})
        cls.register_oot(tapped)
        if op_name is not None:
            tapped.name = op_name  # type: ignore[attr-defined]


def _descendants(cls: Any) -> list[Any]:
    found: list[Any] = []
    for child in cls.__subclasses__():
        found += [child, *_descendants(child)]
    return found
