"""Random checkpoints of models that hear, small enough to start in seconds."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.lib import random_models

from .tiny_models import PT, SMALL
from .tiny_vision import FIRST_SPECIAL_ID, QWEN_TOWER, save_tokens

TEXTS = {"audio": "<|AUDIO|>", "audio_bos": "<|audio_bos|>", "audio_eos": "<|audio_eos|>"}
TEXTS |= {"image": "<|IMAGE|>", "video": "<|VIDEO|>"}
TEXTS |= {"vision_bos": "<|vision_bos|>", "vision_eos": "<|vision_eos|>"}
"""What processors ask the tokenizer for."""
AUDIO_ID, START_ID, END_ID, IMAGE_ID, VIDEO_ID, SEEN_ID, SEEN_END_ID = range(
    FIRST_SPECIAL_ID, FIRST_SPECIAL_ID + len(TEXTS)
)
MEL_BINS = 16
TOWER = {"num_mel_bins": MEL_BINS, "d_model": 64}
TOWER |= {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}


def save_audio(path: Path, name: str, text: dict[str, Any]) -> Path:
    """Save a random ``Qwen2Audio`` or ``Qwen2_5Omni``, its text half as in :func:`tiny_models.save`."""
    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    {"Qwen2Audio": _save_qwen2_audio, "Qwen2_5Omni": _save_qwen2_5_omni}[name](path, SMALL | text)
    return path


def _save_qwen2_audio(path: Path, text: dict[str, Any]) -> None:
    import transformers

    config = transformers.Qwen2AudioConfig(
        audio_config=TOWER, text_config=text, audio_token_index=AUDIO_ID, tie_word_embeddings=False
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    whole = model.model
    _randomise(whole.language_model, model.lm_head, whole.audio_tower, whole.multi_modal_projector)
    # By the names that the first of these models were published with; transformers 5.19 writes others.
    parts = {
        "language_model.model": whole.language_model,
        "language_model.lm_head": model.lm_head,
        "audio_tower": whole.audio_tower,
        "multi_modal_projector": whole.multi_modal_projector,
    }
    _save_weights(path, parts)
    config.architectures = ["Qwen2AudioForConditionalGeneration"]
    config.save_pretrained(path)
    transformers.Qwen2AudioProcessor(*_extractor_and_tokenizer(path)).save_pretrained(path)


def _save_qwen2_5_omni(path: Path, text: dict[str, Any]) -> None:
    """Of its thinker alone, by the whole model's names."""
    import transformers

    hidden = text["hidden_size"]
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config=TOWER | {"output_dim": hidden},
        vision_config=QWEN_TOWER | {"out_hidden_size": hidden, "fullatt_block_indexes": [0]},
        text_config=text,
        audio_token_index=AUDIO_ID,
        image_token_index=IMAGE_ID,
        video_token_index=VIDEO_ID,
        audio_start_token_id=START_ID,
        audio_end_token_id=END_ID,
    )
    model = transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)
    _randomise(model.model, model.lm_head, model.audio_tower, model.visual.merger)
    _save_weights(path, {"thinker": model})
    named = {"architectures": ["Qwen2_5OmniModel"]}
    transformers.Qwen2_5OmniConfig(thinker_config=config.to_dict(), **named).save_pretrained(path)
    seeing = transformers.Qwen2VLImageProcessor(), transformers.Qwen2VLVideoProcessor()
    transformers.Qwen2_5OmniProcessor(*seeing, *_extractor_and_tokenizer(path)).save_pretrained(path)


def _save_weights(path: Path, parts: dict[str, torch.nn.Module]) -> None:
    weights = {f"{part}.{n}": w for part, module in parts.items() for n, w in module.state_dict().items()}
    save_file(weights, path / "model.safetensors", metadata=PT)


def _randomise(language: torch.nn.Module, head: torch.nn.Module, *encoders: torch.nn.Module) -> None:
    """The language half as in other tiny models; the others so that what is heard and seen counts as much as
    words do."""
    text = torch.nn.ModuleDict({"language_model": language, "lm_head": head})
    with torch.no_grad():
        random_models._randomise(text, torch.Generator().manual_seed(0), 1.0)
        for encoder in encoders:
            for weight in encoder.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, weight[0].numel() ** -0.5)


def _extractor_and_tokenizer(path: Path) -> tuple[Any, Any]:
    import transformers

    extractor = transformers.WhisperFeatureExtractor(feature_size=MEL_BINS)
    return extractor, save_tokens(path, {f"{name}_token": text for name, text in TEXTS.items()})
