"""What names records: ordinary engines find what was written before, and nothing that differs is found."""

import copy
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from vllm.config import LoRAConfig, MultiModalConfig, VllmConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import EngineArgs

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.identity import IMAGES, NON_DEFAULT, NON_DEFAULT_OPTIONS, namespace_of, non_default
from vllm_hypic.fingerprint import fingerprint
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.states import LinearGeometry

from .neutral_fields import ALWAYS, FIELDS, NEWER, OPTIONS, PARTS

BF16 = torch.bfloat16
GEOMETRY = PoolGeometry(
    (AttentionGeometry("model.layers.3.self_attn.attn", 2, 32, BF16),),
    (LinearGeometry("model.layers.0.linear_attn", 4, 32, 32, 3, 256, BF16),),
    page_tokens=64,
    pages=10,
    slots=4,
    transition_blocks=16,
)
GOLDEN = "b1a99de829135346763af4dffdb5b9d8e72da3b7cba8b5e7c7b39467e1ca3d4b"
"""Namespace of the demo model in bf16, by the rules of the version before this list.  If the model's files
change, so may this; otherwise records from before would be lost."""


@pytest.fixture(scope="module")
def ordinary() -> Iterator[VllmConfig]:
    """The demo model's configuration, made by vLLM; the model is named alike in every checkout."""
    before = Path.cwd()
    os.chdir(EXAMPLE.parents[2])
    args = EngineArgs(
        model="examples/models/tiny-hybrid-qa/model",
        attention_backend="hypic",
        dtype="bfloat16",
        kv_cache_memory_bytes=1 << 28,
        # vLLM's own choice on CPUs with AVX512-BF16.
        mamba_ssm_cache_dtype="float32",
        additional_config={"hypic": {"gate": {"require": "off"}}},
    )
    try:
        yield args.create_engine_config()
    finally:
        os.chdir(before)


Change = Callable[[VllmConfig], None]


def changed(config: VllmConfig, change: Change) -> VllmConfig:
    config = copy.deepcopy(config)
    change(config)
    return config


def name_of(config: VllmConfig) -> str:
    return namespace_of(config, GEOMETRY).digest


def test_an_ordinary_engine_finds_what_was_written_before(ordinary: VllmConfig) -> None:
    assert non_default(ordinary) == {} and name_of(ordinary) == GOLDEN


# -- no field is forgotten


def stated(reasons: str) -> list[str]:
    return [name for line in reasons.splitlines() for name in line.rpartition(": ")[2].split()]


def fields_of(configuration: Any, part: str) -> list[str]:
    newer = NEWER.get(part, "").split()
    return [field.name for field in dataclasses.fields(configuration) if field.name not in newer]


@pytest.mark.parametrize("part", FIELDS)
def test_every_field_is_known(part: str) -> None:
    """A new release has a new field: it goes to ``NON_DEFAULT`` if it changes bytes, else to ``FIELDS``."""
    name = "LoRAConfig" if part == "lora_config" else part.title().replace("_", "")
    known = [*ALWAYS.get(part, ()), *NON_DEFAULT.get(part, ()), *stated(FIELDS[part])]
    assert sorted(known) == sorted(fields_of(getattr(vllm.config, name), part))


def test_every_part_of_the_configuration_is_known() -> None:
    assert sorted([*FIELDS, *stated(PARTS)]) == sorted(fields_of(VllmConfig, "vllm_config"))


def test_every_option_of_the_plugin_is_known() -> None:
    known = ["dead_transition", *NON_DEFAULT_OPTIONS, *stated(OPTIONS)]
    assert sorted(known) == sorted(field.name for field in dataclasses.fields(HypicConfig))


# -- what differs has another name


def setting(part: str, field: str, value: Any) -> Any:
    """A change of one field, named so in reports."""
    return pytest.param(setter(part, field, value), id=f"{part}.{field}")


def setter(part: str, field: str, value: object) -> Change:
    def change(config: VllmConfig) -> None:
        setattr(config if part == "vllm_config" else getattr(config, part), field, value)

    return change


def option(name: str, value: object) -> Change:
    def change(config: VllmConfig) -> None:
        assert config.kv_transfer_config is not None
        config.kv_transfer_config.kv_connector_extra_config[name] = value

    return change


def longrope(config: VllmConfig) -> None:
    config.model_config.hf_text_config.rope_parameters = {"rope_type": "longrope"}


def drafts(method: str) -> SimpleNamespace:
    drafting = SimpleNamespace(model="nowhere/drafting", revision=None, dtype="bfloat16", quantization=None)
    return SimpleNamespace(method=method, draft_model_config=drafting)


