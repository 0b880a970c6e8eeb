"""Configurations of flash-linear-attention's models, read without that package or a checkpoint's code.

Fields and their defaults are those of flash-linear-attention 0.6.0.  Values that the classes in :mod:`.fla`
do not compute raise ``ValueError``, with name and value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LINEAR, FULL = "linear_attention", "full_attention"


class FlaConfig(PreTrainedConfig):
    """Base class of the three configurations, for models with a token mixer and an MLP in each layer.

    ``attn`` names the layers with full attention, and its heads.  The constructor passes both to vLLM in
    ``layer_types``, ``num_attention_heads``, ``num_key_value_heads`` and ``head_dim``.
    """

    expected: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Supported values of fields whose other values would change the computation."""

    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_heads: int = 16
    expand_k: float = 1.0
    expand_v: float = 1.0
    hidden_ratio: int | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    vocab_size: int = 32000
    tie_word_embeddings: bool = False
    attn: dict[str, Any] | list[dict[str, Any]] | None = None
    attnres_block_size: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        # The code below derives these fields; files that this class wrote also contain them.
        for name in ("layer_types", "num_attention_heads", "num_key_value_heads", "head_dim"):
            kwargs.pop(name, None)
        super().__post_init__(**kwargs)
        for reason in self._refusals():
            raise ValueError(f"{self.model_type}: {reason}")
        attends = self.attention_layers
        self.layer_types = [FULL if i in attends else LINEAR for i in range(self.num_hidden_layers)]
        spec = self.attention or {"num_heads": self.num_heads}
        self.num_attention_heads: int = spec["num_heads"]
        self.num_key_value_heads: int = spec.get("num_kv_heads") or self.num_attention_heads
        self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            # A gated MLP has three matrices: two thirds of the width give as many weights as two matrices.
            inner = int(self.hidden_size * (self.hidden_ratio or 4) * 2 / 3)
            self.intermediate_size = -(-inner // 256) * 256

    @property
    def attention(self) -> dict[str, Any] | None:
        """The settings of full attention; ``None`` for models without full attention."""
        found = self.attn[0] if isinstance(self.attn, list) else self.attn
        return found or None

    @property
    def attention_layers(self) -> frozenset[int]:
        return frozenset(self.attention["layers"]) if self.attention else frozenset()

    @property
    def key_dim(self) -> int:
        """Width of a linear layer's keys, over all heads together."""
        return round(self.hidden_size * self.expand_k)

    @property
    def value_dim(self) -> int:
        return round(self.hidden_size * self.expand_v)

    def _refusals(self) -> Iterator[str]:
        """Yield each unsupported value as a message that also names the expected value."""
        shared = {"hidden_act": ("swish", "silu"), "attnres_block_size": (None,)}
        for name, allowed in {**shared, **self.expected}.items():
            if (given := getattr(self, name, allowed[0])) not in allowed:
                yield f"{name}={given!r}: expected {' or '.join(map(repr, allowed))}"
        for name, width in (("expand_k", self.key_dim), ("expand_v", self.value_dim)):
            if not width or width % self.num_heads:
                given = getattr(self, name)
                yield f"{name}={given}: expected a multiple of num_heads={self.num_heads} channels"
        if isinstance(self.attn, list) and len(self.attn) > 1:
            yield f"attn={self.attn!r}: expected at most one entry"
        if self.attention is not None:
            yield from self._attention_refusals(self.attention)

    def _attention_refusals(self, spec: dict[str, Any]) -> Iterator[str]:
        for name in ("layers", "num_heads"):
            if name not in spec:
                yield f"attn={spec!r}: expected the key {name!r}"
                return
        if outside := [i for i in spec["layers"] if not 0 <= i < self.num_hidden_layers]:
            yield f"attn['layers'] holds {outside}: expected layers below {self.num_hidden_layers}"
        if self.hidden_size % spec["num_heads"]:
            yield f"attn['num_heads']={spec['num_heads']}: expected a divisor of {self.hidden_size}"
        if (window := spec.get("window_size")) is not None:
            yield f"attn['window_size']={window}: expected None"


class DeltaNetConfig(FlaConfig):
    """Configuration of ``DeltaNetForCausalLM``."""

    model_type = "delta_net"
    expected: ClassVar[dict[str, tuple[Any, ...]]] = {
        **{"use_beta": (True,), "qk_norm": ("l2",), "qk_activation": ("silu",)},
    }

    use_gate: bool = False
    use_short_conv: bool = True
    conv_size: int = 4
    allow_neg_eigval: bool = False
    use_beta: bool = True
    qk_norm: str = "l2"
    qk_activation: str = "silu"


class DecayConfig(FlaConfig):
    """Common base class of the configurations of RetNet and GLA."""

    expected: ClassVar[dict[str, tuple[Any, ...]]] = {
        **{"feature_map": (None,), "use_short_conv": (False,), "elementwise_affine": (True,)},
    }

    feature_map: str | None = None
    use_short_conv: bool = False
    elementwise_affine: bool | None = True
    use_output_gate: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        # The field is dropped, because vLLM would take it for full attention's number of KV heads.
        if (given := kwargs.pop("num_kv_heads", None)) not in (None, self.num_heads):
            raise ValueError(f"{self.model_type}: num_kv_heads={given}: expected num_heads={self.num_heads}")
        super().__post_init__(**kwargs)


class RetNetConfig(DecayConfig):
    """Configuration of ``RetNetForCausalLM``."""

    model_type = "retnet"

    num_heads: int = 8
    expand_v: float = 2.0
    hidden_ratio: int | None = 2


class GLAConfig(DecayConfig):
    """Configuration of ``GLAForCausalLM``."""

    model_type = "gla"

    num_heads: int = 4
    expand_k: float = 0.5
    clamp_min: float | None = None


CONFIGS: tuple[type[FlaConfig], ...] = (DeltaNetConfig, RetNetConfig, GLAConfig)


def register() -> None:
    """Register the configurations in transformers, which vLLM asks; repeated calls change nothing."""
    for config in CONFIGS:
        if config.model_type not in CONFIG_MAPPING:
            AutoConfig.register(config.model_type, config)
