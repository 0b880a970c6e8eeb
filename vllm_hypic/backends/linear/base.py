"""What a linear-attention family's layers offer PIC: the seam between families and the rest of the package.

A family is a folder with a subclass of :class:`LinearLayer` and of vLLM's layer, a file for each platform
where they differ; its operators lie in ``backends/ops``, its row in ``pool/families.py``.  The layer captures
records of segment requests and composes them, as the layout of the pass says (``layout.py``):

* Segment requests go through an operator that leaves outputs, running state and the record.
* Composed requests with compose points in this pass go through another, up to the first block boundary after
  the last point.
* All else (plain requests, decode, what composed requests run after that boundary) is stock code over these
  rows only: stock bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from ...pool import appended
from ...pool.families import FAMILIES, LinearFamily
from ...pool.shared import Once, OncePer
from .copied import appending, capturing, reading
from .drafted import Drafted, parts, special_part
from .layout import NO_STEP, Composed, LinearStep, Segments, StockRows, linear_step, stock_rows

if TYPE_CHECKING:
    from ...pool.runtime import HypicRuntime
    from ...pool.step import StepContext
    from ...pool.tensors import StateRecords

CarryT = TypeVar("CarryT")


class Scratch(NamedTuple):
    """Bytes that a layer's operators take while they run, and that it keeps between passes."""

    working: int
    carried: int


class Rows(Protocol):
    """What a layer is given of a batch's token rows."""

    def part(self, tokens: slice | torch.Tensor) -> Self:
        """These rows alone."""


InputsT = TypeVar("InputsT", bound=Rows)


@dataclass
class _SharedParts:
    """What the linear layers share of one pass."""

    stock: Once[tuple[StockRows, ForwardContext] | None] = field(default_factory=Once)
    """The rows that stock code runs, and a forward context that holds only them."""
    offered: bool = False
    """The records that become complete have transition blocks."""


