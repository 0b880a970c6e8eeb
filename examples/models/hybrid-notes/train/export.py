"""Writes a checkpoint as a Hugging Face model in bf16, after comparing its scores with those of transformers.

    python export.py CHECKPOINT OUT_DIR

The linear heads are widened with zeros to 64, the smallest size of vLLM's CPU kernels: most of a state stays
zero, and the model computes what it computed before.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from data import gen
from model import WIDE, Config, Model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

TOLERANCE = 1e-3  # of the largest score, in float32


def widen(weights: dict[str, Tensor], c: Config, dim: int) -> tuple[dict[str, Tensor], Config]:
    """The same model with linear heads of `dim`, of which all but the first dimensions are zero.

    The gated norm divides by the root of the mean square; zeros make it smaller; the weight makes up for it.
    """

    def stretch(rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (-1, c.linear_dim))
        zeros = heads.new_zeros(len(heads), dim - c.linear_dim, *heads.shape[2:])
        return torch.cat([heads, zeros], 1).flatten(0, 1)

    wide = dict(weights)
    for name, weight in weights.items():
        if name.endswith(("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight")):
            wide[name] = stretch(weight)
        elif name.endswith("linear_attn.norm.weight"):
            wide[name] = stretch(weight * (c.linear_dim / dim) ** 0.5)
        elif name.endswith("out_proj.weight"):
            wide[name] = stretch(weight.T).T.contiguous()
    return wide, replace(c, linear_dim=dim)


def narrow(weights: dict[str, Tensor], c: Config, dim: int) -> tuple[dict[str, Tensor], Config]:
    """Undoes `widen`, to linear heads of `dim`."""

    def cut(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, c.linear_dim))[:, :dim].flatten(0, 1)

    small = dict(weights)
    for name, weight in weights.items():
        if name.endswith(("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight")):
            small[name] = cut(weight)
        elif name.endswith("linear_attn.norm.weight"):
            small[name] = cut(weight) * (c.linear_dim / dim) ** 0.5
        elif name.endswith("out_proj.weight"):
            small[name] = cut(weight.T).T.contiguous()
    return small, replace(c, linear_dim=dim)


def hf_config(c: Config) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.intermediate,
        num_hidden_layers=c.layers,
        full_attention_interval=c.interval,
        num_attention_heads=c.query_heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        linear_key_head_dim=c.linear_dim,
        linear_value_head_dim=c.linear_dim,
        linear_num_key_heads=c.linear_heads,
        linear_num_value_heads=c.linear_heads,
        mamba_ssm_dtype="float32",
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": c.theta,
            "partial_rotary_factor": c.rotary,
        },
        tie_word_embeddings=True,
        bos_token_id=gen.BOS,
        eos_token_id=gen.EOS,
        pad_token_id=gen.PAD,
    )


def load(folder: Path) -> Model:
    """The model that `main` wrote to a folder, without the zeros that it added, for inference."""
    c = Qwen3_5TextConfig.from_pretrained(folder)
    config = Config(
        vocab=c.vocab_size,
        hidden=c.hidden_size,
        intermediate=c.intermediate_size,
        layers=c.num_hidden_layers,
        interval=c.layer_types.index("full_attention") + 1,
        linear_heads=c.linear_num_value_heads,
        linear_dim=c.linear_value_head_dim,
        query_heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rotary=c.rope_parameters["partial_rotary_factor"],
        theta=c.rope_parameters["rope_theta"],
    )
    stored = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    weights, config = narrow(stored, config, Config.linear_dim)
    model = Model(config)
    model.load_state_dict(weights)
    return model.requires_grad_(False)


@torch.no_grad()
def difference(ours: Model, theirs: Qwen3_5ForCausalLM) -> float:
    """The largest difference of scores on a prompt, as a part of the largest score."""
    ids = torch.tensor([gen.flat(gen.prompt(10_000_000, n_docs=4, doc_len=48, kind="both"))])
    expected = theirs(ids).logits
    got = ours.logits(ours(ids, ours.context(torch.ones(ids.shape))))
    return ((got - expected).abs().max() / expected.abs().max()).item()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    saved = torch.load(args.checkpoint)
    ours = Model(Config(**saved["config"]), fast=False)
    ours.load_state_dict(saved["model"])
    weights, config = widen(saved["model"], ours.config, WIDE)
    theirs = Qwen3_5ForCausalLM(hf_config(config)).float()
    result = theirs.load_state_dict(weights, strict=False)
    if result.unexpected_keys or set(result.missing_keys) - {"lm_head.weight"}:
        print(f"names differ: {result}", file=sys.stderr)
        return 1
    theirs.tie_weights()
    found = difference(ours, theirs.eval())
    print(f"largest difference from transformers in float32: {found:.1e} of the largest score")
    if not found < TOLERANCE:
        print(f"expected less than {TOLERANCE:.0e}: nothing written", file=sys.stderr)
        return 1
    theirs.to(torch.bfloat16).save_pretrained(args.out)
    words = {word: number for number, word in enumerate(gen.vocab_words())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "sep")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(args.out)
    ends = {"bos_token_id": gen.BOS, "eos_token_id": gen.EOS, "pad_token_id": gen.PAD}
    (args.out / "generation_config.json").write_text(json.dumps(ends) + "\n")
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
    print(f"{parameters:,} parameters after {saved['tokens']:,} tokens: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
