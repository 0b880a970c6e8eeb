"""Random checkpoints of further architectures, small enough to start in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_hypic.harness import random_models

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
}


def save(
    path: Path,
    name: str,
    fields: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    norm_center: float = 1.0,
    silent: tuple[str, ...] = (),
) -> Path:
    """Save a random model of transformers' ``<name>Config`` with ``fields`` beside :data:`SMALL`.

    ``norm_center``: the weight at which an RMSNorm of this architecture only normalises; ``silent``: parts
    of names of parameters that are zero.
    """
    import transformers

    config = getattr(transformers, f"{name}Config")(**(SMALL | fields))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rng = torch.Generator().manual_seed(0)
    random_models._randomise(model, rng, norm_center)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(".sinks"):  # as large as the sum over a window of other columns
                weight.normal_(5, 1, generator=rng)
            elif key.endswith(".bias"):
                weight.normal_(0, 0.2, generator=rng)
            elif weight.dim() == 3 and "conv" not in key:  # experts: [experts, out, in]
                weight.normal_(0, 0.5 / weight.shape[2] ** 0.5, generator=rng)
            if any(part in key for part in silent):
                weight.zero_()
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path)
    random_models._save_tokenizer(path, 512)
    return path


def save_vision(
    path: Path,
    name: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    norm_center: float = 1.0,
    silent: tuple[str, ...] = (),
) -> Path:
    """Save a random vision-language model of transformers' ``<name>Config``, text half as in :func:`save`."""
    import transformers

    tokens = {"image_token_id": 500, "video_token_id": 501}
    tokens |= {"vision_start_token_id": 502, "vision_end_token_id": 503}
    config = getattr(transformers, f"{name}Config")(
        text_config=SMALL | text, vision_config=vision, tie_word_embeddings=False, **tokens
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    language = torch.nn.ModuleDict({"language_model": model.model.language_model, "lm_head": model.lm_head})
    random_models._randomise(language, torch.Generator().manual_seed(0), norm_center)
    with torch.no_grad():
        for key, weight in language.named_parameters():
            if any(part in key for part in silent):
                weight.zero_()
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    random_models._save_tokenizer(path, SMALL["vocab_size"])
    # vLLM asks the processor for the size of its largest image, whatever the limits are.
    transformers.Qwen2VLImageProcessor().save_pretrained(path)
    transformers.Qwen2VLVideoProcessor().save_pretrained(path)
    return path
