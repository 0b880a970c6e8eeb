"""Write docs/reference/models.md: what `vllm-hypic check` says of every text-generation architecture of vLLM.

    .venv/bin/python tools/models_table.py --write docs/reference/models.md  # all, 10 minutes on one core
    .venv/bin/python tools/models_table.py LlamaForCausalLM                  # the row of one

Each is looked at with the configuration that transformers, or vLLM, takes for it where nothing is said, in a
process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
from model_configurations import NEMOTRONS_THAT_SEE, configuration

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FAMILIES, WINDOWED = "tests/families/test_contract.py", "tests/families/test_windowed.py"
VISION = "tests/engine/test_vision_text.py"
TESTED = {
    "BailingMoeLinearV2ForCausalLM": FAMILIES,
    "BailingMoeV2_5ForCausalLM": FAMILIES,
    "BailingMoeV3ForCausalLM": FAMILIES,
    "DeltaNetForCausalLM": FAMILIES,
    "DeepseekV2ForCausalLM": FAMILIES,
    "DeepseekV3ForCausalLM": FAMILIES,
    "FalconH1ForCausalLM": FAMILIES,
    "FalconMambaForCausalLM": FAMILIES,
    "GLAForCausalLM": FAMILIES,
    "RetNetForCausalLM": FAMILIES,
    "Gemma2ForCausalLM": FAMILIES,
    "Gemma3ForCausalLM": WINDOWED,
    "Gemma3nForCausalLM": FAMILIES,
    "Gemma4ForCausalLM": FAMILIES,
    "Glm4MoeLiteForCausalLM": FAMILIES,
    "GptOssForCausalLM": WINDOWED,
    "GraniteMoeHybridForCausalLM": FAMILIES,
    "JambaForCausalLM": FAMILIES,
    "Lfm2ForCausalLM": FAMILIES,
    "Lfm2MoeForCausalLM": FAMILIES,
    "Lfm2VlForConditionalGeneration": VISION,
    "InternS2PreviewForConditionalGeneration": VISION,
    "MiniCPMV4_6ForConditionalGeneration": VISION,
    "NemotronHPuzzleForCausalLM": VISION,
    "KimiLinearForCausalLM": FAMILIES,
    "LlamaForCausalLM": "tests/unit/eval/test_gate_pretrained.py",
    "Mamba2ForCausalLM": FAMILIES,
    "MambaForCausalLM": FAMILIES,
    "MistralForCausalLM": WINDOWED,
    "NemotronHForCausalLM": FAMILIES,
    "OlmoHybridForCausalLM": FAMILIES,
    "Qwen3ForCausalLM": "tests/engine/test_oracle_agreement.py",
    "Qwen3NextForCausalLM": FAMILIES,
    "Qwen3_5ForCausalLM": "tests/engine/test_oracle_agreement.py",
    "Qwen3_5MoeForCausalLM": FAMILIES,
    "Qwen3_5ForConditionalGeneration": FAMILIES,
    "Zamba2ForCausalLM": FAMILIES,
}
"""Where an engine answers prompts with segments and is held against full recompute."""
PATIENCE_S = 300.0
TESTED_HERE, SERVED, REFUSED, UNKNOWN = range(4)
SECTIONS = {
    TESTED_HERE: ("Served, tested in an engine", "tested by"),
    SERVED: ("Served, by configuration", "layers"),
    REFUSED: ("Refused", "why"),
    UNKNOWN: ("Not known", "why"),
}

INTRODUCTION = """\
# Models

This page says which architectures the plugin serves. For a checkpoint of your own, run:

    vllm-hypic check MODEL

