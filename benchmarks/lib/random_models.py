"""Tiny random checkpoints on which every part of position-independent caching leaves a trace.

A freshly initialised Qwen3.5 is useless as test data: its gates are so strong that T is zero, its weights so
small that attention is uniform and the output flat. Here gates follow Mamba's initialisation, so that some
heads forget within a few tokens and other heads remember hundreds. Projections keep the variance of their
input, and attention is peaked. By default every second layer is full attention: with full attention in the
last layer alone, attention of the seam tokens would never reach the output.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

SPECIAL_TOKENS = ("<unk>", "<bos>", "<eos>", "<pad>")
SPECIAL_IDS = {f"{name}_token_id": SPECIAL_TOKENS.index(f"<{name}>") for name in ("bos", "eos", "pad")}
"""Ids of the special tokens, by their names in configurations."""
SPARE_IDS = 16
"""Ids at the end of the vocabulary without a token, as in padded vocabularies of real models."""


def save_hybrid_model(
    path: str | Path,
    *,
    layers: int = 4,
    full_attention_interval: int = 2,
    layer_types: list[str] | None = None,
    hidden: int = 128,
    intermediate: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    linear_head_dim: int = 64,
    linear_key_heads: int = 2,
    linear_value_heads: int = 4,
    partial_rotary_factor: float = 0.25,
    rope_theta: float = 10000.0,
    vocab: int = 512,
    max_positions: int = 32768,
    tie: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Path:
    """Save a random Qwen3.5 text model, in which every `full_attention_interval`-th layer is full attention.

    `layer_types` overrides the pattern. Weights are stored in `dtype`, so that an engine and an oracle that
    compute in other dtypes read the same values.
    """
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    if layer_types is None:
        period = ["linear_attention"] * (full_attention_interval - 1) + ["full_attention"]
        layer_types = [period[i % full_attention_interval] for i in range(layers)]
    config = Qwen3_5TextConfig(
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        linear_key_head_dim=linear_head_dim,
        linear_value_head_dim=linear_head_dim,
        linear_num_key_heads=linear_key_heads,
        linear_num_value_heads=linear_value_heads,
        # The value of published models in this family; the default depends on the machine.
        mamba_ssm_dtype="float32",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": rope_theta,
            "partial_rotary_factor": partial_rotary_factor,
        },
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        **SPECIAL_IDS,
    )
    return save_model(Qwen3_5ForCausalLM(config), Path(path), dtype, seed, norm_center=0.0)


def save_text_model(
    path: str | Path,
    *,
    name: str,
    fields: dict[str, Any],
    max_positions: int = 32768,
    norm_center: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Path:
    """Save a random model of any architecture, from transformers' `<name>Config` with `fields`.

    `norm_center` is the weight at which an RMSNorm of this architecture only normalises.
    """
    import transformers

    config = getattr(transformers, f"{name}Config")(
        max_position_embeddings=max_positions, **SPECIAL_IDS, **fields
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return save_model(model, Path(path), dtype, seed, norm_center)


def save_model(model: nn.Module, path: Path, dtype: torch.dtype, seed: int, norm_center: float) -> Path:
    """Give the model random weights, save the model with a tokenizer, and return the folder."""
    _randomise(model, torch.Generator().manual_seed(seed), norm_center)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path)
    save_tokenizer(path, model.config.vocab_size)
    return path


@torch.no_grad()
def _randomise(model: nn.Module, rng: torch.Generator, norm_center: float) -> None:
    """Draw every parameter by its name. `norm_center` is the weight at which an RMSNorm only normalises."""
    for name, weight in model.named_parameters():
        leaf, owner = name.split(".")[-1], name.split(".")[-2]
        if leaf == "A_log":  # decay rates of 1 to 16 per unit of dt
            weight.copy_(torch.empty_like(weight).uniform_(1, 16, generator=rng).log())
        elif leaf == "dt_bias":  # softplus^-1 of a step that is log-uniform in [1e-3, 1e-1]
            dt = torch.empty_like(weight).uniform_(math.log(1e-3), math.log(1e-1), generator=rng).exp()
            weight.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif owner.endswith("conv1d") or owner == "conv":
            weight.uniform_(-0.5, 0.5, generator=rng)
        elif owner in ("embed_tokens", "word_embeddings", "lm_head"):  # logits of standard deviation 2.5
            weight.normal_(0, 2.5 / weight.shape[1] ** 0.5, generator=rng)
        elif weight.dim() == 3:  # experts [experts, out, in]
            weight.normal_(0, 0.5 / weight.shape[2] ** 0.5, generator=rng)
        elif weight.dim() == 2:
            # Keep the variance, but halve the range of gates, and damp branches with normalised or local
            # output: attention averages its values, and these branches would drown it.
            damped = {"in_proj_a": 0.5, "in_proj_b": 0.5, "a_proj": 0.5, "f_b_proj": 0.5, "f_proj": 0.5}
            damped |= {"down_proj": 0.4, "out_proj": 0.4}
            scale = damped.get(owner, 1.0)
            weight.normal_(0, scale / weight.shape[1] ** 0.5, generator=rng)
        else:  # norms are near identity, except for sharper attention scores
            center = 1.0 if owner == "norm" and "linear_attn" in name else norm_center
            sharpen = 0.5 if owner in ("q_norm", "k_norm") else 0.0
            weight.normal_(center + sharpen, 0.1, generator=rng)


def save_tokenizer(path: Path, vocab: int) -> None:
    """Save a word-level tokenizer with the special tokens and a word `w<id>` per id, except for spare ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(len(SPECIAL_TOKENS), vocab - SPARE_IDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)
