"""What `vllm-hypic check` says of configurations, against engines and docs/reference/models.md."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.engines import Engine
from families.rows import Family
from families.table import FAMILIES
from lib import forked
from lib.oracle.fla_models import save_fla_model
from lib.oracle.kimi_models import save_bailing_model

from benchmarks.lib.random_ring import save_ring_model
from vllm_hypic.config.engine import config_of
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.pool.families import FAMILIES as LINEAR
from vllm_hypic.pool.geometry import expected_space

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "models.md"
NOTES = EXAMPLE.parent / "hybrid-notes" / "model"
TABLE = ROOT / "tools" / "models_table.py"
POOL_GIB = 0.0625
CHECK = ("-c", "from vllm_hypic.cli import main; main()", "check")


def run(*arguments: str | Path, tool: tuple[str, ...] = CHECK) -> Any:
    return forked.run([sys.executable, *tool, *map(str, arguments)], timeout=600, cwd=ROOT)


def checked(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def pool(llm: Any) -> tuple[int, int, int]:
    """Bytes of the pool, pages of a segment as sized, and how many of these it holds."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    from vllm_hypic.engine.worker import worker_connector

    geometry, config = worker_connector().geometry, config_of(worker.vllm_config)
    space = expected_space(geometry, config)
    return geometry.nbytes, geometry.bytes_of(space), geometry.pages // space.pages


@pytest.mark.engine
def test_an_engine_has_the_pool_that_is_told(tmp_path: Path) -> None:
    options = {"page_tokens": 32, "expected_segment_tokens": 512}
    found = checked(NOTES, "--pool-gib", str(POOL_GIB), "--hypic", json.dumps(options))
    assert found["refusal"] is None and found["segment_tokens"] == 512
    with Engine(NOTES, tmp_path / "log", options={**options, "pool_bytes": int(POOL_GIB * 2**30)}) as engine:
        nbytes, each, segments = engine.call(pool)
    assert (found["pool_bytes"], found["segments"]) == (nbytes, segments)
    assert sum(kind["segment_bytes"] for kind in found["kinds"]) == each
    assert {kind["what"]: kind["layers"] for kind in found["kinds"]} == {
        "gated delta net, 4 heads of 64 x 64": 6,
        "full attention, 2 KV heads of 64": 2,
    }


@pytest.mark.engine
@pytest.mark.fast("gated-delta", "mamba1-alone", "latents", "windows", "shared-kv")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_engine_logs_the_layers_that_are_told(tmp_path: Path, family: Family) -> None:
    """And no room for what the model does not have."""
    model, log = tmp_path / "model", tmp_path / "log"
    family.save(model)
    dtype, _ = family.cases[0]
    told: Counter[str] = Counter()
    for kind in checked(model)["kinds"]:
        told[kind["what"].partition(",")[0]] += kind["layers"]
    with Engine(model, log, **family.engine_args(dtype)):
        found = re.search(r"hypic: (\d.*); link .* GiB = (.*); eager", log.read_text())
    logged: Counter[str] = Counter()
    for count, kind in re.findall(r"(\d+) ([^(,]+?)(?: \(\w+\))?(?:, |$)", found[1]):
        logged[kind] += int(count)
    assert logged == told
    linear = {kind for kind in told if kind in {f.name for f in LINEAR}}
    assert ("pages" in found[2], "state" in found[2]) == (bool(told.keys() - linear), bool(linear))


