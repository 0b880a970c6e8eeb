"""Segments computed alone, and prompts composed of them: the model's other two passes.

A prompt of n segments of L tokens and a query is, with a seam window w,

    stream = [head 1] | [tail 1][head 2] | ... | [tail n][query]        head, tail: w tokens

of which only the stream is computed. At the i-th `|` record i is applied: in the delta layers

    S <- T_i S + S_i,   the convolution's context becomes the record's,

and in the attention layers its columns, the interior tokens [w, L - w) of segment i, become visible to the
rows that follow. Their K is stored unrotated and rotated at positions i L + w, ... while read. A row's
attention is that over its public columns and that over the stream up to it, merged by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_hypic.backends.ops.gated_delta import GatedDeltaInputs, GatedDeltaWeights
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack

from .layers import DeltaRecords, Stack, empty_caches, empty_core, empty_records
from .operators import Operators, SpanRows
from .private import causal_attention

PAGE = 16
"""Tokens of a page, as in the plugin's pool."""


@dataclass(frozen=True)
class Composition:
    """``segments`` of ``length`` tokens, then ``query`` tokens; ``window`` w on either side of a boundary."""

    segments: int
    length: int
    query: int
    window: int = 8

    def __post_init__(self) -> None:
        if self.window < 0 or self.length <= 2 * self.window:
            raise ValueError(
                f"segments of {self.length} tokens have no interior at a window of {self.window}"
            )
        if self.segments < 1 or self.query < 1:
            raise ValueError(f"{self.segments} segments, {self.query} tokens of query: expected at least 1")

    @property
    def tokens(self) -> int:
        return self.segments * self.length + self.query

    @property
    def interior(self) -> int:
        return self.length - 2 * self.window

    def positions(self) -> Tensor:
        """Logical position of every stream row, int64: the stream is the prompt's tokens at these places."""
        w, L = self.window, self.length
        seams = torch.cat([torch.arange(w), torch.arange(L - w, L)])
        starts = L * torch.arange(self.segments)
        return torch.cat([(starts[:, None] + seams).flatten(), torch.arange(self.segments * L, self.tokens)])

    def composed_before(self) -> Tensor:
        """How many records are applied before each stream row, int64."""
        seams = torch.cat([torch.zeros(self.window), torch.ones(self.window)]).long()
        inside = (torch.arange(self.segments)[:, None] + seams).flatten()
        return torch.cat([inside, torch.full((self.query,), self.segments)])

    def kv_positions(self) -> Tensor:
        """Logical position of every public column, int64."""
        inside = torch.arange(self.window, self.length - self.window)
        return (self.length * torch.arange(self.segments)[:, None] + inside).flatten()

    def operations(self, mode: Mode = Mode.TRANSITION) -> list[ComposeOp]:
        """Operations of a stream that begins at row 0, record i in slot i."""
        counts = torch.bincount(self.composed_before(), minlength=self.segments + 1).tolist()
        operations, first = [], 0
        for i, count in enumerate(counts):
            last = i == self.segments
            operations.append(ComposeOp(first, count, -1 if last else i, Mode.NONE if last else mode))
            first += count
        return operations


