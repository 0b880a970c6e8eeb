"""What segments of real models weigh and save: bytes of a record and FLOPs of its prefill, by length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from vllm_hypic.store.eviction.flops import FlopModel
from vllm_hypic.store.protocol import CacheValue

LIVE_HEADS = ((64, 21 / 32), (256, 12 / 32), (1024, 3 / 32), (4096, 0.0))
"""Share of heads whose transition is not yet zero after so many tokens: measured on Mamba-style gates.
Between them by the logarithm of the length."""


@dataclass(frozen=True)
class RecordShape:
    """A model's records: K and V a token, and per segment states and the transitions of heads that live."""

    name: str
    attention_layers: int
    linear_layers: int
    flops: FlopModel
    token_bytes: int
    state_bytes: int
    transition_bytes: int
    """Bytes of all heads; those that died out are left out."""

    def value(self, tokens: int) -> CacheValue:
        lengths, shares = zip(*LIVE_HEADS, strict=True)
        live = float(np.interp(math.log(tokens), np.log(lengths), shares))
        nbytes = self.state_bytes + round(live * self.transition_bytes) + tokens * self.token_bytes
        return CacheValue(tokens, self.flops.prefill(tokens), nbytes)


def _qwen35(name: str, layers: int, config: SimpleNamespace) -> RecordShape:
    """Every fourth layer is full attention.  K, V and conv tails in bf16, S in fp32, T in fp16."""
    attention = layers // 4
    linear = layers - attention
    heads, key, value = (
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    mixed = 2 * config.linear_num_key_heads * key + heads * value
    return RecordShape(
        name,
        attention,
        linear,
        FlopModel.from_hf_config(config, attention, linear),
        token_bytes=attention * 2 * config.num_key_value_heads * config.head_dim * 2,
        state_bytes=linear * (heads * key * value * 4 + (config.linear_conv_kernel_dim - 1) * mixed * 2),
        transition_bytes=linear * heads * key * key * 2,
    )


_GDN = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}

SHAPES: Mapping[str, RecordShape] = {
    shape.name: shape
    for shape in (
        _qwen35(
            "qwen3.5-35b-a3b",
            40,
            SimpleNamespace(
                **_GDN,
                hidden_size=2048,
                num_attention_heads=16,
                num_key_value_heads=2,
                head_dim=256,
                linear_num_key_heads=16,
                linear_num_value_heads=32,
                moe_intermediate_size=512,
                shared_expert_intermediate_size=512,
                num_experts=256,
                num_experts_per_tok=8,
            ),
        ),
        _qwen35(
            "random-150m",
            16,
            SimpleNamespace(
                **_GDN,
                hidden_size=768,
                intermediate_size=2304,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=128,
                linear_num_key_heads=8,
                linear_num_value_heads=8,
            ),
        ),
        RecordShape(
            "marconi-7b",
            4,
            24,
            FlopModel.from_hf_config(
                SimpleNamespace(num_attention_heads=32, intermediate_size=10_923), 4, 24
            ),
            token_bytes=4 * 2 * 4096 * 2,
            state_bytes=24 * 4096 * 128 * 2,
            transition_bytes=24 * 64 * 2,
        ),
    )
}
"""Qwen3.5-35B-A3B, the model that the other benchmarks run by default, and the 7B hybrid of Marconi's
evaluation, with states as large as its paper has them (17.4 GB for 10,000 tokens with one every 16)."""