KINDS = dict[str, tuple[int, int] | int]
"""Layers of each kind and, where it is told, what a segment takes in them."""
FULL = "full attention, 2 KV heads of 64"
SLIDING = "sliding_attention"
KDA = {"num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4, "kda_layers": [1, 2]}
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
SIZES |= {"intermediate_size": 512, "dtype": "bfloat16"}
TOKENS = 1024
"""Of a segment, as usual."""
KV = TOKENS * 2 * 2 * 64 * 2
MAMBA2 = (8 * 64 * 128 * 4, 3 * (8 * 64 + 2 * 2 * 128) * 2, 8 * 4)
"""Bytes of a layer's state, convolution and transition."""
CONFIGS: dict[str, tuple[dict[str, Any], KINDS]] = {
    "Lfm2ForCausalLM": (
        {"model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}
        | {"block_dim": 256, "conv_dim": 256},
        {"short convolution, 2 inputs of 256 channels": (2, 2 * 2 * 256 * 2), FULL: 1},
    ),
    "NemotronHForCausalLM": (
        {"model_type": "nemotron_h", "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128}
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]}
        | {"n_groups": 2, "head_dim": 64},
        {"Mamba2, 8 heads of 64 x 128": (2, 2 * sum(MAMBA2)), FULL: 1},
    ),
    "OlmoHybridForCausalLM": (
        {"model_type": "olmo_hybrid", "num_hidden_layers": 3, "pad_token_id": 0, "linear_num_key_heads": 2}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 96, "linear_value_head_dim": 192},
        {"gated delta net, 4 heads of 96 x 192": 2, FULL: 1},
    ),
    "KimiLinearForCausalLM": (
        {"model_type": "kimi_linear", "num_hidden_layers": 3, "num_key_value_heads": 4, "v_head_dim": 64}
        | {"linear_attn_config": KDA | {"full_attn_layers": [3]}}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "mla_use_nope": True},
        {"gated delta net, 4 heads of 64 x 64": 2, "latent attention, rows of 576": 1},
    ),
    "DeepseekV2ForCausalLM": (
        {"model_type": "deepseek_v2", "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 512}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 64, "q_lora_rank": None}
        | {"first_k_dense_replace": 3},
        {"latent attention, rows of 576": (3, 3 * TOKENS * 576 * 2)},
    ),
    "Gemma3nForCausalLM": (
        {"model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 2}
        | {"layer_types": [SLIDING, SLIDING, "full_attention", SLIDING, "full_attention"]}
        | {"sliding_window": 64, "intermediate_size": 256, "head_dim": 64}
        | {"vocab_size_per_layer_input": 1000, "hidden_size_per_layer_input": 16},
        {
            "attention in a window of 64, 2 KV heads of 64": (2, 2 * KV),
            FULL: (1, KV),
            "attention over the KV of another layer": (2, 0),
        },
    ),
}


def write(folder: Path, architecture: str, config: dict[str, Any]) -> None:
    config = {"architectures": [architecture], **SIZES, **config}
    (folder / "config.json").write_text(json.dumps(config))


def test_interiors_shorter_than_a_convolution_reaches_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "Lfm2ForCausalLM", CONFIGS["Lfm2ForCausalLM"][0])
    refused = checked(tmp_path, "--hypic", '{"min_segment_tokens": 1}', code=1)
    assert "min_segment_tokens=1: expected at least 2" in refused["refusal"]


RING = {"hidden": 256, "heads": 4, "head_dim": 64, "experts": 8, "layers": 4, "group": 4}
LIGHTNING = {"lightning attention, 4 heads of 64 x 64": (3, 3 * (4 * 64 * 64 * 4 + 4 * 4))}
LATENTS, SMALL = "latent attention, rows of 576", "full attention, 2 KV heads of 32"
DELTA, GLA = "gated delta net, 4 heads of", {"gated linear attention, 4 heads of 16 x 32": 3}


@pytest.mark.parametrize(
    ("save", "fields", "kinds"),
    [
        *((write, {"architecture": name, "config": c}, kinds) for name, (c, kinds) in CONFIGS.items()),
        # Published models bring code for their configuration, or need the package of flash linear attention.
        (save_bailing_model, {"group_size": 3}, {f"{DELTA} 32 x 32": 2, LATENTS: 1}),
        (save_ring_model, RING | {"kv_heads": None}, LIGHTNING | {LATENTS: 1}),
        (save_ring_model, RING | {"kv_heads": 2}, LIGHTNING | {FULL: 1}),
        (save_fla_model, {"kind": "delta_net", "expand_v": 2.0}, {f"{DELTA} 32 x 64": 2, SMALL: 2}),
        (save_fla_model, {"kind": "delta_net", "group": None}, {f"{DELTA} 32 x 32": 4}),
        (save_fla_model, {"kind": "retnet", "group": None}, {"lightning attention, 4 heads of 32 x 32": 4}),
        (save_fla_model, {"kind": "gla", "expand_k": 0.5, "group": 4}, GLA | {SMALL: 1}),
    ],
)
def test_what_layers_take(tmp_path: Path, save: Callable[..., Any], fields: dict, kinds: KINDS) -> None:
    save(tmp_path, **fields)
    found = checked(tmp_path)
    assert found["segment_tokens"] == TOKENS
    assert kinds == {
        kind["what"]: (kind["layers"], kind["segment_bytes"])
        if isinstance(kinds.get(kind["what"]), tuple)
        else kind["layers"]
        for kind in found["kinds"]
    }


