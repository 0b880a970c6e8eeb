"""What an instance says of itself: everything that the router needs to plan as its engine does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from ...config.segment_parallel import Address
from ...primitives.keys import Namespace
from ...primitives.plan import PoolLimits
from ...primitives.policies import ModelTraits
from ...primitives.tokens import PrimitiveIds
from ...store.shared import IDENTITY_DIGITS

_Identity = Annotated[str, msgspec.Meta(pattern=rf"\A[0-9a-f]{{{IDENTITY_DIGITS}}}\Z")]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Limits(msgspec.Struct, frozen=True):
    pages: _Count
    slots: _Count
    page_tokens: Annotated[int, msgspec.Meta(ge=1)]
    tiles: _Count
    record_tiles: _Count


class _Wire(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/hypic/describe``; what a later version adds is ignored."""

    model: str | Annotated[list[str], msgspec.Meta(min_length=1)]
    namespace: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    landing: str
    events: str
    separator: _Count
    pdep: _Count
    pad: _Count
    link: str
    seam_tokens: _Count
    min_segment_tokens: _Count
    max_model_len: Annotated[int, msgspec.Meta(ge=1)]
    has_linear: bool
    has_attention: bool
    limits: _Limits
    instance: str
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    quadratic: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    shared_tiers: Annotated[list[_Identity], msgspec.Meta(max_length=64)] = []


class DescriptionError(ValueError):
    """An instance's description that makes no sense; the message says why."""


@dataclass(frozen=True)
class Description:
    """One engine process, as it described itself."""

    models: tuple[str, ...]
    """Names of its base model; the first is the one that segment requests use."""
    namespace: Namespace
    landing: str
    events: str
    instance: str
    """Random id of the process."""
    primitives: PrimitiveIds
    link: str
    seam_tokens: int
    min_segment_tokens: int
    max_model_len: int
    traits: ModelTraits
    limits: PoolLimits
    deadline_s: float | None = None
    """Longest that it lets a request wait for others; ``None``: it does not say."""
    quadratic: float = 0.0
    """Prefilling n tokens takes FLOPs in proportion to ``n + quadratic * n^2``."""
    shared_tiers: tuple[str, ...] = ()
    """Identities of the tiers that it shares with others, fastest first."""
    separator_text: str | None = None
    """The separator in prompts; ``None``: not known, so every text must be tokenised to find it."""

    @property
    def planning(self) -> tuple[object, ...]:
        """What a plan depends on."""
        return (
            self.primitives,
            self.link,
            self.seam_tokens,
            self.traits,
            self.namespace,
            self.limits,
            self.min_segment_tokens,
        )

    @staticmethod
    def parse(body: bytes, separator_text: str | None = None) -> Description:
        """``body`` is the answer.  Raises :class:`DescriptionError`."""
        try:
            wire = msgspec.json.decode(body, type=_Wire)
            for address in (wire.landing, wire.events):
                Address.parse(address)
            primitives = PrimitiveIds(wire.separator, wire.pdep, wire.pad)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as e:
            raise DescriptionError(f"its description cannot be used: {e}") from e
        limits = wire.limits
        return Description(
            models=(wire.model,) if isinstance(wire.model, str) else tuple(wire.model),
            namespace=Namespace(wire.namespace),
            landing=wire.landing,
            events=wire.events,
            instance=wire.instance,
            primitives=primitives,
            link=wire.link,
            seam_tokens=wire.seam_tokens,
            min_segment_tokens=wire.min_segment_tokens,
            max_model_len=wire.max_model_len,
            traits=ModelTraits(wire.has_linear, wire.has_attention),
            limits=PoolLimits(
                limits.pages,
                limits.slots,
                limits.page_tokens,
                wire.max_model_len - 1,
                limits.tiles,
                limits.record_tiles,
            ),
            deadline_s=wire.deadline_s,
            quadratic=wire.quadratic,
            shared_tiers=tuple(wire.shared_tiers),
            separator_text=separator_text,
        )
