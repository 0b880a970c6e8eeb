"""HypicConfig: every option of the plugin, typed, frozen, validated once."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, StrictBool, StrictInt

from ..primitives.context import SUFFIX, LearnedContext, context_text, read_learned
from ..primitives.options import MAX_SEGMENTS, LinkDefaults
from ..primitives.places import pattern
from ..primitives.policies import (
    CONTEXTS,
    ISLANDS,
    MAX_ISLAND_PERCENT,
    MAX_ISLAND_TOKENS,
    MAX_SEAM_TOKENS,
    METHODS,
    LinkError,
    parse_link,
)
from ..primitives.segmenter import SegmentMode
from ..primitives.tokens import PrimitiveIds, PrimitiveTexts
from .schema import Allowed, ConfigSection, Form, Natural, Number, PathText, Positive, Text, expected, options
from .segment_parallel import SegmentParallelConfig
from .store import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig


SECTION = "hypic"
"""Key of our options inside ``--additional-config``."""
CONNECTOR = "HypicConnector"
"""Name of our KV connector in ``--kv-transfer-config``."""
MULTI = "MultiConnector"
"""vLLM's name of a KV connector that is made of several."""
TOKENIZER_MODE = "hypic"
"""vLLM's ``tokenizer_mode`` in which tokenizers know the primitives and the texts of tokens."""

AUTO = "auto"
"""Value of ``context`` and ``islands`` that depends on the model: see :meth:`HypicConfig.for_model`."""
_LINKS = f"one of {', '.join(METHODS)}"
_CONTEXTS = f"one of {', '.join((AUTO, *CONTEXTS))}"
_ISLANDS = f"one of {', '.join((AUTO, *ISLANDS))}"
DENSE_CONTEXT, DENSE_ISLANDS = "text", "query-15-96"
"""What ``auto`` is where that was measured to keep answers: docs/benchmarks/answers.md."""

Share = Annotated[Number, Field(ge=0, lt=1), Allowed("a number from 0 to below 1")]
SegmentCount = Annotated[
    StrictInt, Field(ge=1, le=MAX_SEGMENTS), Allowed(f"an integer from 1 to {MAX_SEGMENTS}")
]
Part = Annotated[Number, Field(gt=0, le=1), Allowed("a number above 0 and at most 1")]


def _texts(given: Any) -> PrimitiveTexts:
    return given if isinstance(given, PrimitiveTexts) else PrimitiveTexts.from_mapping(given)


def _ids(given: Any) -> PrimitiveIds:
    try:
        return given if isinstance(given, PrimitiveIds) else PrimitiveIds(**given)
    except TypeError as e:
        raise ValueError(f"token_texts / token_ids: {e}") from e


@options
class GateConfig(ConfigSection):
    """The section ``gate`` of :class:`HypicConfig`: what a server asks of the gate when it starts."""

    section = "gate"

    require: Annotated[Literal["off", "warn", "go"], Allowed()] = "warn"
    """``warn`` logs one line when the model has no sign-off, or a sign-off that is no go; ``go`` refuses to
    serve such a model; ``off`` does not look for a sign-off."""
    folder: PathText | None = None
    """Folder of sign-offs; with ``null`` the folder that ``vllm-hypic gate`` writes to by default."""
    choose: Annotated[StrictBool, Allowed("true or false")] = False
    """Serve with the cheapest context and islands signed off as go, not with ``context`` and ``islands``."""


def _link(given: Any) -> str:
    try:
        return parse_link(given, 0).name
    except LinkError:
        raise expected(f"{_LINKS}; widths up to {MAX_SEAM_TOKENS}") from None


def _context(given: Any) -> str:
    if given not in (AUTO, *CONTEXTS):
        raise expected(_CONTEXTS)
    return str(given)


def _islands(given: Any) -> str:
    try:
        if given != AUTO:
            parse_link("hypic", 0, islands=given)
    except LinkError:
        bounds = f"percent from 1 to {MAX_ISLAND_PERCENT}, up to {MAX_ISLAND_TOKENS} tokens"
        raise expected(f"{_ISLANDS}; {bounds}") from None
    return str(given)


def _known_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for name in patterns:
        try:
            pattern(name)
        except ValueError as e:
            raise ValueError(f"segment.patterns: {e}") from e
    return patterns