@dataclass(frozen=True)
class AttentionRecords:
    """An attention layer's public ``key`` and ``value [pages * PAGE, kv_heads, size]``, K not rotated."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Pool:
    """All records of a prompt. ``slots [segments, interior]`` int64: where the columns of a record lie."""

    attention: dict[int, AttentionRecords]
    delta: dict[int, DeltaRecords]
    slots: Tensor

    @staticmethod
    def empty(stack: Stack, prompt: Composition, seed: int = 0) -> Pool:
        """Uninitialised. Every head may store its transition; pages lie in random order."""
        s, a, n = stack.shape, stack.shape.attention, prompt.segments
        pages_each = -(-prompt.interior // PAGE)
        pages = torch.randperm(n * pages_each, generator=torch.Generator().manual_seed(seed)).view(n, -1)
        slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)[:, : prompt.interior]
        attention, delta = {}, {}
        for i in range(s.layers):
            if s.is_attention(i):
                kv = torch.empty(
                    2, n * pages_each * PAGE, a.kv_heads, a.size, dtype=stack.dtype, device=stack.device
                )
                attention[i] = AttentionRecords(kv[0], kv[1])
            else:
                delta[i] = empty_records(stack, n)
        return Pool(attention, delta, slots.to(stack.device))


class SegmentPass:
    """Segments ``[first, stop)`` of a prompt, each alone from position 0, side by side; their records.

    A segment's tokens end with its interior: later ones have no part in the record.
    """

    def __init__(
        self,
        stack: Stack,
        prompt: Composition,
        pool: Pool,
        segments: range,
        operators: Operators,
    ) -> None:
        self.stack, self.pool, self.operators = stack, pool, operators
        self.segments, self.count = segments, len(segments)
        self.length = prompt.length - prompt.window
        device, w, n = stack.device, prompt.window, self.length
        rows = [
            SegmentRow(i, 0, i * n, (i + 1) * n, i * n + w, (i + 1) * n, slot, 0, 1, 1, int(w > 0), -1)
            for i, slot in enumerate(segments)
        ]
        self.step = operators.segments(pack(rows, SegmentRow), device)
        heads = stack.shape.delta.heads
        first, stop = segments.start * heads, segments.stop * heads
        self.blocks = torch.arange(first, stop, dtype=torch.int32, device=device).view(-1, heads)
        self.caches = empty_caches(stack, self.count)
        interior = torch.arange(w, n)
        self.positions = torch.arange(n).repeat(self.count).to(device)
        self.rows = (n * torch.arange(self.count)[:, None] + interior).flatten().to(device)
        self.slots = pool.slots[segments.start : segments.stop].flatten()
        self.row_positions = interior.repeat(self.count).to(device)

    def run(self, prompt_tokens: Tensor) -> None:
        """``prompt_tokens [segments, length]``: of these segments, whole."""
        for records in self.pool.delta.values():
            # Every head gets its transition block back: an earlier run may have found it dead.
            records.block_of[self.segments.start : self.segments.stop] = self.blocks
        self.stack.forward(prompt_tokens[:, : self.length].flatten(), self)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (t.unflatten(0, (self.count, self.length)).transpose(1, 2) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.stack.shape.attention.scale, enable_gqa=True
        )
        to, table = self.pool.attention[layer], self.stack.table
        self.operators.capture(
            (to.key, to.value), key, value, self.rows, self.slots, self.row_positions, table
        )
        return out.transpose(1, 2).flatten(0, 1)

    def scan(self, layer: int, x: GatedDeltaInputs, weights: GatedDeltaWeights) -> Tensor:
        out = empty_core(self.stack, x)
        self.step.run(x, weights, self.caches, out, self.pool.delta[layer])
        return out


class ComposedPass:
    """A composed prompt's stream over records that are complete."""

    def __init__(
        self,
        stack: Stack,
        prompt: Composition,
        pool: Pool,
        operators: Operators,
        mode: Mode = Mode.TRANSITION,
    ) -> None:
        """``mode``: ``Mode.ADD`` leaves the transitions out, which is wrong and shows in a gate."""
        self.stack, self.pool, self.operators = stack, pool, operators
        device, positions = stack.device, prompt.positions()
        self.positions = positions.to(device)
        operations = prompt.operations(mode)
        row = ComposeRow(0, 0, 0, len(operations))
        self.step = operators.compose(pack([row], ComposeRow), pack(operations, ComposeOp), device)
        # Rows before the first compose point see no public column.
        self.blind = blind = operations[0].tokens
        public = SpanRows(
            [pool.slots.flatten()],
            [prompt.kv_positions().to(device)],
            np.array([(blind, len(positions))]),
            (prompt.composed_before()[blind:] * prompt.interior).numpy(),
        )
        self.span = operators.span(public, stack.shape.attention, stack.dtype)
        self.caches = {i: empty_caches(stack, 1) for i in pool.delta}

    def run(self, prompt_tokens: Tensor) -> Tensor:
        """``prompt_tokens [tokens]``: of the whole prompt; logits of the first answer token."""
        return self.stack.logits(self.stack.forward(prompt_tokens.index_select(0, self.positions), self))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scale, records = self.stack.shape.attention.scale, self.pool.attention[layer]
        out, lse = causal_attention(query, key, value, scale)
        public = self.span.attend(query, records.key, records.value, self.stack.table, scale)
        self.span.merge_(out, lse[self.blind :], *public)
        return out

    def scan(self, layer: int, x: GatedDeltaInputs, weights: GatedDeltaWeights) -> Tensor:
        out = empty_core(self.stack, x)
        self.step.run(x, weights, self.caches[layer], out, self.pool.delta[layer])
        return out

    def state(self, layer: int) -> Tensor:
        """[Hv, K, V] float32, after the run."""
        return self.caches[layer].state[0]
