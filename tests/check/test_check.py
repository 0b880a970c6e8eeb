"""`vllm-hypic check`: what it says of configurations, held against engines and against docs/models.md."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine.engines import Engine
from families.rows import Family
from families.table import FAMILIES
from lib import forked
from oracle.bailing_models import save_bailing_model
from oracle.fla_models import save_fla_model

from vllm_hypic.config.engine import config_of
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.harness.random_ring import save_ring_model
from vllm_hypic.pool.families import FAMILIES as LINEAR
from vllm_hypic.pool.geometry import expected_space

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
NOTES = EXAMPLE.parent / "hybrid-notes" / "model"
TABLE = ROOT / "tools" / "models_table.py"
POOL_GIB = 0.0625
CHECK = ("-c", "from vllm_hypic.cli import main; main()", "check")


def run(*arguments: str | Path, tool: tuple[str, ...] = CHECK) -> Any:
    return forked.run([sys.executable, *tool, *map(str, arguments)], timeout=600, cwd=ROOT)


def checked(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def pool(llm: Any) -> tuple[int, int, int]:
    """Bytes of the pool, pages of a segment as sized, and how many of these it holds."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    from vllm_hypic.engine.worker import worker_side

    geometry, config = worker_side().geometry, config_of(worker.vllm_config)
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
        found = re.search(r"hypic: (\d.*); link=.* GiB = (.*); eager", log.read_text())
    assert found is not None
    logged: Counter[str] = Counter()
    for count, kind in re.findall(r"(\d+) ([^(,]+?)(?: \(\w+\))?(?:, |$)", found[1]):
        logged[kind] += int(count)
    assert logged == told
    linear = {kind for kind in told if kind in {f.name for f in LINEAR}}
    assert ("pages" in found[2], "state" in found[2]) == (bool(told.keys() - linear), bool(linear))


