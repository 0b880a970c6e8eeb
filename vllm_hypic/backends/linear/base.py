"""The interface between the layers of linear-attention families and the rest of the package.

The folder of a family has a subclass of :class:`LinearLayer` and of vLLM's layer, with a file per platform if
platforms differ.  Its operators are in ``backends/ops``, and its entry is in ``pool/families.py``.  The layer
captures records of segment requests and composes records, by the layout of the pass (``layout.py``):

* An operator runs segment requests and writes outputs, running states and records.
* A second operator runs composed requests with compose points in this pass, up to the first block boundary
  after the last point.
* Stock code runs all other rows alone, with stock bits: plain requests, decode, and the rows of composed
  requests after that boundary.
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
    """The bytes of a layer: ``working`` while its operators run, ``carried`` between passes."""

    working: int
    carried: int


class Rows(Protocol):
    """A layer's inputs for the token rows of a batch."""

    def part(self, tokens: slice | torch.Tensor) -> Self:
        """Return the inputs of the rows ``tokens``."""


InputsT = TypeVar("InputsT", bound=Rows)


@dataclass
class _SharedParts:
    """The values of one pass that its linear layers share."""

    stock: Once[tuple[StockRows, ForwardContext] | None] = field(default_factory=Once)
    """The rows that stock code runs, and a forward context for these rows alone."""
    offered: bool = False
    """Whether the records that become complete in this pass have transition blocks."""


