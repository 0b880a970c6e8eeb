"""An instance's own description (``GET /v1/hypic/describe``), with which routers plan as the engine does."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..config.segment_parallel import Address
from ..primitives.options import LinkDefaults
from ..primitives.plan import PoolLimits
from ..primitives.policies import ModelTraits
from ..primitives.tokens import PrimitiveIds
from ..store.shared import IDENTITY_DIGITS

_Count = Annotated[int, Meta(ge=0)]
_Identity = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{IDENTITY_DIGITS}}}\Z")]


class Description(
    msgspec.Struct, frozen=True, kw_only=True, rename={"models": "model", "receiver": "landing"}
):
    """One engine process.  What a later version adds is ignored."""

    instance: Annotated[str, Meta(description="Id of the engine's process, new at every start.")]
    models: Annotated[
        tuple[str, ...],
        Meta(description="Names under which the model is served, without adapters.", min_length=1),
    ]
    namespace: Annotated[
        str,
        Meta(description="Only instances of one namespace exchange records.", min_length=1, max_length=256),
    ]
    generation: Annotated[
        str,
        Meta(
            description="Name of the weights: only instances with equal names compute the same records; "
            "empty: the weights that the server started with.",
            max_length=256,
        ),
    ] = ""
    receiver: Annotated[str, Meta(description="Address of the receiver of records: `tcp://HOST:PORT`.")]
    events: Annotated[str, Meta(description="Address of the events on cached records: `tcp://HOST:PORT`.")]
    ranks: Annotated[
        int,
        Meta(
            description="Number of ranks; each rank has a part of every record, and rank n receives its "
            "parts at the receiver's port plus n.",
            ge=1,
            le=4096,
        ),
    ] = 1
    separator: _Count
    pdep: _Count
    pad: _Count
    link: str
    seam_tokens: _Count
    context: str = "none"
    islands: str = "none"
    context_tokens: Annotated[
        tuple[_Count, ...],
        Meta(description="Token ids of the context `text` or `learned`; empty where neither is the default."),
    ] = ()
    learned: Annotated[
        str, Meta(description="Digest of the file of the context `learned`; empty: none.", max_length=64)
    ] = ""
    min_segment_tokens: _Count
    checkpoint_tokens: _Count = 0
    reads_successors: Annotated[
        bool, Meta(description="The drafting head reads each token together with the next token.")
    ] = False
    max_model_len: Annotated[int, Meta(ge=1)]
    has_linear: bool
    limits: PoolLimits
    has_transition: Annotated[
        bool, Meta(description="Recurrent states keep information across a segment.")
    ] = True
    deadline_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Most seconds that a request waits for other instances; null: unknown."),
    ] = None
    quadratic: Annotated[
        float, Meta(description="Prefilling n tokens takes FLOPs in proportion to n + quadratic * n^2.", ge=0)
    ] = 0.0
    shared_tiers: Annotated[
        tuple[_Identity, ...],
        Meta(
            description="Identities of the store's tiers that other instances use, too, fastest first.",
            max_length=64,
        ),
    ] = ()
    literal_text: Annotated[
        bool, Meta(description="Separators and segment ids in the text of prompts are ordinary text.")
    ] = False

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a malformed address, and unless the primitives are three distinct ids."""
        for address in (self.receiver, self.events):
            Address.parse(address)
        _ = self.primitives

    @property
    def primitives(self) -> PrimitiveIds:
        return PrimitiveIds(self.separator, self.pdep, self.pad)

    @property
    def link_defaults(self) -> LinkDefaults:
        return LinkDefaults(self.link, self.seam_tokens, self.context, self.islands)

    @property
    def traits(self) -> ModelTraits:
        return ModelTraits(self.has_linear, self.has_transition)

    @property
    def planning(self) -> tuple[object, ...]:
        """All values of the description that a plan depends on."""
        return (
            self.primitives,
            self.link_defaults,
            self.context_tokens,
            self.learned,
            self.traits,
            self.namespace,
            self.generation,
            self.limits,
            self.min_segment_tokens,
            self.checkpoint_tokens,
            self.reads_successors,
        )

    def tier_shared_with(self, worker: Description) -> str | None:
        """Return the identity of this instance's fastest tier that ``worker`` shares, or ``None``."""
        return next((tier for tier in self.shared_tiers if tier in worker.shared_tiers), None)
