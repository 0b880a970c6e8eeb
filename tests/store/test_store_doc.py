"""docs/store.md names every option and metric of the store, with the defaults that hold."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from vllm_hypic.config.store import (
    DiskConfig,
    LMCacheConfig,
    LMCacheServerConfig,
    MemoryConfig,
    RedisConfig,
    StoreConfig,
    TierConfig,
)
from vllm_hypic.connector import stats
from vllm_hypic.errors import ConfigError

PATH = Path(__file__).parents[2] / "docs/store.md"
TEXT = PATH.read_text()
TIERS: dict[str, type[TierConfig]] = {
    "`memory`": MemoryConfig,
    "`disk`": DiskConfig,
    "`redis`": RedisConfig,
    "`lmcache`, embedded": LMCacheConfig,
    "`lmcache`, server": LMCacheServerConfig,
}


def rows(heading: str) -> dict[str, list[str]]:
    """Cells after the first of the table under a heading, by the first one's name."""
    section = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL)
    assert section, heading
    cells = [
        [c.strip() for c in line[1:-1].split("|")] for line in section[1].splitlines() if line[:1] == "|"
    ]
    return {row[0].strip("`"): row[1:] for row in cells[2:]}


def test_options_of_the_store() -> None:
    table = rows("The store")
    assert list(table) == [f.name for f in dataclasses.fields(StoreConfig)]
    for name, default in StoreConfig().to_mapping().items():
        assert json.loads(table[name][0].strip("`")) == default, name


@pytest.mark.parametrize(("heading", "config"), TIERS.items())
def test_options_of_a_tier(heading: str, config: type[TierConfig]) -> None:
    table = rows(heading)
    fields = [f for f in dataclasses.fields(config) if f.name != "name"]
    assert list(table) == [f.name for f in fields]
    for field in fields:
        default, required = table[field.name][0], field.default is dataclasses.MISSING
        assert (default == "required") == required, field.name
        if not required:
            plain = list(field.default) if isinstance(field.default, tuple) else field.default
            assert json.loads(default.strip("`")) == plain, field.name


def test_options_of_every_tier() -> None:
    assert list(rows("Every tier")) == ["type", *(f.name for f in dataclasses.fields(TierConfig))]
    assert MemoryConfig(bytes=1).name == "memory", "the name's default is the type"


@pytest.mark.parametrize("name", ["eviction", "admission"])
def test_choices_are_all_choices(name: str) -> None:
    choices = re.findall(r"`([\w-]+)`", rows("The store")[name][1])
    for choice in choices:
        StoreConfig.from_mapping({name: choice})
    with pytest.raises(ConfigError, match=f"expected one of {', '.join(choices)}$"):
        StoreConfig.from_mapping({name: "none of them"})


def test_options_of_the_examples_are_allowed() -> None:
    """Every object with a type that is one line of JSON; those of adapters are LMCache's."""
    found = [json.loads(line) for line in re.findall(r'\{"type": "(?!fs_native)[^{}]*\}', TEXT)]
    assert {"disk", "lmcache"} <= {tier["type"] for tier in found}
    for tier in found:
        StoreConfig.from_mapping({"tiers": [tier]})


def metrics(prefix: str) -> set[str]:
    section = re.search(rf"^\| of [^|]*`{prefix}\.\.\.` \|.*\n\|.*\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert section, prefix
    return set(re.findall(r"^\| `(\w+)` \|", section[1], re.MULTILINE))


def test_metrics() -> None:
    def exported(counters: dict[str, str], *others: dict[str, str]) -> set[str]:
        return {f"{name}_total" for name in counters} | {name for names in others for name in names}

    assert metrics("vllm:hypic_store_") == exported(stats.STORE_COUNTERS, stats.STORE_GAUGES)
    assert metrics("vllm:hypic_tier_") == exported(
        stats.TIER_COUNTERS, stats.TIER_GAUGES, stats.TIER_HISTOGRAMS
    )


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in TEXT.splitlines()
        if line.startswith("#")
    }
    for file, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", TEXT):
        if file:
            assert (PATH.parent / file).exists(), file
        else:
            assert anchor in headings, anchor