class LinearLayer(Generic[InputsT, CarryT]):
    """Mixin before a stock layer.  ``InputsT``: its token rows; ``CarryT``: what it keeps of an interior
    between prefill chunks.

    A platform's subclass leads the stock forward pass to :meth:`run` and says what stock code and our
    operators are there.
    """

    prefix: str
    cache_config: Any
    kv_cache: tuple[torch.Tensor, ...]
    """vLLM's caches of states, by slot."""
    family: ClassVar[LinearFamily]
    hypic_runtime: HypicRuntime | None = None
    """Set at start-up; ``None``: stock."""
    hypic_reached = False
    """Our core ran: a compiled graph of stock vLLM, taken from a cache, could pass it by."""
    carries: dict[str, CarryT]
    """What is carried, by segment request whose interior is cut."""

    def weights_changed(self) -> None:
        """What is derived from weights is made anew before the next pass."""

    # -- a pass --------------------------------------------------------------------------------

    def run(self, x: InputsT, out: torch.Tensor) -> None:
        """The whole batch into ``out [token rows, ...]``, captured and composed as the step says."""
        if not self.hypic_reached:  # asked first: setting an attribute of a module is slow
            self.hypic_reached = True
        runtime = self.hypic_runtime
        if runtime is None:
            return self.run_stock(x, out)
        step = runtime.step
        work = NO_STEP if step is None else linear_step(step, self.cache_config.block_size)
        if (drafted := self._drafted_here()) is not None:
            return self._run_drafted(runtime, drafted, work, x, out)
        if step is None or work.empty:
            return self.run_stock(x, out)
        self.run_special(runtime, step, work, x, out)
        # After ours: it goes on from the states that they left.
        stock = step.shared.of(_SharedParts).stock(lambda: self._stock_context(runtime, step, work))
        if stock is not None:
            rows, context = stock
            self._run_part(rows.tokens, context, x, out)

    def _run_part(
        self, tokens: slice | torch.Tensor, context: ForwardContext, x: InputsT, out: torch.Tensor
    ) -> None:
        """Stock code over these token rows, which the context describes."""
        part = out[tokens]
        with override_forward_context(context):
            self.run_stock(x.part(tokens), part)
        if not isinstance(tokens, slice):
            out.index_copy_(0, tokens, part)

    def _drafted_here(self) -> Drafted | None:
        context = get_forward_context()
        if not isinstance(by_layer := context.attn_metadata, dict):
            return None
        if (metadata := by_layer.get(self.prefix)) is None:
            return None
        once = _once(context)
        found: Drafted | None = once(metadata, Drafted, lambda: self.drafted(metadata))
        return found

    def _run_drafted(
        self, runtime: HypicRuntime, drafted: Drafted, work: LinearStep, x: InputsT, out: torch.Tensor
    ) -> None:
        """A batch in which requests decode with drafts: see :mod:`.drafted`."""
        context = get_forward_context()
        metadata, once = context.attn_metadata[self.prefix], _once(context)

        def of(rows: StockRows, slots: torch.Tensor) -> Any:
            return self.sub_batch_at(metadata, rows, slots)

        runtime.calls["drafted"] += 1
        if runtime.step is not None and not work.empty:
            whole = once(metadata, special_part, lambda: special_part(drafted, work, of))
            whole.move(self.kv_cache)
            with override_forward_context(replace(context, attn_metadata={self.prefix: whole.metadata})):
                self.run_special(runtime, runtime.step, work, x, out)
        for part in once(metadata, parts, lambda: parts(drafted, work, of)):
            part.move(self.kv_cache)
            self._run_part(part.tokens, replace(context, attn_metadata={self.prefix: part.metadata}), x, out)

    def run_special(
        self, runtime: HypicRuntime, step: StepContext, work: LinearStep, x: InputsT, out: torch.Tensor
    ) -> None:
        """The rows that our operators run."""
        if work.contexts is not None:
            runtime.calls["compose_context"] += 1
            with reading(runtime, step, self.prefix, work.contexts) as program:
                self.run_composed(runtime, step, program, x, out)
        if work.segments:
            _offer_blocks(runtime, step, work.segments)
        for segments in work.segments:
            runtime.calls["capture_linear"] += 1
            with capturing(runtime, step, self.prefix, segments) as capture:
                self.run_segments(runtime, step, capture, x, out)
        if work.composed is not None:
            runtime.calls["compose"] += 1
            with reading(runtime, step, self.prefix, work.composed) as program:
                self.run_composed(runtime, step, program, x, out)

    def run_stock(self, x: InputsT, out: torch.Tensor) -> None:
        """vLLM's own code over the batch that the forward context describes."""
        raise NotImplementedError

    def run_segments(
        self, runtime: HypicRuntime, step: StepContext, segments: Segments, x: InputsT, out: torch.Tensor
    ) -> None:
        """The platform's operator for segment requests."""
        raise NotImplementedError

    def run_composed(
        self, runtime: HypicRuntime, step: StepContext, composed: Composed, x: InputsT, out: torch.Tensor
    ) -> None:
        """The platform's operator for composed requests."""
        raise NotImplementedError

    def sub_batch(self, step: StepContext, metadata: Any, rows: StockRows) -> Any:
        """Stock code's metadata of a sub-batch."""
        raise NotImplementedError

    def requests(self, metadata: Any) -> int:
        """How many requests vLLM's metadata describes."""
        found: int = metadata.num_decodes + metadata.num_prefills
        return found

    def drafted(self, metadata: Any) -> Drafted | None:
        """The batch that vLLM's metadata of this layer describes, if requests decode with drafts in it and
        stock code does not run these."""
        return None

    def sub_batch_at(self, metadata: Any, rows: StockRows, slots: torch.Tensor) -> Any:
        """Stock code's metadata of a sub-batch whose states are in ``slots [requests]``, int32."""
        raise NotImplementedError

    def carried(self, segments: Segments, new: Callable[[], CarryT]) -> list[CarryT]:
        """What the interiors that are cut here carry, written by this pass or an earlier one."""
        for request, starts in zip(segments.carried, segments.starting, strict=True):
            if starts:
                self.carries[request] = new()
        return [self.carries[request] for request in segments.carried]

    def _stock_context(
        self, runtime: HypicRuntime, step: StepContext, work: LinearStep
    ) -> tuple[StockRows, ForwardContext] | None:
        context = get_forward_context()
        whole = context.attn_metadata
        batch = whole[self.prefix]
        requests = self.requests(batch)
        rows = stock_rows(
            work, step.batch.starts[: requests + 1], step.batch.computed[:requests], batch.num_decodes
        )
        if rows is None:
            return None
        if not isinstance(rows.tokens, slice):
            (tokens,) = step.on_device(rows.tokens.numpy())
            rows = replace(rows, tokens=tokens)
        # Layers of one group share their metadata, and so the sub-batch's.
        parts = {id(whole[name]): whole[name] for name in runtime.pool.linear}
        subs = {key: self.sub_batch(step, metadata, rows) for key, metadata in parts.items()}
        own = {name: subs[id(whole[name])] for name in runtime.pool.linear}
        return rows, replace(context, attn_metadata=own)

    # -- an engine's life ----------------------------------------------------------------------

    def connect(self, runtime: HypicRuntime) -> None:
        """Take part in PIC from now on."""
        self.hypic_runtime, self.carries = runtime, {}
        runtime.carrying.append(self)

    def forget(self, request_id: str) -> None:
        """Drop what the segment request carried, if it did."""
        self.carries.pop(request_id, None)

    def append_record(self, runtime: HypicRuntime, slot: int, base: int) -> None:
        """See :meth:`.HypicRuntime.append_record`."""
        with appending(runtime, self.prefix, slot, base) as (records, own, before):
            self.append(records, own, before, runtime.dead_transition)

    def append(self, records: StateRecords, slot: int, base: int, dead_transition: float) -> None:
        """What the family does for that."""
        appended.append(records, slot, base, dead_transition)

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


def _once(context: ForwardContext) -> OncePer:
    """What the layers share of one pass, by vLLM's metadata."""
    found: OncePer = context.additional_kwargs.setdefault("hypic", OncePer())
    return found


def _offer_blocks(runtime: HypicRuntime, step: StepContext, segments: Iterable[Segments]) -> None:
    """Transition blocks for the records that become complete here, once for all layers of a pass."""
    shared = step.shared.of(_SharedParts)
    if not shared.offered:
        shared.offered = True
        for slot in (slot for part in segments for slot in part.ended):
            runtime.pool.transition_blocks.offer(slot)


def replace_layer(stock: Any, ours: Callable[[], Any]) -> None:
    """Have vLLM make ``ours()`` where it would make ``stock``.  May run any number of times."""
    from vllm.model_executor.custom_op import op_registry_oot

    if stock.__name__ in op_registry_oot:
        return
    # Registering renames the class by which vLLM looks up its options.
    name, chosen = stock.name, ours()
    stock.register_oot(chosen)
    chosen.name = name


def register_families() -> None:
    """Replace vLLM's layers of all families by ours for this platform.  May run any number of times."""
    for family in FAMILIES:
        importlib.import_module(family.module).register()