CHANGES = [
    setting("model_config", "hf_overrides", {"attn_output_gate": False}),
    setting("model_config", "hf_overrides", lambda config: config),
    setting("model_config", "hf_config_path", "nowhere/config"),
    setting("model_config", "config_format", "mistral"),
    setting("model_config", "code_revision", "v2"),
    setting("model_config", "quantization_config", QuantizationConfigArgs(ignore=["lm_head"])),
    setting("model_config", "model_impl", "transformers"),
    setting("model_config", "multimodal_config", MultiModalConfig(mm_processor_kwargs={"max_pixels": 1})),
    setting("model_config", "model_class_overrides", {"Qwen3_5ForCausalLM": "mine:Model"}),
    setting("model_config", "model_weights", "s3://bucket/model"),
    setting("load_config", "model_loader_extra_config", {"qlora_adapter_name_or_path": "x"}),
    setting("load_config", "ignore_patterns", ["*-00002-*"]),
    setting("load_config", "safetensors_load_strategy", "torchao"),
    setting("cache_config", "cache_dtype", "fp8"),
    setting("kernel_config", "moe_backend", "marlin"),
    setting("vllm_config", "lora_config", LoRAConfig(target_modules=["o_proj"])),
    setting("vllm_config", "lora_config", LoRAConfig(enable_tower_connector_lora=True)),
    setting("vllm_config", "additional_config", {"platform": 1}),
    setting("vllm_config", "speculative_config", drafts("draft_model")),
    pytest.param(option("dummy_token", 7), id="dummy_token"),
    pytest.param(option("state_dtype", "float16"), id="state_dtype"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_bytes_changes_the_name(ordinary: VllmConfig, change: Change) -> None:
    here, again = changed(ordinary, change), changed(ordinary, change)
    assert name_of(here) == name_of(again) != GOLDEN


def test_states_are_told_by_the_type_that_they_have(ordinary: VllmConfig) -> None:
    auto, half, full = (
        name_of(changed(ordinary, setter("cache_config", "mamba_ssm_cache_dtype", name)))
        for name in ("auto", "bfloat16", "float32")
    )
    assert auto == half != full == GOLDEN


def test_a_long_context_counts_only_where_factors_depend_on_it(ordinary: VllmConfig) -> None:
    names = set()
    for length in (4096, 8192):
        plain = changed(ordinary, lambda c, n=length: setattr(c.model_config, "max_model_len", n))  # type: ignore[misc]
        assert name_of(plain) == GOLDEN
        names.add(name_of(changed(plain, longrope)))
    assert len(names) == 2


@pytest.mark.parametrize(
    "change",
    [
        setting("load_config", "safetensors_load_strategy", "eager"),
        setting("model_config", "enforce_eager", True),
        setting("vllm_config", "additional_config", {}),
        setting("vllm_config", "speculative_config", drafts("ngram")),
    ],
)
def test_what_changes_no_bytes_changes_no_name(ordinary: VllmConfig, change: Change) -> None:
    assert name_of(changed(ordinary, change)) == GOLDEN


def test_how_images_are_processed_is_told(ordinary: VllmConfig, tmp_path: Path) -> None:
    """By the engine's options, and by files beside the weights."""
    names = set()
    for given, file in (({}, "1"), ({"media_io_kwargs": {"image": {"mode": "L"}}}, "1"), ({}, "2")):
        (tmp_path / "preprocessor_config.json").write_text(file)
        made = changed(ordinary, setter("model_config", "multimodal_config", MultiModalConfig(**given)))
        names.add(json.dumps(non_default(changed(made, setter("model_config", "model", str(tmp_path))))))
    assert len(names) == 3


def test_every_option_of_images_has_its_ordinary_value() -> None:
    assert {name: getattr(MultiModalConfig(), name) for name in IMAGES} == IMAGES


# -- weights


def model_in(folder: Path, config: VllmConfig) -> VllmConfig:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"some weights")
    (folder / "code.py").write_text("some code")
    return changed(config, lambda c: setattr(c.model_config, "model", str(folder)))


@pytest.mark.parametrize(
    ("below", "never_changes"),
    [
        ("models--me--it/snapshots/" + "a1" * 20, True),
        ("snapshots/" + "a1" * 20, False),
        ("models--me--it/snapshots/latest", False),
    ],
)
def test_only_a_hubs_commit_stands_for_its_files(
    ordinary: VllmConfig, tmp_path: Path, below: str, never_changes: bool
) -> None:
    config = model_in(tmp_path / below, ordinary)
    before = fingerprint(config)
    (tmp_path / below / "model.safetensors").write_bytes(b"other weights")
    assert (fingerprint(config) == before) is never_changes


def test_code_counts_where_it_runs(ordinary: VllmConfig, tmp_path: Path) -> None:
    plain = model_in(tmp_path / "model", ordinary)
    trusting = changed(plain, lambda c: setattr(c.model_config, "trust_remote_code", True))
    before = [fingerprint(config) for config in (plain, trusting)]
    (tmp_path / "model" / "code.py").write_text("other code")
    assert [fingerprint(c) == old for c, old in zip((plain, trusting), before, strict=True)] == [True, False]


def test_another_configuration_at_its_path_has_another_name(ordinary: VllmConfig, tmp_path: Path) -> None:
    config = changed(ordinary, lambda c: setattr(c.model_config, "hf_config_path", str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    before = name_of(config)
    (tmp_path / "config.json").write_text("[]")
    assert name_of(config) != before


def test_weights_in_object_storage_are_the_engines_own_unless_they_have_a_revision(
    ordinary: VllmConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot be sampled: what another engine loads from there, or this one's next run, may differ."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="vllm")  # whatever another test left it at

    def loaded(engine_id: str, revision: str | None = None) -> str:
        config = copy.deepcopy(ordinary)
        assert config.kv_transfer_config is not None
        config.model_config.model_weights = "s3://bucket/model"
        config.model_config.revision = revision
        config.kv_transfer_config.engine_id = engine_id
        return name_of(config)

    assert loaded("a") == loaded("a") != loaded("b")
    assert "name them with --revision NAME" in caplog.text
    assert loaded("a", "v1") == loaded("b", "v1") != loaded("b", "v2")