The [command](commands.md#vllm-hypic-check) reads the configuration alone. It says which kinds of layers are
served, how many bytes a segment takes in each, and how many segments a pool holds. GGUF files need the
package `gguf` (and vLLM a plugin for such files). Layers with a sliding window keep all K and V of a segment,
because islands and segments with the same beginning read K and V before the window.

The tables cover {architectures} architectures: all text generation of vLLM {vllm}, its hybrids with vision,
and the classes of this package (`vllm_hypic/models/`). Each architecture is checked on CPU with the default
configuration of transformers {transformers} or vLLM, and additions in `tools/model_configurations.py`.
Checkpoints of one class may differ in their layers. Models with vision are checked for text;
[Refusals](refusals.md#requests-with-status-400) lists the media.

{tested} architectures are tested in an engine, {served} more are served by their configuration, {refused}
are refused, and {unknown} cannot be checked here.

## Kinds of layers

| kind | CPU and CUDA | CPU only |
|---|---|---|
| attention | full, in windows; RoPE, M-RoPE or none | soft-caps, shared KV |
| latent attention (MLA) | DeepSeek-V2 and V3, GLM-4.7-Flash, Bailing V3 | Kimi-Linear, Ring and Ling 2.5 |
| gated delta net, Kimi delta attention | Qwen3-Next, Qwen3.5, Bailing V3 | OLMo-Hybrid, Kimi-Linear, \
DeltaNet of flash-linear-attention |
| gated short convolution | LFM2, LFM2.5 | |
| Mamba2 | Nemotron-H (on CPU without experts), Granite 4, Falcon-H1, Zamba2, Mamba2 | |
| Mamba1 | | Jamba, Mamba, Falcon-Mamba |
| lightning attention | | Ring and Ling 2.5, Ring-linear 2.0, with RoPE or YaRN |
| retention, gated linear attention | | RetNet and GLA of flash-linear-attention |

On CPU, latent attention needs latents of 512 and rotated keys of 64. In other dtypes than bf16, and on CPUs
without AMX, vLLM prefills such models whole, without chunks and prefix cache.

## Faults of vLLM 0.32 on CPU that the plugin mends

| models | fault of a stock engine |
|---|---|
| hybrids | a step with a single prefill token, or a request with `seed` and a chunked prompt, ends the \
engine |
| Mamba2 with prefix caching; Mamba1 | the engine ends |
| LFM2, MLA in eager engines | Q and K are rotated wrongly; stock vLLM is right with `--compilation-config \
'{{"custom_ops": ["all", "-rotary_embedding"]}}'` |
| OLMo-Hybrid | neither built nor loaded. Use `--mamba-ssm-cache-dtype float32`: bf16, vLLM's default, is \
several times slower |
| Kimi-Linear, Bailing V3, Ring and Ling 2.5 | their recurrence exists for GPUs alone. Without AMX or \
bf16, a stock engine also needs `--no-enable-prefix-caching` |
| Ring-linear 2.0 | no class; this package has one. Decays follow the rule of vLLM and SGLang, not the \
code beside the checkpoints |

Configurations of Ring and Ling 2.5 are read without the code of the checkpoints. Their linear layers rotate
by float64 angles, because a state that moves to another position needs exact rotations."""


@dataclass(frozen=True)
class Row:
    architecture: str
    section: int
    text: str

    def __str__(self) -> str:
        return f"| `{self.architecture}` | {self.text} |"


def architectures() -> list[str]:
    """Those of text generation that vLLM registers, its hybrids of other kinds, and ours."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    return sorted({*_TEXT_GENERATION_MODELS, *hybrids(), *TESTED})


def hybrids() -> Iterator[str]:
    """Architectures of vLLM that generate and keep states, with KV or alone, whatever else they do."""
    from vllm.model_executor.models.registry import (
        _MULTIMODAL_MODELS,
        _TEXT_GENERATION_MODELS,
        ModelRegistry,
    )

    for architecture in (*_TEXT_GENERATION_MODELS, *_MULTIMODAL_MODELS):
        try:
            model: Any = ModelRegistry.models[architecture].load_model_cls()
        except (ImportError, RuntimeError):  # needs a package that is not there
            continue
        if getattr(model, "is_hybrid", False) or getattr(model, "has_inner_state", False):
            yield architecture


def row_of(architecture: str) -> Row:
    """Makes vLLM's groups of ranks: once in a process."""
    from benchmarks.lib.random_models import save_tokenizer
    from vllm_hypic.check.findings import NotBuilt, find
    from vllm_hypic.config.engine import HypicConfig

    if (config := configuration(architecture)) is None:
        return Row(architecture, UNKNOWN, "transformers and vLLM have no configuration to try")
    with tempfile.TemporaryDirectory() as folder:
        if architecture in NEMOTRONS_THAT_SEE:  # they look at it as they are built
            save_tokenizer(Path(folder), vocab=512)
        (Path(folder) / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        try:
            found = find(Path(folder), HypicConfig.from_mapping({"pool_bytes": 1 << 40}), {})
        except NotBuilt as e:
            return Row(architecture, UNKNOWN, _cell(str(e).replace(folder, "")))
    refused = [f"{k.refusal} ({k.layers} layers)" for k in found.kinds if k.refusal is not None]
    if not found.served:
        return Row(architecture, REFUSED, _cell("; ".join(refused) or str(found.refusal)))
    if architecture in TESTED:
        return Row(architecture, TESTED_HERE, f"`{TESTED[architecture]}`")
    return Row(architecture, SERVED, _cell("; ".join(f"{k.layers} {k.what}" for k in found.kinds)))


def _cell(text: str) -> str:
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= 240 else f"{text[:237]}..."


def rows(wanted: Sequence[str]) -> Iterator[Row]:
    import vllm_hypic.check.findings  # noqa: F401  imported once, by the process that the others are forked from

    fork = multiprocessing.get_context("fork")
    for architecture in wanted:
        here, there = fork.Pipe(duplex=False)
        process = fork.Process(target=_send, args=(there, architecture), daemon=True)
        process.start()
        there.close()
        try:
            late = not here.poll(PATIENCE_S)
            yield here.recv() if not late else Row(architecture, UNKNOWN, "the build takes minutes")
        except EOFError:
            yield Row(architecture, UNKNOWN, "vLLM ends the process during the build")
        process.kill()
        process.join()


def _send(there: Connection, architecture: str) -> None:
    there.send(row_of(architecture))


def page(found: Sequence[Row]) -> str:
    import transformers
    import vllm

    count = {section: sum(row.section == section for row in found) for section in SECTIONS}
    lines = [
        INTRODUCTION.format(
            architectures=len(found),
            vllm=vllm.__version__.split("+")[0],
            transformers=transformers.__version__,
            tested=count[TESTED_HERE],
            served=count[SERVED],
            refused=count[REFUSED],
            unknown=count[UNKNOWN],
        )
    ]
    for section, (title, column) in SECTIONS.items():
        lines += ["", f"## {title}", "", f"| architecture | {column} |", "|---|---|"]
        lines += [str(row) for row in found if row.section == section]
    return "\n".join(lines) + "\n"


@click.command()
@click.argument("only", nargs=-1)
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the page.")
def main(only: Sequence[str], write: Path | None) -> None:
    found = []
    for row in rows(only or architectures()):
        found.append(row)
        click.echo(str(row))
    if write is not None:
        write.write_text(page(found))


if __name__ == "__main__":
    main()
