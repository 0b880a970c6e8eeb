"""FLOPs of a prefill from a model's layer shapes: what a cached segment saves.

Counted are the multiplications and additions of matrix products, of attention's quadratic part and of the
recurrences; left out are norms, activations, rotations, embeddings and the head, which prefill runs for one
token only.  A product of ``[1, m]`` with ``[m, n]`` is ``2 m n``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Attention:
    """One full-attention layer; ``gated``: the query's projection is twice as wide, half of it a gate."""

    heads: int
    kv_heads: int
    head_size: int
    gated: bool = False

    def per_token(self, hidden: int) -> float:
        width = self.heads * self.head_size
        query = width * (2 if self.gated else 1)
        return 2.0 * hidden * (query + 2 * self.kv_heads * self.head_size + width)

    def pairs(self, tokens: int) -> float:
        """Scores and weighted values of all causal pairs, a token with itself included."""
        return 4.0 * self.heads * self.head_size * tokens * (tokens + 1) / 2


@dataclass(frozen=True)
class Latent:
    """One MLA layer; ``query_rank`` 0: queries are projected at once; sizes of a head's K without rotation,
    of its rotated part, and of V; ``gates``: of outputs, of all heads together."""

    heads: int
    rank: int
    query_rank: int
    plain_size: int
    rotated_size: int
    value_size: int
    gates: int = 0

    def per_token(self, hidden: int) -> float:
        query = self.heads * (self.plain_size + self.rotated_size)
        down = hidden * (self.rank + self.rotated_size + self.query_rank + self.gates)
        up = self.rank * self.heads * (self.plain_size + self.value_size)
        return 2.0 * (down + up + (self.query_rank or hidden) * query + self.heads * self.value_size * hidden)

    def pairs(self, tokens: int) -> float:
        """FLOPs of a prefill's pairs of query and key, in causal attention over K and V of every head."""
        sizes = self.plain_size + self.rotated_size + self.value_size
        return 2.0 * self.heads * sizes * tokens * (tokens + 1) / 2


