"""Random vision-language checkpoints, small enough to start in seconds."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import random_models

from .tiny_models import SMALL

SPECIAL = ("image", "video", "image_start", "image_end", "image_thumbnail", "image_id_start", "image_id_end")
SPECIAL += ("slice_start", "slice_end")
"""What image processors ask the tokenizer for."""
QWEN_NAMES = {"image": "image_pad", "video": "video_pad"}
QWEN_NAMES |= {"image_start": "vision_start", "image_end": "vision_end"}
FIRST_SPECIAL_ID = 480
"""Ids behind the words are left to the engine."""
IMAGE_ID = FIRST_SPECIAL_ID
VIDEO_ID, START_ID, END_ID = IMAGE_ID + 1, IMAGE_ID + 2, IMAGE_ID + 3


@dataclass(frozen=True)
class Vision:
    """The vision half of transformers' ``<name>Config``.

    ``fields``: what the configuration says beside its halves; ``processors``: transformers' classes, which
    vLLM asks for the size of their largest image, whatever the limits are.
    """

    config: dict[str, Any]
    processors: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)


_SIGLIP = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
_QWEN = QWEN_TOWER | {"patch_size": 14, "out_hidden_size": 128}
_QWEN_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor")
VISIONS = {
    "Qwen2VL": Vision({"depth": 1, "embed_dim": 64, "hidden_size": 256, "num_heads": 2}, _QWEN_PROCESSORS),
    "Qwen3_5": Vision(_QWEN, _QWEN_PROCESSORS),
    "Qwen3_5Moe": Vision(_QWEN, _QWEN_PROCESSORS),
    "Lfm2Vl": Vision(
        _SIGLIP | {"model_type": "siglip2_vision_model"},
        ("Lfm2VlImageProcessor",),
        {"projector_hidden_size": 64},
    ),
    "MiniCPMV4_6": Vision(
        _SIGLIP | {"insert_layer_id": 0}, ("MiniCPMV4_6ImageProcessor",), {"insert_layer_id": 0}
    ),
}


def save_vision(
    path: Path,
    name: str,
    text: dict[str, Any],
    norm_center: float = 1.0,
    silent: tuple[str, ...] = (),
    text_path: Path | None = None,
) -> Path:
    """Save a random model of transformers' ``<name>Config``, its text half as in :func:`tiny_models.save`.

    ``text_path``: where the text half is saved as a model of its own.
    """
    import transformers

    vision = VISIONS[name]
    tokens = {"image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID}
    tokens |= {"vision_start_token_id": START_ID, "vision_end_token_id": END_ID}
    config = getattr(transformers, f"{name}Config")(
        text_config=SMALL | text,
        vision_config=vision.config,
        tie_word_embeddings=False,
        **tokens,
        **vision.fields,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    language = torch.nn.ModuleDict({"language_model": model.model.language_model, "lm_head": model.lm_head})
    random_models._randomise(language, torch.Generator().manual_seed(0), norm_center)
    with torch.no_grad():
        for key, weight in language.named_parameters():
            if any(part in key for part in silent):
                weight.zero_()
        for key, weight in model.named_parameters():
            if "merger" in key and weight.dim() == 2:  # images are seen as well as words are
                weight.normal_(0, weight.shape[1] ** -0.5)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    save_tokens(path, {f"{name}_token": f"<|{QWEN_NAMES.get(name, name)}|>" for name in SPECIAL})
    for processor in vision.processors:
        getattr(transformers, processor)().save_pretrained(path)
    if text_path is not None:
        alone = transformers.AutoModelForCausalLM.from_config(config.text_config, dtype=torch.float32)
        alone.model.load_state_dict(language["language_model"].state_dict())
        alone.lm_head.load_state_dict(language["lm_head"].state_dict())
        alone.save_pretrained(text_path)
        random_models.save_tokenizer(text_path, SMALL["vocab_size"])
    return path


def save_tokens(path: Path, special: dict[str, str]) -> Any:
    """Save, and return, a tokenizer of words that has these texts, from :data:`FIRST_SPECIAL_ID` on."""
    import transformers

    random_models.save_tokenizer(path, SMALL["vocab_size"])
    words = json.loads((path / "tokenizer.json").read_text())
    for i, text in enumerate(special.values(), FIRST_SPECIAL_ID):
        words["model"]["vocab"][text] = words["model"]["vocab"].pop(f"w{i}")
    (path / "tokenizer.json").write_text(json.dumps(words))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path, extra_special_tokens=special)
    tokenizer.save_pretrained(path)
    return tokenizer
