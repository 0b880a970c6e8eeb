"""What a linear-attention family's layers offer PIC: the seam between families and the rest of the package.

A family is a folder: ``base`` with a subclass of :class:`LinearLayer` and of vLLM's layer, ``cpu`` and
``cuda`` with what differs between platforms; its operators lie in ``backends/ops``, its row in
``pool/families.py``.  The layer captures records of segment requests and composes them, as the layout of the
pass says (``layout.py``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

import torch

from ...pool.families import FAMILIES, LinearFamily

if TYPE_CHECKING:
    from ...pool.runtime import HypicRuntime

CarryT = TypeVar("CarryT")


class Scratch(NamedTuple):
    """Bytes that a layer's operators take while they run, and that it keeps between passes."""

    working: int
    carried: int


class LinearLayer(Generic[CarryT]):
    """Mixin before a stock layer.  ``CarryT``: what it keeps of an interior between prefill chunks."""

    family: ClassVar[LinearFamily]
    hypic_runtime: HypicRuntime | None = None
    """Set at start-up; ``None``: stock."""
    hypic_reached = False
    """Our core ran: a compiled graph of stock vLLM, taken from a cache, could pass it by."""
    carries: dict[str, CarryT]
    """What is carried, by segment request whose interior is cut."""

    def connect(self, runtime: HypicRuntime) -> None:
        """Take part in PIC from now on."""
        self.hypic_runtime, self.carries = runtime, {}
        runtime.carrying.append(self)

    def forget(self, request_id: str) -> None:
        """Drop what the segment request carried, if it did."""
        self.carries.pop(request_id, None)

    def refusal(self) -> str | None:
        """What of this layer neither stock code nor ours computes on the platform, or ``None``."""
        return None

    def kernel_refusal(self) -> str | None:
        """Why the platform's kernels do not serve this layer, or ``None``.  Its caches must be allocated."""
        raise NotImplementedError

    def warm_up(self, runtime: HypicRuntime) -> None:
        """Compile what layers like this one will run, so that no request waits for it."""

    def scratch(self, rows: int, dtype: torch.dtype) -> Scratch:
        """Device memory beside the pool for passes of at most ``rows`` token rows in ``dtype``."""
        raise NotImplementedError


def register_families() -> None:
    """Replace vLLM's layers of all families by ours for this platform.  May run any number of times."""
    for family in FAMILIES:
        importlib.import_module(family.module).register()