@dataclass(frozen=True)
class GatedDelta:
    """One gated delta rule layer (GDN): projections (q, k, v, z, two gates a head), convolution, state."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_width: int = 4

    def per_token(self, hidden: int) -> float:
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        mixed = 2 * keys + values
        projections = 2.0 * hidden * (mixed + values + 2 * self.value_heads + values)
        # On the state [key, value] of each head: decay, read with k, add an outer product, read with q.
        update = (1 + 2 + 2 + 2) * self.value_heads * self.key_size * self.value_size
        return projections + 2.0 * self.conv_width * mixed + update


@dataclass(frozen=True)
class KimiDelta:
    """One layer of Kimi delta attention, heads of ``size`` x ``size``: projections to q, k, v and a write
    strength a head, to gates of channels and of outputs (``low_rank``: by way of ``size``), convolution,
    recurrence."""

    heads: int
    size: int
    conv_width: int = 4
    low_rank: bool = True

    def per_token(self, hidden: int) -> float:
        channels = self.heads * self.size
        gate = self.size * (hidden + channels) if self.low_rank else hidden * channels
        projections = 2.0 * (hidden * (4 * channels + self.heads) + 2 * gate)
        return projections + 2.0 * self.conv_width * 3 * channels + (1 + 2 + 2 + 2) * channels * self.size


@dataclass(frozen=True)
class Lightning:
    """One layer of lightning attention, heads of ``size`` x ``size``: projections to q, k, v, a gate and from
    the output, recurrence."""

    heads: int
    size: int

    def per_token(self, hidden: int) -> float:
        channels = self.heads * self.size
        # On the state [size, size] of each head: decay, add an outer product, read with q.
        return 2.0 * hidden * 5 * channels + (1 + 2 + 2) * channels * self.size


@dataclass(frozen=True)
class FlaMixer:
    """One linear layer of a model of flash-linear-attention, all heads' keys and values together: projections
    to q, k, v and from the output, of the recurrence's gates ``gate_weights``, perhaps one that gates the
    output; convolutions, perhaps none (``conv_width`` 0); recurrence.

    ``update``: operations on an entry of the state [key, value] of a head, in a token.
    """

    heads: int
    keys: int
    values: int
    gate_weights: int
    update: int
    gated: bool = False
    conv_width: int = 0

    def per_token(self, hidden: int) -> float:
        projected = 2 * self.keys + 2 * self.values + (self.values if self.gated else 0)
        projections = 2.0 * (hidden * projected + self.gate_weights)
        convolutions = 2.0 * self.conv_width * (2 * self.keys + self.values)
        return projections + convolutions + self.update * self.keys * self.values / self.heads


@dataclass(frozen=True)
class Mamba2:
    """One Mamba2 layer: projections to z, x, B, C and a step a head, convolution, update."""

    heads: int
    head_size: int
    state_size: int
    groups: int = 1
    conv_width: int = 4

    def per_token(self, hidden: int) -> float:
        inner = self.heads * self.head_size
        mixed = inner + 2 * self.groups * self.state_size
        projections = 2.0 * hidden * (inner + mixed + self.heads + inner)
        # On the state [head size, state] of each head: decay, add an outer product, read with C.
        update = (1 + 2 + 2) * inner * self.state_size
        return projections + 2.0 * self.conv_width * mixed + update


@dataclass(frozen=True)
class Mamba1:
    """One Mamba1 layer: projections to x and z, convolution, projections to a step, B and C, and of the step
    to the channels, update."""

    inner: int
    state_size: int
    step_rank: int
    conv_width: int = 4

    def per_token(self, hidden: int) -> float:
        inner, states = self.inner, self.state_size
        projections = 2.0 * inner * (3 * hidden + 2 * self.step_rank + 2 * states)
        return projections + 2.0 * self.conv_width * inner + (1 + 2 + 2) * inner * states


@dataclass(frozen=True)
class ShortConv:
    """One gated short convolution: projections in (two gates and what is convolved) and out, convolution."""

    width: int

    def per_token(self, hidden: int) -> float:
        return 2.0 * 4 * hidden * hidden + (2.0 * self.width + 2) * hidden


@dataclass(frozen=True)
class UnknownLinear:
    """A linear layer whose shapes are not known: q, k, v, gate and output of the hidden size, and a state of
    ``head_size`` a channel."""

    head_size: int

    def per_token(self, hidden: int) -> float:
        return 2.0 * hidden * 5 * hidden + 5.0 * hidden * self.head_size


Linear = GatedDelta | KimiDelta | Lightning | FlaMixer | Mamba1 | Mamba2 | ShortConv | UnknownLinear


@dataclass(frozen=True)
class Mlp:
    """A dense MLP of three projections (gate, up, down); ``intermediate`` 0: none."""

    intermediate: int

    def per_token(self, hidden: int) -> float:
        return 2.0 * 3 * hidden * self.intermediate


@dataclass(frozen=True)
class Experts:
    """A mixture: ``active`` of ``total`` experts a token, the router, and a shared expert with its gate."""

    total: int
    active: int
    intermediate: int
    shared_intermediate: int = 0

    def per_token(self, hidden: int) -> float:
        shared = 3 * hidden * self.shared_intermediate + (hidden if self.shared_intermediate else 0)
        return 2.0 * (hidden * self.total + self.active * 3 * hidden * self.intermediate + shared)


@dataclass(frozen=True)
class FlopModel:
    """Shapes of a model's layers; every layer has the same MLP."""

    hidden: int
    attention_layers: int
    linear_layers: int
    attention: Attention | Latent
    linear: Linear
    mlp: Mlp | Experts
    per_token: float = field(init=False)
    """FLOPs of one token without attention's pairs."""

    def __post_init__(self) -> None:
        layers = self.attention_layers + self.linear_layers
        per_token = (
            self.attention_layers * self.attention.per_token(self.hidden)
            + self.linear_layers * self.linear.per_token(self.hidden)
            + layers * self.mlp.per_token(self.hidden)
        )
        object.__setattr__(self, "per_token", per_token)

    def prefill(self, tokens: int) -> float:
        """FLOPs of a prefill of so many tokens, from position 0."""
        return tokens * self.per_token + self.attention_layers * self.attention.pairs(tokens)

    @classmethod
    def from_hf_config(cls, text_config: object, attention_layers: int, linear_layers: int) -> FlopModel:
        """The model of a transformers text configuration, by the names that Qwen3.5, Qwen3-Next,
        OLMo-Hybrid, Kimi-Linear, Ring and Ling, LFM2, Nemotron-H, Granite 4, Falcon-H1, Zamba2, Jamba, Mamba,
        DeepSeek-V2 and flash-linear-attention use.

        What is missing falls back: hidden size to 4096, heads to ``hidden / 128``, K and V heads to all
        heads, the head size to ``hidden / heads``, the MLP to ``4 x hidden``, the layers' kind to
        :class:`UnknownLinear`.  Worths are compared among records of one model, so that a wrong factor does
        no harm; what matters is the ratio of the quadratic part.
        """
        hidden = _number(text_config, 4096, "hidden_size", "d_model", "n_embd")
        heads = _number(text_config, max(1, hidden // 128), "num_attention_heads", "n_head")
        linear = _linear(text_config, hidden, max(1, hidden // heads))
        olmo = hasattr(text_config, "linear_allow_neg_eigval")
        attention = _latent(text_config, heads) or Attention(
            heads=heads,
            kv_heads=_number(text_config, heads, "num_key_value_heads"),
            head_size=_number(text_config, max(1, hidden // heads), "head_dim", "attention_head_dim"),
            # Qwen3-Next and Qwen3.5 gate the output and do not say so; OLMo-Hybrid does not gate it.
            gated=bool(getattr(text_config, "attn_output_gate", isinstance(linear, GatedDelta) and not olmo)),
        )
        mlp = _mlp(text_config, hidden)
        return cls(hidden, attention_layers, linear_layers, attention, linear, mlp)


def _latent(config: object, heads: int) -> Latent | None:
    if not (rank := _number(config, 0, "kv_lora_rank")):
        return None
    value_size = _number(config, 128, "v_head_dim")
    gates = {"head_wise": heads, "element_wise": heads * value_size}
    return Latent(
        heads,
        rank,
        query_rank=_number(config, 0, "q_lora_rank"),
        plain_size=_number(config, 128, "qk_nope_head_dim"),
        rotated_size=_number(config, 0, "qk_rope_head_dim"),
        value_size=value_size,
        gates=gates.get(getattr(config, "gated_attention_proj_granularity_type", None) or "", 0),
    )


def _fla(config: Any, hidden: int) -> FlaMixer | None:
    """The mixer of a model of flash-linear-attention's, by that library's names of options and its defaults;
    ``None``: it is none."""
    kind = getattr(config, "model_type", None)
    if kind not in ("delta_net", "retnet", "gla"):
        return None
    heads, keys, values = config.num_heads, int(hidden * config.expand_k), int(hidden * config.expand_v)
    if kind == "delta_net":
        taps = _number(config, 4, "conv_size") if getattr(config, "use_short_conv", True) else 0
        gated = bool(getattr(config, "use_gate", False))
        # Read with k, add an outer product, read with q.
        return FlaMixer(heads, keys, values, heads * hidden, 2 + 2 + 2, gated, taps)
    gates = 16 * (hidden + keys) if kind == "gla" else 0
    # Decay, add an outer product, read with q.
    return FlaMixer(heads, keys, values, gates, 1 + 2 + 2, bool(getattr(config, "use_output_gate", True)))


def _linear(config: object, hidden: int, head_size: int) -> Linear:
    if (mixer := _fla(config, hidden)) is not None:
        return mixer
    if value_heads := _number(config, 0, "linear_num_value_heads"):
        key_size = _number(config, 128, "linear_key_head_dim")
        return GatedDelta(
            key_heads=_number(config, value_heads, "linear_num_key_heads"),
            value_heads=value_heads,
            key_size=key_size,
            value_size=_number(config, key_size, "linear_value_head_dim"),
            conv_width=_number(config, 4, "linear_conv_kernel_dim"),
        )
    if isinstance(kimi := getattr(config, "linear_attn_config", None), dict):
        return KimiDelta(kimi["num_heads"], kimi["head_dim"], kimi["short_conv_kernel_size"])
    if hasattr(config, "no_kda_lora"):
        heads, width = _number(config, 1, "num_attention_heads"), _number(config, 4, "short_conv_kernel_size")
        return KimiDelta(heads, head_size, width, low_rank=not config.no_kda_lora)
    if _number(config, 0, "layer_group_size"):
        return Lightning(_number(config, 1, "num_attention_heads"), _number(config, head_size, "head_dim"))
    if heads := _number(config, 0, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads"):
        inner = _number(config, 2, "mamba_expand", "expand") * hidden
        return Mamba2(
            heads=heads,
            head_size=_number(
                config, max(1, inner // heads), "mamba_head_dim", "mamba_d_head", "mamba_headdim"
            ),
            state_size=_number(config, 128, "ssm_state_size", "mamba_d_state"),
            groups=_number(config, 1, "n_groups", "mamba_n_groups", "mamba_ngroups"),
            conv_width=_number(config, 4, "conv_kernel", "mamba_d_conv"),
        )
    if rank := _number(config, 0, "mamba_dt_rank", "time_step_rank"):
        return Mamba1(
            inner=_number(config, 2, "mamba_expand", "expand") * hidden,
            state_size=_number(config, 16, "mamba_d_state", "state_size"),
            step_rank=rank,
            conv_width=_number(config, 4, "mamba_d_conv", "conv_kernel"),
        )
    if width := _number(config, 0, "conv_L_cache"):
        return ShortConv(width)
    return UnknownLinear(head_size)


def _mlp(config: object, hidden: int) -> Mlp | Experts:
    active = _number(config, 0, "num_experts_per_tok", "num_experts_per_token", "moe_topk")
    intermediate = _number(config, 0, "moe_intermediate_size")
    if _number(config, 0, "time_step_rank"):
        return Mlp(0)  # Mamba and Falcon-Mamba have none, and call their inner size the intermediate one
    if active and intermediate:
        return Experts(
            total=_number(config, 0, "num_experts", "num_local_experts", "n_routed_experts"),
            active=active,
            intermediate=intermediate,
            shared_intermediate=_number(
                config, 0, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"
            )
            or intermediate * _number(config, 0, "num_shared_experts"),
        )
    return Mlp(_number(config, 4 * hidden, "intermediate_size"))


def _number(config: object, default: int, *names: str) -> int:
    """The first of these attributes that is a positive integer, the same in all layers."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers, where layers differ: there is no such number of all
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default