def test_a_gguf_file_is_asked_as_its_model(tmp_path: Path) -> None:
    """Its header alone: there are no tensors in this one."""
    from gguf import GGUFWriter

    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_name("a model")
    sizes = {"context_length": 4096, "embedding_length": 256, "block_count": 3, "feed_forward_length": 512}
    for name, size in (sizes | {"head_count": 4, "head_count_kv": 2, "vocab_size": 1000}).items():
        getattr(writer, f"add_{name}")(size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = checked(file)
    assert found["architecture"] == "LlamaForCausalLM"
    assert [(kind["layers"], kind["what"]) for kind in found["kinds"]] == [(3, FULL)]
    file.write_bytes(file.read_bytes()[:40])
    done = run(file)
    assert done.returncode == 2 and "transformers cannot read the header" in done.stderr


def test_rows_before_the_last_window_are_told(tmp_path: Path) -> None:
    write(tmp_path, "Gemma3nForCausalLM", CONFIGS["Gemma3nForCausalLM"][0])
    before = 2 * (TOKENS - 8 - 64) * 2 * 2 * 64 * 2
    assert [kind["before_window_bytes"] for kind in checked(tmp_path)["kinds"]] == [before, 0, 0]
    assert "are rows before the last window of 2 layers: islands" in run(tmp_path).stdout


def test_what_is_refused_is_told_by_layer(tmp_path: Path) -> None:
    """And vLLM's own errors are told apart from ours."""
    config = {"model_type": "llama4_text", "num_hidden_layers": 4, "num_key_value_heads": 4}
    config |= {"attention_chunk_size": 512, "num_local_experts": 2, "head_dim": 64}
    write(tmp_path, "Llama4ForCausalLM", config)
    done = run(tmp_path)
    assert done.returncode == 1, done.stderr
    assert "refused: local attention in chunks of 512 tokens" in done.stdout
    assert "3 of 4 layers are not supported" in done.stdout and "full attention, 4 KV heads" in done.stdout

    write(tmp_path, "NobodysForCausalLM", config)
    done = run(tmp_path)
    assert done.returncode == 3 and "not checked: vLLM cannot configure the model" in done.stderr
    assert run(tmp_path / "nowhere").returncode == 2
    refused = run(tmp_path, "--engine-args", '{"tensor_parallel_size": 2}')
    assert refused.returncode == 2 and "the command sets 'tensor_parallel_size' itself" in refused.stderr


def rows() -> dict[str, str]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    found = {line.split("`")[1]: line for line in lines}
    assert len(found) == len(lines), "an architecture stands in two rows"
    return found


def test_the_page_has_what_vllm_registers() -> None:
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    found = rows()
    assert set(_TEXT_GENERATION_MODELS) <= set(found), f"run tools/models_table.py --write {PAGE}"
    for line in found.values():
        if "`tests/" in line:
            assert (ROOT / line.split("`")[3]).is_file(), line


def told(*architectures: str) -> list[str]:
    """Rows that the page's tool writes now."""
    done = run(*architectures, tool=(str(TABLE),))
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("| `")]


def test_models_that_keep_more_than_records_hold_are_refused_by_name() -> None:
    names = ("Qwen4Exp", "KimiK3", "Glm5Next")
    qwen, kimi, glm = told(*(f"{name}ForConditionalGeneration" for name in names))
    assert "Qwen4ExpForConditionalGeneration is not supported: it has convolutions over n-grams" in qwen
    assert "KimiK3ForConditionalGeneration is not supported: it has residuals over layers" in kimi
    assert "sparse attention (an indexer" in glm


@pytest.mark.slow
def test_of_every_hybrid_it_is_said_whether_it_is_served() -> None:
    listed = "import sys; sys.path.insert(0, sys.argv[1]); import models_table as t; print(*t.hybrids())"
    hybrids = set(run(TABLE.parent, tool=("-c", listed)).stdout.split())
    unknown = PAGE.read_text().partition("## Not known")[2]
    assert len(hybrids) > 30
    assert hybrids <= set(rows())
    assert not [architecture for architecture in hybrids if f"`{architecture}`" in unknown]


@pytest.mark.slow
def test_rows_of_the_page_are_what_is_found() -> None:
    wanted = (
        *("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Gemma3ForCausalLM"),
        *("GptOssForCausalLM", "DeepseekV3ForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM"),
        *("BloomForCausalLM", "MambaForCausalLM"),
    )
    assert told(*wanted) == [rows()[architecture] for architecture in wanted]
