"""The subject of a sign-off: a model as served, identified by every setting that changes its numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...config.engine import HypicConfig
from ...fingerprint import fingerprint
from ...primitives.policies import parse_link

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NEUTRAL = frozenset(
    {
        *("page_tokens", "pool_bytes", "pool_fraction", "expected_segment_tokens", "expected_live_heads"),
        *("store", "max_pinned_fraction", "max_request_fraction", "max_tenant_fraction"),
        *("max_tenant_segments", "segment_parallel", "token_texts", "token_ids", "gate"),
    }
)
"""Options of places and names, which change no numbers.  All other options are assumed to change numbers."""


@dataclass(frozen=True)
class Subject:
    """A model as served.  Equal subjects compute the same numbers except for the last bits.  The last bits
    depend on the machine, the number of threads or ranks, compilation, and the division of the pool."""

    weights: str
    """:func:`~vllm_hypic.fingerprint.fingerprint` of the weights, whatever the folder of the files."""
    dtype: str
    quantization: str | None
    rope: str
    overrides: str
    """Overrides of the model's configuration, as given to vLLM (``--hf-overrides``)."""
    kv_dtype: str
    """Dtype of stored K and V."""
    state_dtype: str
    """Dtype of the recurrent states in vLLM's own cache."""
    record_dtypes: str
    """Dtypes of stored transitions and states."""
    plugin: str
    vllm: str
    options: dict[str, Any]
    """Options of the plugin that change numbers: see :func:`telling`."""

    @property
    def key(self) -> str:
        """Return the digest that names the sign-off."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def linked(self, config: HypicConfig) -> Subject:
        """Return this model with the link options of ``config``."""
        return dataclasses.replace(self, options=telling(config))

    def differs(self, other: Subject) -> list[str]:
        """Return ``name: mine, not other's`` for each value that differs."""
        mine, theirs = ({**dataclasses.asdict(one), **one.options} for one in (self, other))
        names = [n for n in dict.fromkeys((*mine, *theirs)) if n != "options"]
        pairs = [(n, mine.get(n), theirs.get(n)) for n in names]
        return [f"{n}: {here!r}, not {there!r}" for n, here, there in pairs if here != there]

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> Subject:
        """Undo ``dataclasses.asdict``.  Raises ``ValueError`` if the fields are not those of a subject."""
        names = {f.name for f in dataclasses.fields(Subject)}
        if set(values) != names:
            raise ValueError(f"expected the fields {', '.join(sorted(names))}")
        return Subject(**values)


def subject_of(vllm_config: VllmConfig, config: HypicConfig) -> Subject:
    """Return the subject of an engine with the options ``config``, for requests that name no link method.

    The function reads samples of the weights' files.
    """
    import vllm

    from ... import __version__
    from ...pool.states import TRANSITION_DTYPE

    model, cache = vllm_config.model_config, vllm_config.cache_config
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)
    return Subject(
        weights=fingerprint(vllm_config),
        dtype=_plain(model.dtype),
        quantization=None if model.quantization is None else str(model.quantization),
        rope=json.dumps(rope, sort_keys=True, default=str),
        overrides=json.dumps(model.hf_overrides, sort_keys=True, default=str),
        kv_dtype=_plain(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype),
        state_dtype=str(cache.mamba_ssm_cache_dtype),
        record_dtypes=f"T {_plain(TRANSITION_DTYPE)}, S {config.state_dtype}",
        plugin=__version__,
        vllm=vllm.__version__,
        options=telling(config),
    )


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def telling(config: HypicConfig) -> dict[str, Any]:
    """Return the options that change numbers; an option that the link method does not read is ``None``."""
    unread = set()
    if not reads_seam(config):
        unread.add("seam_tokens")
    if not parse_link(config.link, config.seam_tokens).dummies:
        unread.add("dummy_token")
    # Unused options are left out, so that sign-offs from before these options existed stay valid.
    values = [(name, value) for name, value in config.to_mapping().items() if name not in _unused(config)]
    told = {name: None if name in unread else value for name, value in values if name not in NEUTRAL}
    if "context_file" in told:  # the file's content counts, not its path
        learned = config.learned
        said = hashlib.sha256(config.text.encode()).hexdigest()
        told["context_file"] = said if learned is None else learned.digest
    return told


def _unused(config: HypicConfig) -> set[str]:
    """Return the options of contexts, islands, found segments and narrow states that the engine lacks."""
    unused = set()
    if config.segment.mode == "off":
        unused.add("segment")
    if config.context == "none":
        unused.add("context")
    if config.context not in ("text", "learned"):
        unused.add("context_file")
    if config.islands == "none":
        unused.add("islands")
    if config.state_dtype == "float32":
        unused.add("state_dtype")
    return unused


def reads_seam(config: HypicConfig) -> bool:
    """Whether the link method takes a seam window."""
    return parse_link(config.link, 0) != parse_link(config.link, 1)
