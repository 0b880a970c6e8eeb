"""Generated traces and trace files."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trace import FIRST_WORD, Trace, TraceError, TraceSettings, generate, load

SMALL = TraceSettings(requests=20, documents=12, median_tokens=80, max_tokens=400, vocabulary=500)
TEXT = replace(SMALL, form="text")


def counts(trace: Trace) -> np.ndarray:
    """How often each document is asked for, by rank."""
    found = Counter(name for request in trace.requests for name in request.documents)
    return np.array([found[name] for name in trace.documents])


def test_same_settings_same_trace_and_a_longer_one_starts_with_it():
    assert generate(SMALL) == generate(SMALL)
    assert generate(SMALL) != generate(replace(SMALL, seed=1))
    longer = generate(replace(SMALL, requests=40))
    assert longer.requests[:20] == generate(SMALL).requests
    assert longer.documents == generate(SMALL).documents
    # The longest prompt with its answer.
    trace = generate(SMALL)
    assert trace.longest() == max(len(trace.prompt(r, None)) + r.output_tokens for r in trace.requests)


def test_requests_are_what_the_settings_say():
    trace = generate(replace(SMALL, requests=200, per_request=(2, 5), output_tokens=(3, 7)))
    sizes = {len(r.documents) for r in trace.requests}
    assert sizes == {2, 3, 4, 5}
    assert {r.output_tokens for r in trace.requests} == {3, 4, 5, 6, 7}
    assert all(len(set(r.documents)) == len(r.documents) for r in trace.requests)
    assert all(len(r.question) == SMALL.question_tokens for r in trace.requests)
    assert len({r.question for r in trace.requests}) == 200
    ids = [i for r in trace.requests for part in trace.parts(r) for i in part]
    assert min(ids) >= FIRST_WORD and max(ids) < SMALL.vocabulary


def test_popularity_is_zipf_and_arrivals_are_poisson():
    # One document a request: drawn without replacement, the weights are the frequencies.
    one = replace(SMALL, requests=4000, documents=50, per_request=(1, 1), question_tokens=1, min_tokens=1)
    found = counts(generate(one)) / 4000
    expected = 1 / np.arange(1, 51) / np.sum(1 / np.arange(1, 51))
    assert np.abs(found - expected).max() < 0.025  # 3.6 standard deviations of the first
    assert np.abs(counts(generate(replace(one, zipf=0))) / 4000 - expected).max() > 0.1
    trace = generate(replace(SMALL, requests=3000, rate=4.0, question_tokens=1))
    gaps = np.diff([0.0, *(r.arrival_s for r in trace.requests)])
    assert abs(gaps.mean() * 4 - 1) < 0.06
    assert abs(gaps.std() * 4 - 1) < 0.1  # an even clock has 0
    assert abs(np.mean(gaps > 0.25) - np.exp(-1)) < 0.03


@pytest.mark.parametrize("lengths", ["lognormal", "pareto"])
def test_lengths_are_clipped_with_a_heavy_tail(lengths):
    settings = TraceSettings(requests=0, documents=2000, lengths=lengths, system_tokens=1, tail=0.7)
    found = np.array([len(d) for d in generate(settings).documents.values()])
    assert settings.min_tokens <= found.min() and found.max() == settings.max_tokens
    assert abs(np.median(found) / settings.median_tokens - 1) < 0.1
    assert found.mean() > 1.15 * np.median(found)


def test_documents_change_their_order_unless_told():
    def ranks(order):
        trace = generate(replace(SMALL, requests=100, order=order))
        return [[int(name[1:]) for name in r.documents] for r in trace.requests]

    assert sum(r == sorted(r) for r in ranks("shuffled")) < 20
    assert all(r == sorted(r) for r in ranks("popular-first"))


def test_separators_are_all_that_prompts_differ_in():
    trace = generate(SMALL)
    request = trace.requests[3]
    plain, marked = trace.prompt(request, None), trace.prompt(request, 999)
    assert [i for i in marked if i != 999] == plain
    assert len(marked) == len(plain) + len(request.documents) + 1
    assert plain == [i for part in trace.parts(request) for i in part]
    trace = generate(TEXT)
    request = trace.requests[3]
    plain, marked = trace.prompt(request, None), trace.prompt(request, "<|sep|>")
    assert marked.replace("<|sep|>", "") == plain
    assert marked.split("<|sep|>") == [*(f"{p}\n\n" for p in trace.parts(request)[:-1]), request.question]
    # The words are the token ids' own.
    same = generate(SMALL)
    assert plain.split() == [f"w{i}" for i in same.prompt(same.requests[3], None)]
    with pytest.raises(TraceError, match="needs the separator's id"):
        same.prompt(request, "<|sep|>")
    with pytest.raises(TraceError, match="needs the separator's text"):
        trace.prompt(request, 7)


def test_windows_have_the_rate_asked_for_and_start_again_past_the_end():
    trace = generate(SMALL)
    window = trace.window(5, 10, rate=2.0)
    times = [at for at, _ in window]
    assert [r for _, r in window] == list(trace.requests[5:15])
    assert times[-1] == pytest.approx(5.0) and times == sorted(times) and times[0] > 0
    # The gaps are the trace's own, stretched.
    own = np.diff([r.arrival_s for r in trace.requests[4:15]])
    assert np.allclose(np.diff([0.0, *times]) / own, 5.0 / own.sum())
    window = trace.window(15, 10, rate=1.0)
    assert [r for _, r in window] == [*trace.requests[15:], *trace.requests[:5]]
    times = [at for at, _ in window]
    assert times == sorted(times) and times[-1] == pytest.approx(10.0)


@pytest.mark.parametrize("settings", [SMALL, TEXT], ids=["tokens", "text"])
def test_files_hold_the_trace(tmp_path: Path, settings: TraceSettings):
    trace = generate(settings)
    trace.save(tmp_path / "trace.jsonl")
    assert load(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"documents": 0}, "documents=0"),
        ({"rate": 0}, "rate=0: expected a number > 0"),
        ({"per_request": (3, 2)}, "per_request"),
        ({"per_request": (4, 6), "documents": 5}, "at most documents=5"),
        ({"median_tokens": 5000}, "median_tokens=5000"),
        ({"order": "sorted"}, "shuffled or popular-first"),
        ({"zipf": -1}, "zipf=-1"),
        ({"output_tokens": (0, 2)}, "output_tokens"),
        ({"vocabulary": 3}, "vocabulary"),
    ],
)
def test_bad_settings_are_refused(options, named):
    with pytest.raises(TraceError, match=named):
        TraceSettings(**options)


HEADER = {"kind": "trace", "version": 1, "system": [1, 2], "rate": 1.0}
DOCUMENT = {"kind": "document", "id": "d0", "content": [3]}
REQUEST = {"kind": "request", "arrival_s": 1.0, "documents": ["d0"], "question": [4], "output_tokens": 2}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "is empty"),
        ([HEADER, DOCUMENT], "has no requests"),
        (["{"], ":1: no JSON"),
        ([[1]], r":1: expected a JSON object, got \[1\]"),
        ([DOCUMENT], ':1: kind="document": expected the header'),
        ([HEADER, HEADER], ":2: kind"),
        ([HEADER, {"kind": "answer"}], ':2: kind="answer": expected one of trace, document, request'),
        ([{**HEADER, "version": 2}], ":1: version=2: expected 1"),
        ([{**HEADER, "rate": 0}], ":1: rate=0"),
        ([{**HEADER, "system": []}], r":1: system=\[\]: expected a value"),
        ([HEADER, {**DOCUMENT, "content": "words"}], ':2: content="words": expected token ids'),
        ([HEADER, {**DOCUMENT, "content": [1, -1]}], r":2: content=\[1, -1\]: expected a text or a list"),
        ([HEADER, {**DOCUMENT, "content": [True]}], ":2: content"),
        ([HEADER, {"kind": "document", "content": [1]}], ":2: id is missing"),
        ([HEADER, DOCUMENT, DOCUMENT], ':3: id="d0": expected an id that no other'),
        ([HEADER, DOCUMENT, {**REQUEST, "documents": ["d1"]}], ":3: documents"),
        ([HEADER, DOCUMENT, {**REQUEST, "documents": []}], ":3: documents"),
        ([HEADER, DOCUMENT, {**REQUEST, "documents": [["d0"]]}], ":3: documents"),
        ([HEADER, DOCUMENT, {**REQUEST, "output_tokens": 0}], ":3: output_tokens=0: expected an integer"),
        ([HEADER, DOCUMENT, {**REQUEST, "output_tokens": True}], ":3: output_tokens"),
        ([HEADER, DOCUMENT, {**REQUEST, "arrival_s": "now"}], ':3: arrival_s="now": expected a number'),
        ([HEADER, DOCUMENT, {**REQUEST, "arrival_s": float("nan")}], ":3: arrival_s"),
        (
            [HEADER, DOCUMENT, REQUEST, {**REQUEST, "arrival_s": 0.5}],
            ":4: arrival_s=0.5: expected at least 1",
        ),
    ],
)
def test_bad_files_name_line_and_field(tmp_path: Path, lines, told):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    with pytest.raises(TraceError, match=f"trace.jsonl.*{told}"):
        load(path)