class LinearLayer(Generic[InputsT, CarryT]):
    """Mixin before a stock layer that captures and composes records.

    ``InputsT``: the layer's inputs; ``CarryT``: the layer's data of an interior between prefill chunks.  The
    subclass of a platform calls :meth:`run` from the stock forward pass and implements the methods that run
    stock code and our operators.
    """

    prefix: str
    cache_config: Any
    kv_cache: tuple[torch.Tensor, ...]
    """vLLM's caches of states, indexed by slot."""
    family: ClassVar[LinearFamily]
    hypic_runtime: HypicRuntime | None = None
    """The runtime that start-up sets; ``None`` runs stock code."""
    hypic_reached = False
    """Whether :meth:`run` has run: a compiled graph from the cache of stock vLLM would bypass it."""
    carries: dict[str, CarryT]
    """The carried data of each segment request whose interior spans several prefill chunks."""

    def weights_changed(self) -> None:
        """Drop all values derived from weights, so that the next pass derives them again."""

    # -- a pass --------------------------------------------------------------------------------

    def run(self, x: InputsT, out: torch.Tensor) -> None:
        """Run the whole batch into ``out [token rows, ...]``; capture and compose records for the step."""
        if not self.hypic_reached:  # the test comes first, because setting an attribute of a module is slow
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
        # Stock code runs last, because it continues from the states that our operators write.
        stock = step.shared.of(_SharedParts).stock(lambda: self._stock_context(runtime, step, work))
        if stock is not None:
            rows, context = stock
            self._run_part(rows.tokens, context, x, out)

    def _run_part(
        self, tokens: slice | torch.Tensor, context: ForwardContext, x: InputsT, out: torch.Tensor
    ) -> None:
        """Run stock code over the token rows ``tokens``, with a forward context for these rows alone."""
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
        """Run a batch in which requests decode with drafts into ``out``: see :mod:`.drafted`."""
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
        """Run our operators over the rows of segment requests and composed requests, into ``out``."""
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
        """Run vLLM's own code into ``out``, over the batch that the forward context describes."""
        raise NotImplementedError

    def run_segments(
        self, runtime: HypicRuntime, step: StepContext, segments: Segments, x: InputsT, out: torch.Tensor
    ) -> None:
        """Run the platform's operator for segment requests into ``out``; write states and records."""
        raise NotImplementedError

    def run_composed(
        self, runtime: HypicRuntime, step: StepContext, composed: Composed, x: InputsT, out: torch.Tensor
    ) -> None:
        """Run the platform's operator for composed requests into ``out``; write states."""
        raise NotImplementedError

    def sub_batch(self, step: StepContext, metadata: Any, rows: StockRows) -> Any:
        """Return stock code's metadata for a sub-batch of the rows ``rows``."""
        raise NotImplementedError

    def requests(self, metadata: Any) -> int:
        """Return the number of requests that vLLM's metadata describes."""
        found: int = metadata.num_decodes + metadata.num_prefills
        return found

    def drafted(self, metadata: Any) -> Drafted | None:
        """Return the batch of vLLM's metadata if it has requests that decode with drafts and that stock code
        cannot run; else ``None``."""
        return None

    def sub_batch_at(self, metadata: Any, rows: StockRows, slots: torch.Tensor) -> Any:
        """Return stock code's metadata for a sub-batch whose states are in ``slots [requests]`` int32."""
        raise NotImplementedError

    def carried(self, segments: Segments, new: Callable[[], CarryT]) -> list[CarryT]:
        """Return the carried data of each interior that spans passes; ``new`` makes it for a new interior."""
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
        # Layers of one KV cache group share their metadata, so they also share the metadata of the sub-batch.
        parts = {id(whole[name]): whole[name] for name in runtime.pool.linear}
        subs = {key: self.sub_batch(step, metadata, rows) for key, metadata in parts.items()}
        own = {name: subs[id(whole[name])] for name in runtime.pool.linear}
        return rows, replace(context, attn_metadata=own)

    # -- an engine's life ----------------------------------------------------------------------

    def connect(self, runtime: HypicRuntime) -> None:
        """Make the layer take part in PIC from now on."""
        self.hypic_runtime, self.carries = runtime, {}
        runtime.carrying.append(self)

    def forget(self, request_id: str) -> None:
        """Drop the carried data of a segment request, if the layer has any."""
        self.carries.pop(request_id, None)

    def append_record(self, runtime: HypicRuntime, slot: int, base: int) -> None:
        """Do this layer's part of :meth:`.HypicRuntime.append_record`."""
        with appending(runtime, self.prefix, slot, base) as (records, own, before):
            self.append(records, own, before, runtime.dead_transition)

    def append(self, records: StateRecords, slot: int, base: int, dead_transition: float) -> None:
        """Turn the record in ``slot`` into the record of both segments, by the family's arithmetic."""
        appended.append(records, slot, base, dead_transition)

    def refusal(self) -> str | None:
        """Return why neither stock code nor our operators run this layer on the platform, or ``None``."""
        return None

    def kernel_refusal(self) -> str | None:
        """Return why the platform's kernels do not serve this layer, or ``None``.  Needs allocated caches."""
        raise NotImplementedError

    def warm_up(self, runtime: HypicRuntime) -> None:
        """Compile the operators of all layers with this layer's shapes, so that no request waits for it."""

    def scratch(self, rows: int, dtype: torch.dtype) -> Scratch:
        """Return the bytes beside the pool for passes of at most ``rows`` token rows in ``dtype``."""
        return Scratch(0, 0)  # a layer without operators for the platform is refused later, by name


def _once(context: ForwardContext) -> OncePer:
    """Return the store of values that the layers of a pass share, keyed by vLLM's metadata."""
    found: OncePer = context.additional_kwargs.setdefault("hypic", OncePer())
    return found


def _offer_blocks(runtime: HypicRuntime, step: StepContext, segments: Iterable[Segments]) -> None:
    """Allocate transition blocks for the records that become complete here, once for all layers of a pass."""
    shared = step.shared.of(_SharedParts)
    if not shared.offered:
        shared.offered = True
        for slot in (slot for part in segments for slot in part.ended):
            runtime.pool.transition_blocks.offer(slot)


def replace_layer(stock: Any, ours: Callable[[], Any]) -> None:
    """Make vLLM instantiate the class ``ours()`` in place of ``stock``.  Repeated calls are safe."""
    from vllm.model_executor.custom_op import op_registry_oot

    if stock.__name__ in op_registry_oot:
        return
    # `register_oot` overwrites `name`, by which vLLM looks up the options of the class.
    name, chosen = stock.name, ours()
    stock.register_oot(chosen)
    chosen.name = name


def register_families() -> None:
    """Replace vLLM's layers of all families by ours for this platform.  Repeated calls are safe."""
    for family in FAMILIES:
        importlib.import_module(family.module).register()
