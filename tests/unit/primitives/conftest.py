"""Tokenizers of every kind that matters for cutting text, trained here on a few lines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "Document one: the capital of France is Paris, and its river is the Seine.",
    "Document two: def add(a, b):\n    return a + b\n\n# 12345 67890",
    "Größe, naïve café, 東京は日本の首都です。 Привет, мир!",
    "question: what is the capital?  answer: Paris",
] * 4

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_TOKENS = ["<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def _byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>", *CHAT_TOKENS]
    known = {"special_tokens": special, "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, **known)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def gpt2(add_prefix_space: bool) -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space))


def qwen() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _byte_level(pre_tokenizers.Sequence([split, letters]))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(bos: bool = True, eos: bool = False) -> Tokenizer:
    """BPE with byte fallback over text whose spaces are ▁, as Llama's conversions have it."""
    trained = Tokenizer(models.BPE())
    # Words are merged up to spaces only, whatever the tokenizer itself does with them.
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    # Characters that only byte fallback can give are left out: "東" must come from three bytes.
    pieces = [p for p in model["vocab"] if p.isascii() or "▁" in p]
    merges = [tuple(m) for m in model["merges"] if m[0] + m[1] in pieces and set(m) <= set(pieces)]
    vocab = {p: i for i, p in enumerate(["<unk>", "<s>", "</s>", *BYTES, *pieces])}
    pieces = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(pieces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *CHAT_TOKENS])
    template = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    return tokenizer


def llama_legacy(eos: bool = False) -> Tokenizer:
    tokenizer = _sentencepiece(eos=eos)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def llama_metaspace(prepend_scheme: str, **specials: bool) -> Tokenizer:
    tokenizer = _sentencepiece(**specials)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    return tokenizer


def llama3() -> Tokenizer:
    tokenizer = gpt2(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>"])
    begin = [("<s>", tokenizer.token_to_id("<s>"))]
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return tokenizer


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *CHAT_TOKENS]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    forms = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(**forms, special_tokens=ends)
    return tokenizer


END = {"eos_token": "<|endoftext|>"}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
T5 = {"eos_token": "</s>", "unk_token": "<unk>"}
BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, str]]] = {
    "gpt2": (lambda: gpt2(False), END),
    "gpt2-prefix-space": (lambda: gpt2(True), END),
    "qwen": (qwen, END),
    "llama3": (llama3, {"bos_token": "<s>", **END}),
    "llama-legacy": (llama_legacy, LLAMA),
    "llama-legacy-eos": (lambda: llama_legacy(eos=True), LLAMA),
    "metaspace-first": (lambda: llama_metaspace("first"), LLAMA),
    "metaspace-always": (lambda: llama_metaspace("always"), LLAMA),
    "metaspace-never": (lambda: llama_metaspace("never"), LLAMA),
    "t5": (lambda: llama_metaspace("always", bos=False, eos=True), T5),
    "bert": (bert, BERT),
}
MODEL_CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 64},
    **{"intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1},
    "max_position_embeddings": 512,
}
LOSSLESS = ("gpt2", "llama3")
"""Kinds whose ``decode(encode(text))`` is ``text`` for any text (the others normalise or drop a space)."""


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder per kind, as ``save_pretrained`` writes it, with a chat template and a model's config."""
    root = tmp_path_factory.mktemp("tokenizers")
    for kind, (make, special) in KINDS.items():
        special = {"pad_token": special.get("eos_token", ""), **special}
        fast = PreTrainedTokenizerFast(tokenizer_object=make(), **special)
        fast.chat_template = CHAT_TEMPLATE
        fast.save_pretrained(root / kind)
        (root / kind / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
