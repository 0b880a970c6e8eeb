"""Strategies for requests that are no prompts: the cache API, and whatever else a router is asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from .grammar import (
    COMPLETIONS,
    DOCUMENTS,
    FEW_TOKENS,
    HOSTILE_SALT,
    IDS,
    JUNK,
    ODD_NUMBERS,
    ODD_TEXTS,
    PARTS,
    SEP,
    TEXTS,
)

# -- the cache API -----------------------------------------------------------------------------------

CACHE = "/v1/hypic/segments"


@dataclass(frozen=True)
class CacheCall:
    """A request to the cache API; ``{}`` in path and body stands for an id that was given out before, the
    ``pick``-th from behind."""

    method: str
    path: str
    pick: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


SALT_HEADERS = st.sampled_from([HOSTILE_SALT] * 6 + ["", "b", "a/b", "s" * 129, "@", "w1 w2"])
_PICK = st.integers(1, 4)
_TTL = st.sampled_from([None, 0.1, 0.2, 60, 0, -1, 1e300, float("nan"), float("inf"), 10**400, "60", True])
_DOCUMENT = st.sampled_from(DOCUMENTS)
_ODD_IDS = st.sampled_from([5, 6, -1, 10**6, 2**24 - 1, 2**24, 2**63, 1.0, True])
_MESSAGE = {"role": st.sampled_from(["user", "system", "tool"]), "content": _DOCUMENT | TEXTS | PARTS}
_SEGMENT = st.one_of(
    st.fixed_dictionaries({"text": _DOCUMENT}),
    st.fixed_dictionaries({"text": _DOCUMENT}),
    st.fixed_dictionaries({"text": TEXTS | ODD_TEXTS}),
    st.fixed_dictionaries({"tokens": st.lists(st.integers(4, 300), min_size=36, max_size=60)}),
    st.fixed_dictionaries({"tokens": st.lists(_ODD_IDS, max_size=5)}),
    st.fixed_dictionaries({"message": st.fixed_dictionaries(_MESSAGE)}),
    st.dictionaries(st.sampled_from(["text", "tokens", "message", "role", "w1"]), JUNK, max_size=3),
)
_FIELDS = {
    "role": st.sampled_from(["leading", "interior", "interior", "w1"]),
    "ttl_s": _TTL,
    "pinned": st.sampled_from([True, True, False, None, "yes", 7]),
}
_COMPILE = st.tuples(_SEGMENT, st.fixed_dictionaries({}, optional=_FIELDS)).map(
    lambda both: both[0] | both[1]
)
_ID = "<|hypic_segment:{}|>"
_USE = st.sampled_from([f"{_ID} w1", f"w1{_ID}{SEP}{_ID}w2", _ID * 3])
_CHANGE = st.fixed_dictionaries(
    {}, optional={"pinned": st.sampled_from([True, False, None, "yes"]), "ttl_s": _TTL}
)


@st.composite
def cache_calls(draw: st.DrawFn) -> CacheCall:
    """A request to the cache API, or one that uses what it gave out."""
    kinds = ["compile"] * 4 + ["change", "change", "delete", "show", "list"] + ["use"] * 3
    kind = draw(st.sampled_from(kinds))
    pick, headers = draw(_PICK), {"x-cache-salt": draw(SALT_HEADERS)}
    which = draw(st.sampled_from(["{}"] * 6 + IDS[2:]))
    one = f"{CACHE}/{quote(which, safe='{}')}"
    if kind == "compile":
        return CacheCall("POST", CACHE, pick, draw(_COMPILE), headers)
    if kind == "change":
        return CacheCall("PATCH", one, pick, draw(_CHANGE), headers)
    if kind == "delete":
        return CacheCall("DELETE", one, pick, None, headers)
    if kind == "show":
        query = draw(st.sampled_from(["", "?content=true", "?content=%00"]))
        return CacheCall("GET", one + query, pick, None, headers)
    if kind == "list":
        after, limit = draw(st.sampled_from(["", "{}", "%00", "x" * 200])), draw(ODD_NUMBERS)
        return CacheCall("GET", f"{CACHE}?after={after}&limit={limit}", pick, None, headers)
    body = {"prompt": draw(_USE), "cache_salt": HOSTILE_SALT, **FEW_TOKENS, "stream": draw(st.booleans())}
    return CacheCall("POST", COMPLETIONS, pick, body, {})


# -- a router ----------------------------------------------------------------------------------------

HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "x-request-id": st.sampled_from(["", "same", "x" * 300, "w1 w2", "\u00fc", "../..", "hypic-page-1"]),
        "x-hypic-breakdown": st.sampled_from(["1", "0", "", "x" * 300]),
        "authorization": st.sampled_from(["", "Bearer w1", "Basic \u00fc", "x" * 3000]),
        "x-cache-salt": SALT_HEADERS,
    },
)


@dataclass(frozen=True)
class Visit:
    """A request to whatever route; ``target``: path and query as they are sent."""

    method: str
    target: bytes
    headers: Mapping[str, str]
    body: bytes


PATHS = [
    *(b"/healthcheck", b"/metrics", b"/healthcheck/", b"//healthcheck", b"/", b"/v1/models"),
    *(b"/v1/hypic/../../metrics", b"/v1/hypic/%2e%2e/x", b"/%00", b"/v1/hypic/segments/%ff"),
    *(b"/v1/hypic/stats", b"/v1/hypic/describe", b"/v1/hypic/explain", b"/w1;w2", b"/" + b"w" * 3000),
    *(b"/%", b"/\\..\\", b"/detokenize", b"/v1/completions", b"/v1/chat/completions/", b"/docs"),
    b"/openapi.json",
]


@st.composite
def visits(draw: st.DrawFn) -> Visit:
    """Requests to a router that are no completions, of its own routes and of all others."""
    path = draw(st.sampled_from(PATHS))
    query = draw(st.sampled_from([b"", b"", b"?", b"?w1=%00", b"?" + b"w" * 3000, b"?limit=-1&limit=1"]))
    method = draw(st.sampled_from(["GET", "GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "W1"]))
    body = draw(st.binary(max_size=16) | st.just(b"[" * 2000)) if method not in ("GET", "HEAD") else b""
    return Visit(method, path + query, draw(HEADERS), body)
