"""Random checkpoints of further architectures, small enough to start in seconds."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.lib import random_models

Weights = dict[str, torch.Tensor]
PT = {"format": "pt"}
SMALL: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
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
    random_models.save_tokenizer(path, 512)
    return path


@contextmanager
def weights_of(path: Path, dtype: torch.dtype | None = None) -> Iterator[Weights]:
    """A model's weights, which are saved as they are afterwards; in ``dtype`` meanwhile in float32."""
    file = path / "model.safetensors"
    weights = load_file(file)
    if dtype is not None:
        weights = {name: weight.float() for name, weight in weights.items()}
    yield weights
    stored = {n: w.contiguous() if dtype is None else w.to(dtype).contiguous() for n, w in weights.items()}
    save_file(stored, file, metadata=PT)


@contextmanager
def config_of(path: Path) -> Iterator[dict[str, Any]]:
    """A model's configuration, which is saved as it is afterwards."""
    config = json.loads((path / "config.json").read_text())
    yield config
    (path / "config.json").write_text(json.dumps(config))


def save_adapter(path: Path, seed: int, rank: int = 8) -> None:
    """Save a random LoRA adapter of the projections of a one-layer attention model of :data:`SMALL`."""
    rng = torch.Generator().manual_seed(seed)
    hidden, head = SMALL["hidden_size"], SMALL["head_dim"]
    sizes = {"q_proj": SMALL["num_attention_heads"], "k_proj": 2, "v_proj": SMALL["num_key_value_heads"]}
    weights = {}
    for name, heads in sizes.items():
        for part, shape in (("lora_A", (rank, hidden)), ("lora_B", (heads * head, rank))):
            key = f"base_model.model.model.layers.0.self_attn.{name}.{part}.weight"
            weights[key] = torch.randn(shape, generator=rng) / shape[1] ** 0.5
    path.mkdir(parents=True)
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "target_modules": list(sizes)}
    (path / "adapter_config.json").write_text(json.dumps(config))
