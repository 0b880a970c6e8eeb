"""HypicConfig: every option of the plugin, typed, frozen, validated once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..primitives.policies import LinkError, parse_link
from ..primitives.tokens import PrimitiveIds, PrimitiveTexts
from .gate import GateConfig
from .segment_parallel import ParallelConfig
from .store import StoreConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECTION = "hypic"
"""Key of our options inside ``--additional-config``."""
CONNECTOR = "HypicConnector"
"""Name of our KV connector in ``--kv-transfer-config``."""


@dataclass(frozen=True)
class HypicConfig:
    """Options of one engine.

    Set them with ``--additional-config '{"hypic": {...}}'`` or with
    ``--kv-transfer-config '{"kv_connector": "HypicConnector", "kv_connector_extra_config": {...}}'``;
    the latter wins.
    """

    link: str = "hypic"
    """Link method of requests that name none."""
    seam_tokens: int = 8
    """Seam window ``w``: tokens recomputed on either side of a segment boundary."""
    min_segment_tokens: int = 32
    """A segment whose interior is shorter is computed in the stream."""
    page_tokens: int = 64
    """Tokens in one page of the public pool."""
    pool_bytes: int | None = None
    """Bytes of the public pool per worker; ``None``: ``pool_fraction`` of the KV memory."""
    pool_fraction: float = 0.25
    """Share of the KV memory that the public pool takes when ``pool_bytes`` is not given."""
    expected_segment_tokens: int = 1024
    """Segment length at which pages and state slots of the pool run out together."""
    expected_live_heads: float = 0.5
    """Share of linear-attention heads whose transition has not died out by a segment's end, at which its
    storage runs out together with pages and slots: long segments and forgetful models have fewer."""
    dead_transition: float = 2.0**-25
    """A head whose transition has no larger entry is dead: its transition is neither stored nor applied. The
    default is what rounds to zero in storage."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """Tiers behind the pool, and what leaves pool and tiers first: see ``store/config.py``."""
    max_pinned_fraction: float = 0.5
    """Share of the pool that pinned records may take."""
    segment_parallel: ParallelConfig | None = None
    """Where records of other instances land, and who may send them: see ``segment_parallel/config.py``;
    ``None``: this engine neither takes nor gives any."""
    gate: GateConfig = field(default_factory=GateConfig)
    """What is asked of the model's sign-off when the engine starts: see ``eval/gate/config.py``."""
    tokens: PrimitiveTexts = field(default_factory=PrimitiveTexts)
    """Text forms of separator, PDep and padding."""
    token_ids: PrimitiveIds | None = None
    """Their ids; needed only with ``skip_tokenizer_init``."""
    dummy_token: int | None = None
    """Token put before a segment by ``epic-0``; ``None``: the segment's own first token."""

    def __post_init__(self) -> None:
        try:
            parse_link(self.link, self.seam_tokens)
        except LinkError as e:
            raise ConfigError(f"hypic config: {e}") from e
        _integer("min_segment_tokens", self.min_segment_tokens, 1)
        _integer("page_tokens", self.page_tokens, 1)
        _integer("expected_segment_tokens", self.expected_segment_tokens, 1)
        if self.pool_bytes is not None:
            _integer("pool_bytes", self.pool_bytes, 1)
        if self.dummy_token is not None:
            _integer("dummy_token", self.dummy_token, 0)
        _number("pool_fraction", self.pool_fraction, lambda x: 0 < x < 1, "between 0 and 1")
        _number(
            "expected_live_heads", self.expected_live_heads, lambda x: 0 < x <= 1, "above 0 and at most 1"
        )
        _number("max_pinned_fraction", self.max_pinned_fraction, lambda x: 0 <= x < 1, "from 0 to below 1")
        _number("dead_transition", self.dead_transition, lambda x: 0 <= x < 1, "from 0 to below 1")

    @staticmethod
    def from_mapping(options: Mapping[str, Any]) -> HypicConfig:
        """Build from plain JSON-like options; unknown keys are refused."""
        if not isinstance(options, Mapping):
            raise ConfigError(f"hypic config: expected an object, got {options!r}")
        known = {f.name for f in dataclasses.fields(HypicConfig)}
        if unknown := sorted(set(options) - known):
            raise ConfigError(
                f"hypic config: unknown option {unknown[0]!r}; expected one of {', '.join(sorted(known))}"
            )
        values = dict(options)
        if "store" in values and not isinstance(values["store"], StoreConfig):
            values["store"] = StoreConfig.from_mapping(values["store"])
        parallel = values.get("segment_parallel")
        if parallel is not None and not isinstance(parallel, ParallelConfig):
            values["segment_parallel"] = ParallelConfig.from_mapping(parallel)
        if "gate" in values and not isinstance(values["gate"], GateConfig):
            values["gate"] = GateConfig.from_mapping(values["gate"])
        try:
            if "tokens" in values and not isinstance(values["tokens"], PrimitiveTexts):
                values["tokens"] = PrimitiveTexts.from_mapping(values["tokens"])
            if values.get("token_ids") is not None and not isinstance(values["token_ids"], PrimitiveIds):
                values["token_ids"] = PrimitiveIds(**values["token_ids"])
        except TypeError as e:
            raise ConfigError(f"hypic config: tokens / token_ids: {e}") from e
        except ValueError as e:
            raise ConfigError(f"hypic config: {e}") from e
        return HypicConfig(**values)

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON-like options: the inverse of :meth:`from_mapping`."""
        parallel = None if self.segment_parallel is None else self.segment_parallel.to_mapping()
        return {
            **dataclasses.asdict(self),
            "store": self.store.to_mapping(),
            "segment_parallel": parallel,
        }


def config_of(vllm_config: VllmConfig) -> HypicConfig:
    """The plugin's options of an engine (written there by ``patches/engine_args.py``)."""
    assert vllm_config.kv_transfer_config is not None
    return HypicConfig.from_mapping(vllm_config.kv_transfer_config.kv_connector_extra_config)


def _number(name: str, value: object, allowed: Callable[[float], bool], says: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not allowed(value):
        raise ConfigError(f"hypic config: {name}={value!r}: expected a number {says}")


def _integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"hypic config: {name}={value!r}: expected an integer >= {low}")
