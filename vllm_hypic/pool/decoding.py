"""The state that passes share in which each request generates one token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

import numpy as np
import torch

from .plans import StreamPlan
from .upload import upload

T = TypeVar("T")


class Later(Sequence[T], Generic[T]):
    """A sequence that is computed at its first use."""

    def __init__(self, make: Callable[[], list[T]]) -> None:
        self._make = make
        self._made: list[T] | None = None

    @property
    def made(self) -> list[T]:
        if self._made is None:
            self._made = self._make()
        return self._made

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        return self.made[at]

    def __len__(self) -> int:
        return len(self.made)

    def __iter__(self) -> Iterator[T]:
        return iter(self.made)


@dataclass(frozen=True)
class Decoding:
    """Composed requests that generate, in a batch with one row per request and without captures.

    ``requests``: ids of the batch's requests; ``rows [composed]`` int64: rows of the composed requests, on
    the host and (``rows_on_device``) on the device; ``floor [requests]`` int64: stream index from which on
    each request generates; ``shifts [composed]``: distance from a token's stream index to its logical
    position, on the device; ``slot_mapping``, ``kv_positions``: all public columns of each composed request;
    ``columns``: their number.  Passes share one object as long as these values stay the same.
    """

    requests: list[str]
    rows: np.ndarray
    rows_on_device: torch.Tensor
    floor: np.ndarray
    shifts: torch.Tensor
    slot_mapping: list[torch.Tensor]
    kv_positions: list[torch.Tensor]
    columns: int

    def goes_on(self, requests: Sequence[str], computed: np.ndarray) -> bool:
        """Whether this object holds for a pass over ``requests``, which have ``computed`` tokens each."""
        return self.requests == requests and bool((computed >= self.floor).all())

    @staticmethod
    def nothing(rows: int, device: torch.device) -> Decoding:
        """Return the object for a pass over ``rows`` requests, none of which is composed."""
        host, none = np.zeros(0, dtype=np.int64), torch.zeros(0, dtype=torch.int64, device=device)
        return Decoding([""] * rows, host, none, np.zeros(rows, dtype=np.int64), none, [], [], 0)

    @staticmethod
    def of(
        requests: Sequence[str],
        streams: Mapping[int, tuple[StreamPlan, torch.Tensor, torch.Tensor]],
        computed: np.ndarray,
        device: torch.device,
    ) -> Decoding | None:
        """Return the object for a pass, or ``None`` if a request is still composing or in its prompt.

        ``streams``: each composed batch row's plan and its columns on the device, rows ascending."""
        floor = np.zeros(len(requests), dtype=np.int64)
        for row, (plan, *_) in streams.items():
            ends = [p.at + 1 for p in plan.points[-1:]] + [end for _, end in plan.islands[-1:]]
            floor[row] = max([len(plan.positions), *ends])
        if not streams or (computed < floor).any():
            return None
        rows = np.array(list(streams), dtype=np.int64)
        shifts = [plan.n_logical - len(plan.positions) for plan, *_ in streams.values()]
        slots = [found[1] for found in streams.values()]
        positions = [found[2] for found in streams.values()]
        on_device = upload([rows, np.array(shifts)], device)
        return Decoding(
            list(requests),
            rows,
            on_device[0],
            floor,
            on_device[1],
            slots,
            positions,
            sum(len(s) for s in slots),
        )
