"""Options of an engine: typed, checked once, with messages that name value and range."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from vllm_hypic.backends.ops.gated_delta import DEAD_BELOW
from vllm_hypic.config.engine import GateConfig, HypicConfig
from vllm_hypic.errors import ConfigError
from vllm_hypic.primitives.tokens import PrimitiveIds, PrimitiveTexts


def test_dead_by_default_is_what_rounds_to_zero_in_storage() -> None:
    """The option may not import torch, so its default repeats the operators'."""
    assert HypicConfig().dead_transition == DEAD_BELOW
    largest_dead = torch.tensor(DEAD_BELOW)
    assert largest_dead.half() == 0 < torch.nextafter(largest_dead, torch.tensor(1.0)).half()


def through_json(config: HypicConfig) -> HypicConfig:
    return HypicConfig.from_mapping(json.loads(json.dumps(config.to_mapping())))


def test_options_survive_json() -> None:
    assert HypicConfig.from_mapping({}) == HypicConfig() == through_json(HypicConfig())
    options = {
        "link": "epic-4",
        "seam_tokens": 3,
        "token_texts": {"sep": "<<PIC_SEP>>"},
        "token_ids": {"sep": 5, "pdep": 6, "pad": 7},
        "pool_bytes": 1 << 20,
        "dummy_token": 0,
        "gate": {"require": "go", "folder": "/var/lib/gates"},
    }
    config = HypicConfig.from_mapping(options)
    assert config.gate == GateConfig("go", "/var/lib/gates")
    assert config.token_texts == PrimitiveTexts(sep="<<PIC_SEP>>")
    assert config.token_ids == PrimitiveIds(5, 6, 7)
    assert through_json(config) == config


def test_numbers_stay_as_they_were_written() -> None:
    """Sign-offs, records and vLLM's compiled models are found by digests of them: 0 is not 0.0 there."""
    options = {"dead_transition": 0, "expected_live_heads": 1, "store": {"deadline_s": 5, "ttl_s": 60.0}}
    found = HypicConfig.from_mapping(options).to_mapping()
    assert json.dumps(found["dead_transition"]) == "0" and json.dumps(found["expected_live_heads"]) == "1"
    assert json.dumps(found["store"]["deadline_s"]) == "5" and json.dumps(found["store"]["ttl_s"]) == "60.0"


def test_options_made_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="hypic config: page_tokens=0: expected an integer >= 1"):
        HypicConfig(page_tokens=0)
    says = r"hypic config: gate\.require='always': expected one of off, warn, go"
    with pytest.raises(ConfigError, match=says):
        GateConfig("always")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hypic config: seam_tokens=-1: expected an integer from 0"):
        dataclasses.replace(HypicConfig(), seam_tokens=-1)
    with pytest.raises(ConfigError, match="hypic config: context='Auto': expected one of auto, none"):
        HypicConfig(context="Auto")


def test_unknown_options_are_refused_with_the_known_ones() -> None:
    says = r"unknown option 'seam_toks'; expected one of .*, seam_tokens, .*; did you mean 'seam_tokens'[?]$"
    with pytest.raises(ConfigError, match=says):
        HypicConfig.from_mapping({"seam_toks": 8})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": "fast"}, "hypic config: link='fast': expected one of hypic, "),
        ({"context": "page"}, "context='page': expected one of auto, none, lead, text"),
        ({"islands": "query-80"}, "islands='query-80': expected one of auto, none, query-<percent>"),
        ({"link": "epic-0", "context": "text"}, "puts its own tokens before a segment"),
        ({"context_file": "/nowhere/context.txt"}, "context_file='/nowhere/context.txt': "),
        ({"seam_tokens": -3}, "seam_tokens=-3"),
        ({"seam_tokens": "8"}, "seam_tokens='8'"),
        ({"min_segment_tokens": 0}, "min_segment_tokens=0: expected an integer >= 1"),
        ({"page_tokens": 0}, "page_tokens=0: expected an integer >= 1"),
        ({"segment": {"max_segments": 4097}}, "max_segments=4097: expected an integer from 1 to 4096"),
        ({"page_tokens": 64.0}, "page_tokens=64.0: expected an integer >= 1"),
        ({"page_tokens": True}, "page_tokens=True: expected an integer >= 1"),
        ({"expected_segment_tokens": -1}, "expected_segment_tokens=-1: expected an integer >= 1"),
        ({"pool_bytes": 0}, "pool_bytes=0: expected an integer >= 1"),
        ({"pool_fraction": 0}, "pool_fraction=0: expected a number between 0 and 1"),
        ({"pool_fraction": 1}, "pool_fraction=1: expected a number between 0 and 1"),
        ({"pool_fraction": "a"}, "pool_fraction='a': expected a number between 0 and 1"),
        ({"pool_fraction": float("nan")}, "pool_fraction=nan: expected a number between 0 and 1"),
        ({"expected_live_heads": 0}, "expected_live_heads=0: expected a number above 0 and at most 1"),
        ({"expected_live_heads": 1.1}, "expected_live_heads=1.1: expected a number above 0 and at most 1"),
        ({"dead_transition": -1e-9}, "dead_transition=-1e-09: expected a number from 0 to below 1"),
        ({"dead_transition": "0"}, "dead_transition='0': expected a number from 0 to below 1"),
        ({"state_dtype": "bfloat16"}, "state_dtype='bfloat16': expected one of float32, float16"),
        ({"dummy_token": -1}, "dummy_token=-1: expected an integer >= 0"),
        ({"gate": {"require": "maybe"}}, "gate.require='maybe': expected one of off, warn, go"),
        ({"gate": {"require": None}}, "gate.require=None: expected one of off, warn, go"),
        ({"gate": {"folder": ""}}, "gate.folder='': expected a path, or null"),
        ({"gate": {"folder": 3}}, "gate.folder=3: expected a path, or null"),
        ({"gate": {"ask": "go"}}, "gate: unknown option 'ask'; expected one of choose, folder, require"),
        ({"gate": "go"}, "gate='go': expected an object"),
        ({"gate": None}, "gate=None: expected an object"),
        ({"token_texts": {"sep": ""}}, "sep='': expected a non-empty string"),
        ({"token_texts": {"separator": "x"}}, "unknown name 'separator'"),
        ({"token_texts": "x"}, "expected an object"),
        ({"token_ids": {"sep": 1}}, "token_ids"),
        ({"token_ids": {"sep": 1, "pdep": 1, "pad": 2}}, "must differ"),
        ({"token_ids": [1, 2, 3]}, "token_ids"),
        *((options, "expected an object") for options in (None, [], "page_tokens=3")),
    ],
)
def test_bad_values_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HypicConfig.from_mapping(options)
    assert str(caught.value).startswith("hypic config: ")
    assert message in str(caught.value)
