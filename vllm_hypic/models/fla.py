"""flash-linear-attention's models: one decoder, whose configuration gives each layer a token mixer, either
one of the plugin's linear layers or full attention.

    x <- x + mixer(norm(x))        x <- x + mlp(norm(x))

A model may have no full attention at all.  vLLM asks the class, not the configuration, whether a model has
full attention.  The class always answers yes; without full attention vLLM finds no cache of such a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from ..backends.linear.gdn.delta_net import CPUDeltaNetMixer
from ..backends.linear.retention.mixers import GatedLinearMixer, RetentionMixer
from .fla_config import FULL, FlaConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sequence import IntermediateTensors

    from ..backends.linear.own_layer import OwnLayer

NAMES = WeightsMapper(
    orig_to_new_stacked={
        **{f".attn.{part}_proj": (".attn.qkv_proj", part) for part in "qkv"},
        ".mlp.gate_proj": (".mlp.gate_up_proj", 0),
        ".mlp.up_proj": (".mlp.gate_up_proj", 1),
    },
    # The norm's name depends on whether flash-linear-attention fused the norm with the gate.
    orig_to_new_substr={".g_norm_swish_gate.": ".o_norm.", ".g_norm.": ".o_norm."},
)
"""Maps the checkpoint's names of weights to the names in this module."""


class FlaAttention(nn.Module):
    """Full attention with rotation (half-split layout) of whole heads."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config: FlaConfig = vllm_config.model_config.hf_config
        assert config.attention is not None
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        quant = vllm_config.quant_config
        ranks = get_tensor_model_parallel_world_size()
        own, own_kv = heads // ranks, max(1, kv_heads // ranks)
        self.sizes = [own * size, own_kv * size, own_kv * size]
        bias = bool(config.attention.get("qkv_bias"))
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, size, heads, kv_heads, bias, quant_config=quant, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(
            heads * size, config.hidden_size, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj"
        )
        theta = config.attention.get("rope_theta") or 10000.0
        self.rotary_emb = get_rope(
            size,
            max_position=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
        self.attn = Attention(
            own,
            size,
            size**-0.5,
            num_kv_heads=own_kv,
            cache_config=vllm_config.cache_config,
            quant_config=quant,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Attend over ``hidden [tokens, hidden]`` at ``positions [tokens]``; return the same shape."""
        q, k, v = self.qkv_proj(hidden)[0].split(self.sizes, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        mixed: torch.Tensor = self.o_proj(self.attn(q, k, v))[0]
        return mixed


class FlaMLP(nn.Module):
    """MLP with a SiLU gate."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config: FlaConfig = vllm_config.model_config.hf_config
        quant, hidden, inner = vllm_config.quant_config, config.hidden_size, config.intermediate_size
        assert inner is not None
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias=False, quant_config=quant, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            inner, hidden, bias=False, quant_config=quant, prefix=f"{prefix}.down_proj"
        )
        self.act = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act(self.gate_up_proj(hidden)[0]))[0]
        return out


class FlaLayer(nn.Module):
    """Decoder layer with a mixer and an MLP, each behind its own norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str, mixer: Callable[..., nn.Module]) -> None:
        super().__init__()
        config: FlaConfig = vllm_config.model_config.hf_config
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = mixer(vllm_config, prefix=f"{prefix}.attn")
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = FlaMLP(vllm_config, prefix=f"{prefix}.mlp")

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(positions, self.attn_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "inputs_embeds": 0})
class FlaModel(nn.Module):
    """Decoder without output head; ``mixer`` makes the linear layers."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str, mixer: Callable[..., nn.Module]) -> None:
        super().__init__()
        config: FlaConfig = vllm_config.model_config.hf_config
        self.embeddings = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embeddings"
        )
        self.layers = nn.ModuleList(
            FlaLayer(vllm_config, f"{prefix}.layers.{index}", FlaAttention if kind == FULL else mixer)
            for index, kind in enumerate(config.layer_types)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the normed hidden states ``[tokens, hidden]`` of ``input_ids``, ``positions [tokens]``."""
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(positions, hidden)
        normed: torch.Tensor = self.norm(hidden)
        return normed


class FlaForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """Causal language model whose linear layers have the class ``mixer``."""

    mixer: ClassVar[type[OwnLayer]]
    hf_to_vllm_mapper = NAMES
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: FlaConfig = vllm_config.model_config.hf_config
        self.config = config
        self.model = FlaModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), mixer=self.mixer)
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embeddings)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.embeddings(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids, positions, inputs_embeds)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load ``weights``; raise ``ValueError``, in stock engines too, if ``mixer`` refuses the platform."""
        for layer in self.modules():
            if isinstance(layer, self.mixer) and (reason := layer.refusal()) is not None:
                raise ValueError(f"{type(self).__name__}: {reason}")
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=NAMES)
        return loaded

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return cls.mixer.state_dtypes(vllm_config.model_config.dtype, vllm_config.cache_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return cls.mixer.state_shapes(vllm_config.model_config.hf_config, ranks)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return cls.mixer.state_copies()


class DeltaNetForCausalLM(FlaForCausalLM):
    """DeltaNet, with the delta rule (arXiv:2406.06484)."""

    mixer = CPUDeltaNetMixer


class RetNetForCausalLM(FlaForCausalLM):
    """RetNet, with retention (arXiv:2307.08621)."""

    mixer = RetentionMixer


class GLAForCausalLM(FlaForCausalLM):
    """GLA, with gated linear attention (arXiv:2312.06635)."""

    mixer = GatedLinearMixer
