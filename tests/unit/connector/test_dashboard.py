"""The dashboard shows what the engine exports: every series, and none that is not there."""

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_hypic.connector import stats
from vllm_hypic.connector.stats import HypicCounters, HypicPromMetrics, HypicStats
from vllm_hypic.store.protocol import StoreStats, TierStats

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs/grafana/hypic-store.json").read_text())
REFERENCE = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
LABELS = {"model_name": "m", "engine": "0"}
HISTOGRAM_ENDS = ("_bucket", "_sum", "_count")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


def shown() -> set[str]:
    return {name for expr in expressions() for name in re.findall(r"vllm:hypic_\w+", expr)}


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Labels of each series that a server with a tier exports, by its name."""
    registry = CollectorRegistry()
    metrics = HypicPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)},
        list(LABELS),
        {0: list(LABELS.values())},
    )
    counters = HypicCounters(store=StoreStats({"disk": TierStats(read_seconds=[0.1], write_seconds=[0.1])}))
    metrics.observe(HypicStats.of(counters).data)
    samples = [s for family in registry.collect() for s in family.samples]
    return {s.name: set(s.labels) for s in samples if not s.name.endswith("_created")}


def test_the_reference_has_every_series_with_its_label(exported: dict[str, set[str]]) -> None:
    rows = (line.split("|")[1:4] for line in REFERENCE.splitlines() if line.startswith("| `vllm:hypic_"))
    told = {name.strip(" `"): (kind.strip(), labels.strip(" `")) for name, kind, labels in rows}
    bases = {name: re.sub("|".join(f"{end}$" for end in HISTOGRAM_ENDS), "", name) for name in exported}
    assert set(told) == {*bases.values()}
    for name, labels in exported.items():
        kind, label = told[bases[name]]
        assert {*LABELS, *filter(None, [label])} == labels - {"le"}, name
        assert kind == ("counter" if name.endswith("_total") else "gauge" if name in told else "histogram")


def test_every_metric_is_shown(exported: dict[str, set[str]]) -> None:
    """Of a histogram, its buckets."""
    for name in {**stats.TIER_COUNTERS, **stats.TIER_GAUGES, **stats.TIER_HISTOGRAMS}:
        assert any(re.fullmatch(rf"vllm:hypic_tier_{name}(_total|_bucket)?", s) for s in shown()), name
    assert {n for n in exported if not n.endswith(("_sum", "_count"))} <= shown()


def test_counters_are_shown_as_rates_and_levels_as_they_are() -> None:
    for expr in expressions():
        for before, name, after in re.findall(r"(\w*)\(?(vllm:hypic_\w+)\{[^}]*\}(\[?)", expr):
            counted = name.endswith(("_total", *HISTOGRAM_ENDS))
            assert (after == "[") == counted, expr
            assert (before in ("rate", "increase")) == counted, expr


def test_series_are_chosen_by_labels_that_they_have(exported: dict[str, set[str]]) -> None:
    """By all of the dashboard's variables that fit; braces and parentheses close."""
    for expr in expressions():
        for name, selector in re.findall(r"(vllm:hypic_\w+)(\{[^}]*\})", expr):
            used = dict(re.findall(r'(\w+)=~"\$(\w+)"', selector))
            assert set(used) == exported[name] - {"le"} and all(k == v for k, v in used.items()), expr
        assert re.search(r"vllm:hypic_\w+(?![\w{])", expr) is None, f"{expr}: not chosen by variables"
        for opening, closing in ("()", "{}", "[]"):
            assert expr.count(opening) == expr.count(closing), expr


def test_variables_are_defined_from_series_that_exist(exported: dict[str, set[str]]) -> None:
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert variables.pop("datasource")["type"] == "datasource"
    for name, variable in variables.items():
        [(series, label)] = re.findall(r"label_values\((vllm:hypic_\w+).*, (\w+)\)", variable["definition"])
        assert label == name and name in exported[series]


def test_the_file_can_be_imported_anywhere() -> None:
    """No datasource of ours, no two panels in one place or with one number, nothing without a name."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == source
        assert all(target["datasource"] == source for target in panel["targets"])
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for one, other in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        apart = [one[a] + one[s] <= other[a] or other[a] + other[s] <= one[a] for a, s in ("xw", "yh")]
        assert any(apart), (one, other)
