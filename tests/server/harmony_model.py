"""A tiny random gpt-oss whose tokenizer has the vocabulary that the package ``openai_harmony`` holds."""

from pathlib import Path

import torch
from engine import tiny_models
from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

WORDS, NAMED, ROWS = 199998, 200019, 201088
"""Ids from which on tokens are special, have no name of their own, and have no row in a published gpt-oss."""


def encoding() -> HarmonyEncoding:
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def save(folder: Path) -> Path:
    tokens = {"vocab_size": ROWS, "bos_token_id": WORDS, "eos_token_id": 200002, "pad_token_id": WORDS + 1}
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    fields = {**tokens, **heads, **experts, **layers, "sliding_window": 64}
    tiny_models.save(folder, "GptOss", fields, torch.bfloat16)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Words that are tokens have harmony's ids; others are cut into bytes: there are no merges."""
    harmony, letters = encoding(), bytes_to_unicode()
    spelt = {"".join(letters[b] for b in harmony._inner.decode_bytes([i])): i for i in range(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=spelt, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [harmony.decode([i]) for i in range(WORDS, NAMED)]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=names[0],
        eos_token="<|return|>",
        pad_token=names[1],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