@options
class SegmentingConfig(ConfigSection):
    """The section ``segment`` of :class:`HypicConfig`: where prompts without separators are cut."""

    section = "segment"

    mode: Annotated[SegmentMode, Allowed()] = "off"
    """``structure`` cuts a chat request at tools, documents and parts of messages, and other prompts as
    ``text`` does; ``text`` cuts where ``patterns`` match; ``cdc`` cuts at ends of lines and sentences that
    the text itself determines; ``off`` cuts at separators alone."""
    patterns: Annotated[
        tuple[Text, ...], AfterValidator(_known_patterns), Form("a list of names or patterns")
    ] = (*("documents", "json-lines", "rules", "titles", "indents", "blank-lines"),)
    """Cuts of the mode ``text``, in order of preference: names of presets, or patterns of RE2. A group
    named ``segment`` is a segment; any other pattern cuts at its first group that matches, or else behind the
    match."""
    min_tokens: Positive = 128
    """A shorter piece is computed in the stream."""
    mean_tokens: Positive = 2048
    """Mean length of the pieces of the mode ``cdc``. Two cuts are more than half of this length apart."""
    query_tokens: Natural = 128
    """Tokens at the end of the last message in which the question is looked for. A piece that lies mostly in
    these tokens is computed in the stream. With 0 the end of the message is a piece like any other, except
    its last word."""
    newest_tokens: Natural = 512
    """The user's last message, and each later message, stays in the stream up to this length, so the end of a
    request is exact. A longer message is cut."""
    max_segments: SegmentCount = 256
    """Most segments of one prompt; the rest of the prompt is computed in the stream."""


