"""What code of ours may not do in a pass on a GPU, found on the CPU, and how much memory the pass takes.

It may not wait for the device, nor bring host memory to it but by uploads, nor use both beside each other.

What lies on the device is marked by its storage: what a test says does (:meth:`Device.own`), what uploads
return, what is made of such tensors, and what code of ours makes with ``device=``.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

import vllm_hypic
from vllm_hypic.backends.linear import mamba_rows
from vllm_hypic.backends.linear.gdn import cuda as gdn
from vllm_hypic.backends.linear.mamba2 import cuda as mamba2
from vllm_hypic.backends.ops.linear_layer.triton import plan as layer_plan
from vllm_hypic.backends.ops.span_attention import plan as span_plan
from vllm_hypic.engine import drafter, worker
from vllm_hypic.pool import decoding, draft_steps, learned, transition_blocks
from vllm_hypic.pool import step as pool_step

OURS = f"{vllm_hypic.__path__[0]}/"
aten = torch.ops.aten
_WAITS = {
    aten._local_scalar_dense.default: "a number is read (item, bool, int)",
    aten.nonzero.default: "nonzero, or a mask as an index",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
    aten.equal.default: "equal",
}
_INDEXES = aten.index.Tensor, aten.index_put_.default, aten.index_put.default
_MASKS = torch.bool, torch.uint8
_MAKES = ("empty", "zeros", "ones", "full", "arange")
_READS = ("tolist", "numpy", "cpu", "item", "__array__")
_UPLOAD = pool_step, transition_blocks, decoding, draft_steps, learned, worker, drafter
UPLOADS = (
    *((module, "upload") for module in _UPLOAD),
    (learned, "send"),
    (span_plan, "_copy"),
    (layer_plan, "_upload"),
    *((module, "async_tensor_h2d") for module in (gdn, mamba2)),
    *((module, "compute_causal_conv1d_metadata") for module in (gdn, mamba_rows)),
)
"""What brings arrays to the device: from pinned memory, or as vLLM's own builders do."""


def our_line(*passed: str) -> str | None:
    """Where in the package the innermost frame is that is neither PyTorch's nor of this file, nor of others
    whose names have one of ``passed`` in them."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            return f"{name[len(OURS) :]}:{frame.f_lineno}"
        if name != __file__ and not any(part in name for part in ("/torch/", *passed)):
            return None
        frame = frame.f_back
    return None


def tensors(of: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]


class Device(TorchDispatchMode):
    """``broken``: what was done against the rules, and where; ``peak``: bytes that code of ours held at most
    at a time of what it allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[str] = set()
        self.held = self.peak = 0
        self._stock = False
        self._there = set[int]()
        self._counted = set[int]()

    def own(self, *given: Any) -> None:
        """These tensors lie on the device."""
        for tensor in tensors(given):
            self._mark(tensor)

    def count(self, *made: Any) -> None:
        """These tensors were allocated for code of ours."""
        for tensor in tensors(made):
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self._counted:
                continue
            self._counted.add(key)
            self.held += nbytes
            if self.held > self.peak:
                gc.collect()  # the interpreter keeps what it launched in cycles
                self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._left, key, nbytes)

    def stock(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` stands in for stock code, whatever of ours it is made of."""

        def called(*args: Any, **kwargs: Any) -> Any:
            before, self._stock = self._stock, True
            try:
                return run(*args, **kwargs)
            finally:
                self._stock = before

        return called

    def there(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or tensor.untyped_storage()._cdata in self._there

    def note(self, what: str, *passed: str) -> None:
        if not self._stock and (line := our_line(*passed)) is not None:
            self.broken.add(f"{line}: {what}")

    def _mark(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._there:
            self._there.add(storage._cdata)
            weakref.finalize(storage, self._there.discard, storage._cdata)

    def _left(self, key: int, nbytes: int) -> None:
        self._counted.discard(key)
        self.held -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        there = [self.there(tensor) for tensor in given]
        on_device = any(is_there and t.numel() for t, is_there in zip(given, there, strict=True))
        if on_device:
            self._check(func, args, given, there)
        before = {t.untyped_storage()._cdata for t in given}
        result = func(*args, **kwargs)
        ours = on_device and not self._stock and our_line() is not None
        for made in tensors(result):
            if on_device:
                self._mark(made)
            if ours and made.untyped_storage()._cdata not in before:
                self.count(made)
        return result

    def _check(self, func: Any, args: Any, given: list[torch.Tensor], there: list[bool]) -> None:
        if (what := _WAITS.get(func)) is not None:
            self.note(what)
        elif func in _INDEXES and any(t is not None and t.dtype in _MASKS for t in args[1]):
            self.note("a mask as an index")
        if any(t.dim() and not is_there for t, is_there in zip(given, there, strict=True)):
            self.note(f"{func}: what lies on the host beside what lies on the device")


@contextmanager
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A pass runs here."""
    here = Device()

    def watched(name: str) -> None:
        stock = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if here.there(tensor):
                here.note(f"{name}()")
            return stock(tensor, *args, **kwargs)

        patch.setattr(torch.Tensor, name, read)

    def uploading(module: Any, name: str) -> None:
        stock = getattr(module, name)

        def upload(*args: Any, **kwargs: Any) -> Any:
            made = stock(*args, **kwargs)
            here.own(made)
            if stock.__module__.startswith(vllm_hypic.__name__):  # vLLM makes as much for all of a batch
                here.count(made)
            return made

        patch.setattr(module, name, upload)

    def making(name: str) -> None:
        stock = getattr(torch, name)

        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = stock(*args, **kwargs)
            if kwargs.get("device") is None:
                return made
            ours = our_line() is not None
            if ours or isinstance(kwargs["device"], torch.device):  # stock code names the host by a string
                here.own(made)
            if ours and not here._stock:
                here.count(made)
            return made

        patch.setattr(torch, name, make)

    made, launch = torch.tensor, GridExecutor.__call__

    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None:
            here.note("torch.tensor(..., device=)")
        return made(data, *args, **kwargs)

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        for one in tensors((args, kwargs)):
            if not here.there(one):
                here.note(f"a kernel is given {one.dtype} {tuple(one.shape)} of the host", "/triton/runtime/")
        launch(executor, *args, **kwargs)

    with monkeypatch.context() as patch:
        for name in _READS:
            watched(name)
        for name in _MAKES:
            making(name)
        for module, name in UPLOADS:
            uploading(module, name)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(GridExecutor, "__call__", launched)
        gc.collect(), gc.freeze()
        try:
            with here:
                yield here
        finally:
            gc.unfreeze()
