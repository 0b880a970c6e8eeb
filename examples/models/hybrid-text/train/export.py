"""Writes a checkpoint as a Hugging Face model in bf16, after comparing its scores with those of transformers.

python export.py CORPUS CHECKPOINT OUT_DIR
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "hybrid-notes" / "train"))

import torch
from model import WIDE, Config, Model
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

NOTES = Path(__file__).parents[2] / "hybrid-notes" / "train"
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "sep_token": "<sep>"}


def notes_export():
    """The exporter of hybrid-notes, which has this file's name."""
    spec = importlib.util.spec_from_file_location("export_notes", NOTES / "export.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    notes = notes_export()
    saved = torch.load(args.checkpoint)
    ours = Model(Config(**saved["config"]), fast=False)
    ours.load_state_dict(saved["model"])
    weights, config = notes.widen(saved["model"], ours.config, WIDE)
    hf = notes.hf_config(config)
    hf.pad_token_id, hf.bos_token_id, hf.eos_token_id = range(3)
    theirs = Qwen3_5ForCausalLM(hf).float().eval()
    result = theirs.load_state_dict(weights, strict=False)
    if result.unexpected_keys or set(result.missing_keys) - {"lm_head.weight"}:
        print(f"names differ: {result}", file=sys.stderr)
        return 1
    theirs.tie_weights()
    ids = torch.randint(4, config.vocab, (1, 300), generator=torch.Generator().manual_seed(0))
    expected = theirs(ids).logits
    got = ours.logits(ours(ids, ours.context(torch.ones(ids.shape))))
    found = float((got - expected).abs().max() / expected.abs().max())
    print(f"largest difference from transformers in float32: {found:.1e} of the largest score")
    if not found < notes.TOLERANCE:
        print(f"expected less than {notes.TOLERANCE:.0e}: nothing written", file=sys.stderr)
        return 1
    theirs.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(args.corpus / "tokenizer.json"), **SPECIAL)
    tokenizer.save_pretrained(args.out)
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
    print(f"{parameters:,} parameters after {saved['tokens']:,} tokens: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