@options
class HypicConfig(ConfigSection):
    """Options of one engine.

    Set them with ``--additional-config '{"hypic": {...}}'`` or with
    ``--kv-transfer-config '{"kv_connector": "HypicConnector", "kv_connector_extra_config": {...}}'``;
    the latter wins.
    """

    link: Annotated[str, PlainValidator(_link), Form(_LINKS)] = "hypic"
    """Link method of requests that name no link method."""
    seam_tokens: Annotated[
        StrictInt, Field(ge=0, le=MAX_SEAM_TOKENS), Allowed(f"an integer from 0 to {MAX_SEAM_TOKENS}")
    ] = 8
    """Seam window ``w`` of the link methods ``hypic`` and ``naive``: tokens recomputed on either side of a
    segment boundary."""
    context: Annotated[str, PlainValidator(_context), Form(_CONTEXTS)] = AUTO
    """Context of segments, in requests that name no context. ``auto`` is ``text`` with the link
    method ``hypic`` on models of softmax attention alone whose tokenizer can be read, or ``learned`` where
    ``context_file`` is a trained context; elsewhere ``auto`` is ``none``."""
    islands: Annotated[str, PlainValidator(_islands), Form(_ISLANDS)] = AUTO
    """Windows inside segments that are recomputed, in requests that name no islands. ``query-10`` recomputes
    10 % of the tokens that records serve, ``query-10-96`` at least 96 tokens, up to half of them. ``auto`` is
    ``query-15-96`` with the link method ``hypic`` on models of softmax attention alone whose tokenizer can be
    read; elsewhere ``auto`` is ``none``."""
    context_file: Annotated[str, Form("a path, or null")] | None = None
    """File of the context: a UTF-8 text for ``text``, or the ``.safetensors`` file that ``vllm-hypic tune``
    wrote for ``learned``. ``null`` is the text that comes with the plugin. Records behind different contexts
    are different records."""
    min_segment_tokens: Positive = 32
    """A segment with fewer cacheable tokens is computed in the stream. Models with short convolutions need at
    least 2, the reach of the convolution."""
    checkpoint_tokens: Natural = 0
    """Tokens between two checkpoints of a record: a multiple of ``page_tokens``, or 0 for no checkpoints. A
    segment that begins like a cached segment is computed from the last checkpoint that both share."""
    checkpoints: Natural = 8
    """Most checkpoints that a record keeps, in models with linear layers, beside the last one and the one
    where the record parts from an earlier segment. Each checkpoint takes the room of a state."""
    prefix: Annotated[Literal["stock", "sparse"], Allowed()] = "stock"
    """Cache for the prefixes of prompts without segments: ``stock`` is vLLM's own, ``sparse`` is the pool, in
    pages of ``page_tokens``."""
    page_tokens: Positive = 64
    """Tokens in one page of the pool."""
    pool_bytes: Positive | None = None
    """Bytes of the pool in each worker; with ``null``, ``pool_fraction`` decides."""
    pool_fraction: Annotated[Number, Field(gt=0, lt=1), Allowed("a number between 0 and 1")] = 0.25
    """Share of the KV memory that the pool takes when ``pool_bytes`` is null. With
    ``--kv-cache-memory-bytes`` the pool comes on top of that memory."""
    expected_segment_tokens: Positive = 1024
    """Segment length at which the pool's pages and its slots for states run out together. On CPU with
    ``prefix`` ``sparse`` pages and slots are one memory, and the option only sizes the memory for
    transitions."""
    expected_live_heads: Part = 0.5
    """Share of linear-attention heads with a transition to store at a segment's end, at which the memory for
    transitions runs out together with pages and slots. Long segments and fast decay leave fewer heads."""
    dead_transition: Share = 2.0**-25
    """A transition whose largest entry is at most this number counts as zero: the engine neither stores nor
    applies the transition. The default is the largest number that rounds to zero in storage."""
    state_dtype: Annotated[Literal["float32", "float16"], Allowed()] = "float32"
    """Type of the states of linear layers in records, on CPU. ``float16`` halves the bytes of states in the
    pool and in tiers. K and V of records follow ``--kv-cache-dtype``."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """Tiers behind the pool, and the eviction policy of pool and tiers."""
    max_pinned_fraction: Share = 0.5
    """Share of the pool that pinned records may take."""
    max_request_fraction: Part = 1.0
    """Share of the pool that the records of one request may take. Further segments of the request are
    computed in the stream."""
    max_tenant_fraction: Part = 1.0
    """Share of the pool that the records of one tenant's requests may take together, while the requests run.
    The tenant's next request waits; requests of other tenants go on. The tenant's pinned records and each
    single request have the same limit."""
    max_tenant_segments: Positive = 10_000
    """Most compiled segments, each with an id, that one tenant may have."""
    segment: SegmentingConfig = field(default_factory=SegmentingConfig)
    """Search for segments in prompts without separators."""
    segment_parallel: SegmentParallelConfig | None = None
    """Addresses at which the engine receives records of other instances; with ``null`` the engine neither
    sends nor receives records."""
    gate: GateConfig = field(default_factory=GateConfig)
    """Requirements on the model's sign-off at the engine's start."""
    token_texts: Annotated[PrimitiveTexts, PlainValidator(_texts), Form("an object")] = field(
        default_factory=PrimitiveTexts
    )
    """Texts of the separator, of PDep and of padding."""
    token_ids: Annotated[PrimitiveIds, PlainValidator(_ids), Form("an object, or null")] | None = None
    """Token ids of the separator, of PDep and of padding; needed with ``skip_tokenizer_init``, and for models
    that keep a tokenizer mode other than ``hf``."""
    dummy_token: Natural | None = None
    """Token that the link method ``epic-0`` puts before a segment; ``null`` is the segment's first token."""

    def __post_init__(self) -> None:
        named = ("none" if option == AUTO else option for option in (self.context, self.islands))
        parse_link(self.link, self.seam_tokens, *named)
        if self.checkpoint_tokens % self.page_tokens:
            raise ValueError(
                f"checkpoint_tokens={self.checkpoint_tokens}: expected a multiple of "
                f"page_tokens={self.page_tokens}, or 0"
            )
        learned = self.learned
        if self.context_file is not None and learned is None:
            context_text(self.context_file)
        if self.context == "learned" and learned is None:
            raise ValueError(
                f"context='learned', context_file={self.context_file!r}: expected a {SUFFIX} file that "
                "vllm-hypic tune wrote"
            )

    def for_model(self, model: ModelConfig) -> Self:
        """With the context and islands that ``auto`` stands for.

        Models of softmax attention alone whose text can be read get the fixed text and islands by the query
        with the link method ``hypic``.  All others get neither: in linear layers an island's tokens count
        twice, and nothing was measured there that they win.  ``model``'s tokenizer mode is the final one.
        """
        dense = not (model.is_hybrid or model.is_attention_free)
        readable = model.tokenizer_mode == TOKENIZER_MODE
        measured = self.link == "hypic" and dense and readable
        context, islands = (DENSE_CONTEXT, DENSE_ISLANDS) if measured else ("none", "none")
        if measured and self.learned is not None:
            context = "learned"
        return replace(
            self,
            context=context if self.context == AUTO else self.context,
            islands=islands if self.islands == AUTO else self.islands,
        )

    @property
    def text(self) -> str:
        """What records see that are computed behind the context ``text``."""
        return context_text(None if self.learned else self.context_file)

    @property
    def learned(self) -> LearnedContext | None:
        """The context ``learned``, if there is one."""
        is_learned = self.context_file is not None and self.context_file.endswith(SUFFIX)
        return read_learned(str(self.context_file)) if is_learned else None

    @property
    def link_defaults(self) -> LinkDefaults:
        """The link method of requests that name none, of options :meth:`for_model`."""
        assert AUTO not in (self.context, self.islands), "which context and islands depends on the model"
        return LinkDefaults(self.link, self.seam_tokens, self.context, self.islands)


def own_options(transfer: KVTransferConfig | None) -> Mapping[str, Any] | None:
    """What a KV transfer configuration gives our connector, alone or as one of several; ``None``: it is not
    there."""
    if transfer is None or transfer.kv_connector not in (CONNECTOR, MULTI):
        return None
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == CONNECTOR:
        return extra
    given = [c for c in extra.get("connectors", ()) if c.get("kv_connector") == CONNECTOR]
    return given[0].get("kv_connector_extra_config", {}) if given else None


def config_of(vllm_config: VllmConfig) -> HypicConfig:
    """The plugin's options of an engine (written there by ``patches/engine_args.py``)."""
    options = own_options(vllm_config.kv_transfer_config)
    assert options is not None
    return HypicConfig.from_mapping(options)
