"""Link methods, per-request options, and the identity of records."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives import keys
from vllm_hypic.primitives.keys import Namespace, Role, segment_key
from vllm_hypic.primitives.options import LinkDefaults, link_of_request
from vllm_hypic.primitives.policies import (
    MAX_SEAM_TOKENS,
    Islands,
    LinkError,
    LinkMethod,
    ModelTraits,
    parse_link,
)

HYBRID = ModelTraits(has_linear=True)
ATTENTION = ModelTraits(has_linear=False)
WIDEST = f"epic-{MAX_SEAM_TOKENS}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hypic", LinkMethod("hypic", head=8, tail=8)),
        ("naive", LinkMethod("naive", head=8, tail=8, use_transition=False)),
        ("block", LinkMethod("block")),
        ("prompt-cache", LinkMethod("prompt-cache", fixed_position=True)),
        ("full", LinkMethod("full", reuse=False)),
        ("epic-0", LinkMethod("epic-0", dummies=4)),
        ("epic-16", LinkMethod("epic-16", head=16)),
        (WIDEST, LinkMethod(WIDEST, head=MAX_SEAM_TOKENS)),
        ("seam-12-3", LinkMethod("seam-12-3", head=12, tail=3)),
        ("seam-4-0+16", LinkMethod("seam-4-0+16", head=4, anchor=16)),
    ],
)
def test_methods(name: str, expected: LinkMethod) -> None:
    assert parse_link(name, 8) == expected


WIDE = MAX_SEAM_TOKENS + 1
UNKNOWN = ["", "HYPIC", "epic", "epic-", "epic--1", "epic-1.5", "epic-9999999", "hypic ", None, 3]
UNKNOWN += ["seam-8", "seam-8-", "seam--8", "seam-8-8-8", "seam-8-8+", "seam-8+8"]
REFUSED: list[tuple[tuple[Any, ...], str]] = [
    *(((name, 8), "expected one of hypic, seam-<h>-<t>, ") for name in UNKNOWN),
    *(
        (("hypic", seam), f"hypic_seam_tokens={seam}: expected an integer from 0 to {MAX_SEAM_TOKENS}")
        for seam in (-1, WIDE, 10**9)
    ),
    *((("hypic", seam), "expected an integer") for seam in ("8", 1.5, True, None)),
    *(
        ((name, 8), f"expected h, t and a <= {MAX_SEAM_TOKENS}")
        for name in (f"seam-{WIDE}-0+0", f"seam-0-{WIDE}+0", f"seam-0-0+{WIDE}")
    ),
    ((f"epic-{WIDE}", 8), f"expected k <= {MAX_SEAM_TOKENS}"),
    (("hypic", 8, "page", "none"), "hypic_context='page': expected one of none, lead, text"),
    (("hypic", 8, 3, "none"), "hypic_context=3: expected one of"),
    (("hypic", 8, "none", "query"), "hypic_islands='query': expected one of none, query-<percent>"),
    *(
        (("hypic", 8, "none", islands), "expected 1 <= percent <= 50")
        for islands in ("query-0", "query-51", "query-0-96")
    ),
    (("hypic", 8, "none", "query-10-4097"), "expected tokens <= 4096"),
    (("hypic", 8, "none", "query-10-"), "hypic_islands='query-10-': expected one of"),
    (("hypic", 8, "none", 10), "hypic_islands=10: expected one of"),
    (("epic-0", 8, "text", "none"), "puts its own tokens before a segment"),
    (("seam-8-8+16", 8, "lead", "none"), "puts its own tokens before a segment"),
    (("prompt-cache", 8, "text", "none"), "takes neither a context nor islands"),
    (("prompt-cache", 8, "none", "query-10"), "takes neither a context nor islands"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=str)
def test_what_is_no_method_is_refused(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(LinkError, match=re.escape(said)) as caught:
        parse_link(*arguments)
    assert arguments[0] not in UNKNOWN or str(caught.value).startswith("hypic_link=")


def test_contexts_and_islands_belong_to_the_method() -> None:
    method = parse_link("hypic", 8, "text", "query-10")
    assert (method.context, method.islands) == ("text", Islands(10))
    assert parse_link("hypic", 8, "text", "query-10-96").islands == Islands(10, 96)
    assert parse_link("hypic", 8).context == "none" and parse_link("hypic", 8).islands is None
    assert parse_link("full", 8, "text", "query-10") == parse_link("full", 8)


def test_a_short_prompt_has_as_many_windows_as_a_long_one() -> None:
    served = (0, 100, 192, 500, 640, 2000)
    assert [Islands(15, 96).budget(n) for n in served] == [0, 50, 96, 96, 96, 300]
    assert [Islands(15).budget(n) for n in served] == [0, 15, 28, 75, 96, 300]


@pytest.mark.parametrize("name", ["hypic", "block", "full", "epic-0", "epic-8"])
def test_methods_that_every_model_can_honour(name: str) -> None:
    assert parse_link(name, 8).refused_by(HYBRID) is None
    assert parse_link(name, 8).refused_by(ATTENTION) is None


def test_methods_that_a_model_cannot_honour_name_the_reason_and_a_way_out() -> None:
    assert parse_link("prompt-cache", 8).refused_by(ATTENTION) is None
    reason = parse_link("prompt-cache", 8).refused_by(HYBRID)
    assert reason and "recurrent states" in reason and "Use 'hypic' or 'block'" in reason
    assert parse_link("naive", 8).refused_by(HYBRID) is None
    convolutions = ModelTraits(has_linear=True, has_transition=False)
    assert parse_link("hypic", 8).refused_by(convolutions) is None
    for traits in (ATTENTION, convolutions):
        reason = parse_link("naive", 8).refused_by(traits)
        assert reason and "has no transitions" in reason and "Use 'hypic' or 'block'" in reason


def of_request(extra: Any) -> LinkMethod:
    return link_of_request(extra, LinkDefaults("hypic", 8))


def test_options_of_a_request() -> None:
    assert of_request(None) == of_request({}) == of_request({"other_plugin": 1}) == parse_link("hypic", 8)
    assert of_request({"hypic_link": "block"}) == parse_link("block", 8)
    assert of_request({"hypic_seam_tokens": 3}) == parse_link("hypic", 3)
    assert of_request({"hypic_seam_tokens": 16.0}) == parse_link("hypic", 16), "JSON clients send floats"


def test_context_and_islands_go_with_the_link_they_were_chosen_for() -> None:
    def of(**extra: Any) -> LinkMethod:
        return link_of_request(extra, LinkDefaults("hypic", 8, "text", "query-15"))

    assert of() == of(hypic_link="hypic") == parse_link("hypic", 8, "text", "query-15")
    assert of(hypic_seam_tokens=0) == parse_link("hypic", 0, "text", "query-15")
    assert of(hypic_link="block") == parse_link("block", 8)
    assert of(hypic_link="epic-0") == parse_link("epic-0", 8), "would be refused behind a context"
    assert of(hypic_link="block", hypic_islands="query-5") == parse_link("block", 8, "none", "query-5")
    assert of(hypic_context="none") == parse_link("hypic", 8, "none", "query-15")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hypic_x": 3}, "unknown request option 'hypic_x': expected one of hypic_link, hypic_seam_tokens"),
        ({"hypic_link": "fast"}, "hypic_link='fast'"),
        ({"hypic_seam_tokens": -3}, "hypic_seam_tokens=-3"),
        ({"hypic_seam_tokens": 2.5}, "hypic_seam_tokens=2.5: expected an integer"),
        ({"hypic_seam_tokens": float("nan")}, "expected an integer"),
        ({"hypic_seam_tokens": float("inf")}, "expected an integer"),
    ],
)
def test_mistakes_of_a_request(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(LinkError, match=re.escape(message)):
        of_request(extra)


SPACE = Namespace.from_config({"model": "m"})
BASE: dict[str, Any] = {"role": Role.INTERIOR, "tokens": (1, 2, 3), "head": 1, "tail": 1}


def key(namespace: Namespace = SPACE, **changes: Any) -> str:
    return segment_key(namespace, **(BASE | changes))


CHANGES: dict[str, dict[str, Any]] = {
    "role": {"role": Role.LEADING},
    "tokens": {"tokens": (1, 2, 4)},
    "order": {"tokens": (1, 3, 2)},
    "length": {"tokens": (1, 2, 3, 0)},
    "head": {"head": 0},
    "tail": {"tail": 0},
    "dummies": {"dummies": 4},
    "anchor": {"anchor": (5, 6)},
    "offsets": {"offsets": (0, 1, 3)},
    "position": {"fixed_start": 0},
    "other position": {"fixed_start": 7},
}


def test_everything_that_changes_a_record_changes_its_key() -> None:
    found = [key(), *(key(**change) for change in CHANGES.values())]
    found += [key(SPACE.scoped(salt="t", lora=None)), key(Namespace.from_config({"model": "n"}))]
    assert len(set(found)) == len(found)


@given(st.lists(st.integers(0, 2**31), max_size=20), st.lists(st.integers(0, 2**31), max_size=20))
def test_tokens_and_offsets_cannot_be_confused(a: list[int], b: list[int]) -> None:
    assert key(tokens=(*a, *b)) != key(tokens=a, offsets=b)
    assert (key(tokens=a) == key(tokens=b)) is (a == b)


def test_scopes_of_tenants_and_adapters_differ() -> None:
    scopes = [(None, None), ("a", None), ("b", None), (None, "a"), ("a", "a"), ("", None), (None, "")]
    digests = {SPACE.scoped(salt=salt, lora=lora).digest for salt, lora in scopes}
    assert len(digests) == len(scopes)
    assert SPACE.scoped(salt=None, lora=None) == SPACE


def test_format_version_is_part_of_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "FORMAT_VERSION", keys.FORMAT_VERSION + 1)
    assert Namespace.from_config({"model": "m"}) != SPACE


def test_namespaces_do_not_depend_on_the_order_of_their_parts() -> None:
    assert Namespace.from_config({"a": 1, "b": 2}) == Namespace.from_config({"b": 2, "a": 1})