def test_short_convolutions_take_their_tails(tmp_path: Path) -> None:
    config = {
        **{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 3},
        **{"layer_types": ["conv", "conv", "full_attention"], "hidden_size": 256, "block_dim": 256},
        **{"conv_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000},
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    kinds = {kind["what"]: kind for kind in checked(tmp_path)["kinds"]}
    convolutions = kinds["short convolution, 2 inputs of 256 channels"]
    assert (convolutions["layers"], convolutions["segment_bytes"]) == (2, 2 * 2 * 256 * 2)
    assert kinds["full attention, 2 KV heads of 64"]["layers"] == 1
    refused = checked(tmp_path, "--hypic", '{"min_segment_tokens": 1}', code=1)
    assert "min_segment_tokens=1: expected at least 2" in refused["refusal"]


def test_mamba2_takes_its_states(tmp_path: Path) -> None:
    config = {
        **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 256},
        **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
        **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000},
        **{"intermediate_size": 512, "dtype": "bfloat16"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    kinds = {kind["what"]: kind for kind in checked(tmp_path)["kinds"]}
    mamba = kinds["Mamba2, 8 heads of 64 x 128"]
    state, conv, transition = 8 * 64 * 128 * 4, 3 * (8 * 64 + 2 * 2 * 128) * 2, 8 * 4
    assert (mamba["layers"], mamba["segment_bytes"]) == (2, 2 * (state + conv + transition))
    assert kinds["full attention, 2 KV heads of 64"]["layers"] == 1


def test_olmo_hybrid_is_served_on_cpu(tmp_path: Path) -> None:
    config = {
        **{"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "hidden_size": 256},
        **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 96},
        **{"linear_value_head_dim": 192, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"vocab_size": 1000, "intermediate_size": 512, "dtype": "bfloat16", "pad_token_id": 0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    kinds = {kind["what"]: kind for kind in checked(tmp_path)["kinds"]}
    assert kinds["gated delta net, 4 heads of 96 x 192"]["layers"] == 2
    assert kinds["full attention, 2 KV heads of 64"]["layers"] == 1


def test_kimi_linear_is_served_on_cpu(tmp_path: Path) -> None:
    linear: dict[str, Any] = {"num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4}
    config = {
        **{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 256},
        **{
            "num_hidden_layers": 3,
            "linear_attn_config": {**linear, "kda_layers": [1, 2], "full_attn_layers": [3]},
        },
        **{"num_attention_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64},
        **{"v_head_dim": 64, "mla_use_nope": True, "vocab_size": 1000, "intermediate_size": 512},
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    kinds = {kind["what"]: kind["layers"] for kind in checked(tmp_path)["kinds"]}
    assert kinds == {"gated delta net, 4 heads of 64 x 64": 2, "latent attention, rows of 576": 1}


def test_bailing_v3_is_served_on_cpu(tmp_path: Path) -> None:
    """Without the code that published models bring for their configuration."""
    save_bailing_model(tmp_path, group_size=3)
    found = checked(tmp_path)
    kinds = {kind["what"]: kind["layers"] for kind in found["kinds"]}
    assert kinds == {"gated delta net, 4 heads of 32 x 32": 2, "latent attention, rows of 576": 1}


@pytest.mark.parametrize(
    ("kv_heads", "attention"),
    [(None, "latent attention, rows of 576"), (2, "full attention, 2 KV heads of 64")],
)
def test_ring_and_ling_are_served_on_cpu(tmp_path: Path, kv_heads: int | None, attention: str) -> None:
    """Without the code that published models bring for their configuration."""
    fields: dict[str, Any] = {"hidden": 256, "heads": 4, "head_dim": 64, "experts": 8}
    save_ring_model(tmp_path, layers=4, group=4, kv_heads=kv_heads, **fields)
    kinds = {kind["what"]: kind for kind in checked(tmp_path)["kinds"]}
    lightning = kinds["lightning attention, 4 heads of 64 x 64"]
    assert (lightning["layers"], lightning["segment_bytes"]) == (3, 3 * (4 * 64 * 64 * 4 + 4 * 4))
    assert kinds[attention]["layers"] == 1


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        (
            {"kind": "delta_net", "expand_v": 2.0},
            {"gated delta net, 4 heads of 32 x 64": 2, "full attention, 2 KV heads of 32": 2},
        ),
        ({"kind": "delta_net", "group": None}, {"gated delta net, 4 heads of 32 x 32": 4}),
        ({"kind": "retnet", "group": None}, {"lightning attention, 4 heads of 32 x 32": 4}),
        (
            {"kind": "gla", "expand_k": 0.5, "group": 4},
            {"gated linear attention, 4 heads of 16 x 32": 3, "full attention, 2 KV heads of 32": 1},
        ),
    ],
)
def test_models_of_flash_linear_attention_are_served_on_cpu(
    tmp_path: Path, fields: dict[str, Any], kinds: dict[str, int]
) -> None:
    """Without the package, hybrid or not."""
    save_fla_model(tmp_path, **fields)
    assert {kind["what"]: kind["layers"] for kind in checked(tmp_path)["kinds"]} == kinds


def test_latents_take_one_row_a_token(tmp_path: Path) -> None:
    config = {
        **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 3},
        **{"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 1000},
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 64},
        **{"q_lora_rank": None, "first_k_dense_replace": 3, "dtype": "bfloat16"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = checked(tmp_path)
    kinds = {kind["what"]: (kind["layers"], kind["segment_bytes"]) for kind in found["kinds"]}
    assert kinds == {"latent attention, rows of 576": (3, 3 * found["segment_tokens"] * 576 * 2)}


def test_a_gguf_file_is_asked_as_its_model(tmp_path: Path) -> None:
    """Its header alone: there are no tensors in this one."""
    from gguf import GGUFWriter

    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_name("a model")
    writer.add_context_length(4096)
    writer.add_embedding_length(256)
    writer.add_block_count(3)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(1000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = checked(file)
    assert found["architecture"] == "LlamaForCausalLM"
    assert [(kind["layers"], kind["what"]) for kind in found["kinds"]] == [
        (3, "full attention, 2 KV heads of 64")
    ]
    file.write_bytes(file.read_bytes()[:40])
    done = run(file)
    assert done.returncode == 2 and "transformers does not read its header" in done.stderr


def test_layers_that_read_the_kv_of_others_take_nothing(tmp_path: Path) -> None:
    full, sliding = "full_attention", "sliding_attention"
    config = {
        **{"architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "num_hidden_layers": 5},
        **{"layer_types": [sliding, sliding, full, sliding, full], "num_kv_shared_layers": 2},
        **{"sliding_window": 64, "hidden_size": 256, "intermediate_size": 256},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000},
        **{"vocab_size_per_layer_input": 1000, "hidden_size_per_layer_input": 16, "dtype": "bfloat16"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = checked(tmp_path)
    kinds = {kind["what"]: (kind["layers"], kind["segment_bytes"]) for kind in found["kinds"]}
    each = found["segment_tokens"] * 2 * 2 * 64 * 2
    assert kinds == {
        "attention in a window of 64, 2 KV heads of 64": (2, 2 * each),
        "full attention, 2 KV heads of 64": (1, each),
        "attention over the KV of another layer": (2, 0),
    }
    before = 2 * (found["segment_tokens"] - 64) * 2 * 2 * 64 * 2
    assert [kind["before_window_bytes"] for kind in found["kinds"]] == [before, 0, 0]
    assert "of it are rows before the last window of 2 layers: islands" in run(tmp_path).stdout


def test_what_is_refused_is_told_by_layer(tmp_path: Path) -> None:
    """And vLLM's own errors are told apart from ours."""
    config = {
        **{"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "num_hidden_layers": 4},
        **{"attention_chunk_size": 512, "num_local_experts": 2, "vocab_size": 1000, "hidden_size": 256},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run(tmp_path)
    assert done.returncode == 1, done.stderr
    assert "refused: local attention in chunks of 512 tokens" in done.stdout
    assert "3 of 4 layers cannot take part" in done.stdout and "full attention, 4 KV heads" in done.stdout

    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NobodysForCausalLM"]}))
    done = run(tmp_path)
    assert done.returncode == 3 and "cannot say: vLLM makes no configuration of it" in done.stderr
    assert run(tmp_path / "nowhere").returncode == 2


def rows() -> dict[str, str]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    found = {line.split("`")[1]: line for line in lines}
    assert len(found) == len(lines), "an architecture stands in two rows"
    return found


def test_the_page_has_what_vllm_registers() -> None:
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    found = rows()
    assert set(_TEXT_GENERATION_MODELS) <= set(found), "run tools/models_table.py --write docs/models.md"
    for line in found.values():
        if "`tests/" in line:
            assert (ROOT / line.split("`")[3]).is_file(), line


def told(*architectures: str) -> list[str]:
    """Rows that the page's tool writes now."""
    done = run(*architectures, tool=(str(TABLE),))
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("| `")]


def test_models_that_keep_more_than_records_hold_are_refused_by_name() -> None:
    qwen, kimi, glm = told(
        "Qwen4ExpForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "Glm5NextForConditionalGeneration",
    )
    assert "Qwen4ExpForConditionalGeneration has convolutions over n-grams of tokens and sparse" in qwen
    assert "KimiK3ForConditionalGeneration has residuals over layers" in kimi
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
