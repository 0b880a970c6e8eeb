"""Strategies for requests that a client should not send, most of them one step away from a good one.

A body that is junk all through is refused by the first check that it meets.  So most bodies here are
good ones of the demo model in which something is wrong.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

from hypothesis import strategies as st

from vllm_hypic.primitives.options import KNOWN, PREFIX
from vllm_hypic.primitives.tokens import PrimitiveTexts

SEP, PDEP, PAD = PrimitiveTexts().sep, PrimitiveTexts().pdep, PrimitiveTexts().pad
COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
EXPLAIN = "/v1/hypic/explain"
DOCUMENTS = tuple(" ".join(f"w{(i * k * k + k) % 96}" for k in range(48 + 16 * i)) for i in range(6))
"""Of 48 to 128 tokens each: long enough for records."""
HOSTILE_SALT = "hostile"
"""Of what the hostile client compiles, so that it can be taken away again."""


@dataclass(frozen=True)
class Attack:
    """One request.  ``raw`` is sent in place of ``body`` if given."""

    path: str
    body: Any = None
    raw: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    patience_s: float | None = None
    """The client leaves when nothing came for so long."""
    lines: int | None = None
    """The client leaves after so many lines of the answer."""

    @property
    def content(self) -> bytes:
        # NaN, Infinity and lone surrogates are written as Python's and most other parsers read them.
        return self.raw if self.raw is not None else json.dumps(self.body).encode()

    def under(self, headers: Mapping[str, str]) -> Self:
        """With these headers, too."""
        return replace(self, headers={**self.headers, **headers})

    def plain(self) -> Self:
        """The same request to stock vLLM: without primitives and options of ours."""
        path = self.path
        if path == EXPLAIN:
            path = CHAT if "messages" in self.body else COMPLETIONS
        return replace(self, path=path, body=_plain(self.body), patience_s=None, lines=None)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        for text in (SEP, PDEP, PAD, "<|hypic_"):
            value = value.replace(text, " ")
        return value
    if isinstance(value, list):
        return [_plain(v) for v in value if not (isinstance(v, dict) and _is_ours(v.get("type")))]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if not _is_ours(k)}
    return value


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


# -- values ------------------------------------------------------------------------------------------

ODD_TEXTS = st.sampled_from(
    [
        *("", " ", "\x00", "\ud800", "w1\udfff", "\U0001f600" * 9, "e\u0301" * 40, "\u202e", "\r\n", "\\"),
        *("w1 " * 900, "w" * 50_000),
    ]
)
ODD_NUMBERS = st.sampled_from(
    [
        *(0, -0.0, -1, 1, 8.0, 1.5, 1024, 1025, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, 1e-320),
        *(float("nan"), float("inf"), float("-inf")),
    ]
)
JUNK = st.recursive(
    st.none() | st.booleans() | ODD_NUMBERS | ODD_TEXTS | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | ODD_TEXTS, inner, max_size=3)
    ),
    max_leaves=8,
)

# -- prompts -----------------------------------------------------------------------------------------

IDS = ["A" * 32, "..", "x" * 200, "\x00", "%2e", "a/b", "'", "\u00fc"]
"""Of segments that nobody compiled."""
ID_FORMS = [f"<|hypic_segment:{i}|>" for i in IDS]
FORGED = [
    *("<|hypic_segment:|>", "<|hypic_segment:", "<|hypic_segment:" + "y" * 201 + "|>"),
    *(f"<|hypic_segment:{SEP}|>", f"<|hypic_tokens:{'0' * 32}:AAAA|>", f"<|hypic_tokens:{'0' * 32}:A|>"),
    *("<|hypic_command|>", "<|hypic_sep", "hypic_sep|>", "<|HYPIC_SEP|>"),
]
PIECES = st.one_of(
    st.sampled_from(DOCUMENTS),
    st.sampled_from(DOCUMENTS),
    st.sampled_from([SEP, SEP, SEP, PDEP, PAD, SEP * 40, PAD * 300, PDEP * 3, SEP + PAD + SEP]),
    st.sampled_from(FORGED),
    st.sampled_from(["w1", "w2 w3", "<bos>", "<sys>", "val1 val2"]),
    ODD_TEXTS,
    st.text(max_size=20),
)
TEXTS = st.lists(PIECES, max_size=8).map(" ".join)
COMPOSED = st.lists(st.sampled_from(DOCUMENTS), min_size=1, max_size=4).map(
    lambda documents: SEP.join(["<bos> <sys> w1", *documents, "w3 w4"])
)
"""Good prompts."""
WITH_IDS = st.tuples(COMPOSED, st.sampled_from(ID_FORMS)).map("".join)


def token_prompts(separator: int) -> st.SearchStrategy[Any]:
    """Lists of token ids; ``separator``: the server's, which comes right after the model's own vocabulary."""
    good = st.integers(4, separator - 1)
    marks = st.sampled_from([separator, separator, separator + 1, separator + 2])
    bad = st.sampled_from([-1, separator + 3, 2**31, 2**63, 10**30, 1.5, 7.0, True, None, "w1", [], {}])
    run = st.lists(good, min_size=36, max_size=60)
    tokens = st.lists(st.one_of(run, run, st.lists(marks, max_size=4)), max_size=6).map(
        lambda runs: list(chain(*runs))
    )
    return st.one_of(tokens, tokens, st.tuples(tokens, bad, tokens).map(lambda t: [*t[0], t[1], *t[2]]))


_TEXT_PARTS = (st.sampled_from(DOCUMENTS) | TEXTS).map(lambda text: {"type": "text", "text": text})
PARTS = st.lists(
    st.one_of(
        st.sampled_from(["hypic_sep", "hypic_sep", "hypic_pdep", "hypic_pad"]).map(lambda t: {"type": t}),
        st.sampled_from(IDS).map(lambda i: {"type": "hypic_segment", "id": i}),
        JUNK.map(lambda value: {"type": "hypic_segment", "id": value}),
        *(_TEXT_PARTS, _TEXT_PARTS, JUNK.map(lambda value: {"type": "text", "text": value})),
        *(JUNK.map(lambda value: {"type": value}), st.sampled_from(DOCUMENTS), JUNK),
    ),
    max_size=6,
)
GOOD_PARTS = st.lists(st.sampled_from(DOCUMENTS), min_size=1, max_size=3).map(
    lambda documents: [
        part
        for text in (*documents, "w1")
        for part in ({"type": "hypic_sep"}, {"type": "text", "text": text})
    ]
)


def prompts(separator: int) -> st.SearchStrategy[Any]:
    """``prompt`` of a completion request."""
    one = st.one_of(COMPOSED, COMPOSED, TEXTS, WITH_IDS, token_prompts(separator))
    return st.one_of(one, one, one, st.lists(one, max_size=3), PARTS, GOOD_PARTS, JUNK)


TOOLS = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.just("w1") | JUNK, "description": TEXTS | JUNK}),
    }
)


def messages() -> st.SearchStrategy[Any]:
    """``messages`` of a chat request."""
    content = st.one_of(COMPOSED, COMPOSED, TEXTS, WITH_IDS, PARTS, GOOD_PARTS, GOOD_PARTS, JUNK)
    role = st.sampled_from(["user", "user", "user", "system", "assistant", "tool", "developer", "w1", SEP])
    message = st.fixed_dictionaries({"role": role, "content": content})
    return st.lists(message | JUNK, min_size=1, max_size=3) | st.lists(message, min_size=1, max_size=2) | JUNK


CHAT_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.lists(TOOLS, max_size=4) | JUNK,
        "tool_choice": st.just("none"),
        "documents": st.lists(st.fixed_dictionaries({"text": st.sampled_from(DOCUMENTS)}) | JUNK, max_size=4),
        "chat_template_kwargs": st.fixed_dictionaries({"documents": st.lists(JUNK, max_size=3)}) | JUNK,
    },
)

# -- options -----------------------------------------------------------------------------------------

_VALUES: Mapping[str, list[Any]] = {
    "hypic_link": [
        *("hypic", "block", "epic-0", "epic-4", "naive", "full", "seam-4-0+4", "seam-0-9", "hypic\x00"),
        *("prompt-cache", "seam--1-1", "epic-\u0663", "seam-1024-1024+1024", "epic-1025"),
        "seam-0000000-0",
    ],
    "hypic_seam_tokens": [0, 4, 8, 8.0, 64, 1024],
    "hypic_context": ["none", "lead", "text", "lead ", "none\n"],
    "hypic_islands": ["none", "query-10", "query-10-96", "query-50", "query-0", "query-051", "query-\u0661"],
    "hypic_segment_mode": ["off", "structure", "text", "cdc", "text ", "TEXT"],
    "hypic_segment_ranges": [
        *([0, 8], [8, 48, 48, 96], [1, 40], [0, 2**31], [8, 8], [4], [0, 1] * 5000, [-1, 4], [0.0, 8.0], []),
    ],
    "hypic_push_to": [
        *("tcp://127.0.0.1:9", "tcp://[::1]:0", "tcp://", "tier:x", "tier:", "file:///etc/passwd"),
        "tcp://w1 w2:-1",
    ],
    "hypic_push_deadline_s": [0.1, 1, 1e9, -1],
    "hypic_remote": [["0" * 64], ["0" * 63], ["0" * 64] * 5000, "0" * 64, []],
    "hypic_remote_deadline_s": [0.1, 1, 1e9, 0],
    "hypic_permit": [
        *("", "1-" + "0" * 64, "999999999999-" + "a" * 64, "9" * 13 + "-" + "0" * 64, "\u0661-" + "0" * 64),
        "\x00",
    ],
}
OUR_VALUES = {name: st.sampled_from(values) for name, values in _VALUES.items()}


def _some_of(names: Sequence[str], most: int, junk: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(st.sampled_from(names), min_size=1, max_size=most, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries(
            {name: OUR_VALUES[name] | JUNK if junk else OUR_VALUES[name] for name in chosen}
        )
    )


OPTIONS = st.one_of(
    _some_of(KNOWN[:6], 2),
    _some_of(KNOWN[:6], 4),
    _some_of(KNOWN, 3, junk=True),
    st.dictionaries(
        st.sampled_from([*KNOWN, "hypic_command", "hypic_", "HYPIC_LINK", "kv_transfer_params"])
        | st.text(max_size=8),
        JUNK,
        max_size=4,
    ),
    JUNK,
)
"""``vllm_xargs``."""

_SAMPLING: Mapping[str, list[Any]] = {
    "n": [1, 2, 3, 0, -1, 10**6],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {}],
    "logprobs": [0, 1, 5, True, -1, 10**9],
    "top_logprobs": [0, 2, -1, 10**9],
    "prompt_logprobs": [0, 1, -1, 10**9],
    "priority": [0, 1, -1, 2**63, 10**30],
    "min_tokens": [0, 3, 9, -1, 10**9],
    "max_tokens": [1, 2, 8, 0, -1, 1.5, None],
    "stop": ["w1", ["w1", "w2"], [""], "", [SEP], SEP, "\x00", ["\ud800"], "w" * 5000],
    "stop_token_ids": [[1], [-1], [10**9], [2**70], []],
    "seed": [0, -1, 2**63, 2**63 - 1, -(2**63) - 1, 10**30],
    "temperature": [0, 0.7, 2, -1, 1e308, float("nan"), float("inf")],
    "top_p": [0.5, 1, 0, 2, float("nan")],
    "top_k": [0, 1, 5, -1, -2, 10**9],
    "repetition_penalty": [1.0, 1.1, 0, -1, float("nan")],
    "presence_penalty": [0.5, -2, 3],
    "frequency_penalty": [0.5, -2, 3],
    "cache_salt": [HOSTILE_SALT, "b", "", "a/b", "@", "\u00fc", "\x00", "s" * 129, 7, None, ["a"]],
    "truncate_prompt_tokens": [1, 8, -1, 0, 10**9],
    "kv_transfer_params": [{}, {"do_remote_prefill": True}, {"hypic": 1}, {"hypic_failure": {}}, 7],
    "suffix": ["w1", SEP],
    "allowed_token_ids": [[5, 6], [], [-1], [10**9]],
    "bad_words": [["w1"], [SEP], [""]],
    "logit_bias": [{"5": 1}, {"-1": 1}, {"999999": 1}, {"w": 1}],
    "structured_outputs": [{"choice": ["w1", "w2"]}, {"regex": "w[0-9]+"}, {"choice": []}, {}],
    "prompt_embeds": ["", "AAAA", [], 7],
    "request_id": ["r" * 300, "\x00", "same", "hypic-page-1", ""],
    "model": ["", "other", "\x00", 7],
}
_FLAGS = (
    *("stream", "echo", "ignore_eos", "add_special_tokens", "return_token_ids", "return_prompt_text"),
    *("return_tokens_as_token_ids", "use_beam_search"),
)
SAMPLING: Mapping[str, st.SearchStrategy[Any]] = {
    **{name: st.sampled_from(values) for name, values in _SAMPLING.items()},
    **dict.fromkeys(_FLAGS, st.booleans()),
}
FEW_TOKENS = {"max_tokens": 8, "temperature": 0}


@st.composite
def requests(draw: st.DrawFn, separator: int) -> Attack:
    """A completion, chat or tokenise request, or one of the first two explained."""
    path = draw(st.sampled_from([COMPLETIONS, COMPLETIONS, COMPLETIONS, CHAT, CHAT, TOKENIZE]))
    wrong = draw(st.sampled_from(["prompt", "options", "sampling", "everything"]))
    all_wrong = wrong == "everything"
    prompt = draw(COMPOSED)
    if path == CHAT:
        hostile = all_wrong or wrong == "prompt"
        body = {"messages": draw(messages()) if hostile else [{"role": "user", "content": prompt}]}
        if hostile:
            body |= draw(CHAT_FIELDS)
    else:
        body = {"prompt": draw(prompts(separator)) if all_wrong or wrong == "prompt" else prompt}
    if path != TOKENIZE:
        body |= FEW_TOKENS
    if all_wrong or wrong == "sampling":
        chosen = draw(st.lists(st.sampled_from(sorted(SAMPLING)), min_size=1, max_size=4, unique=True))
        body |= {name: draw(SAMPLING[name]) for name in chosen}
        if all_wrong:
            body[chosen[0]] = draw(JUNK)
    if body.get("use_beam_search") and body.get("max_tokens") is None:
        # vLLM's beam search to the end of the context takes a minute, and three at once many.
        body["max_tokens"] = FEW_TOKENS["max_tokens"]
    if all_wrong or wrong == "options":
        body["vllm_xargs"] = draw(OPTIONS)
    if path != TOKENIZE and draw(st.integers(0, 5)) == 0:
        return Attack(EXPLAIN, body)
    if draw(st.integers(0, 3)) > 0:
        return Attack(path, body)
    body |= {"stream": draw(st.booleans()), "max_tokens": 400, "ignore_eos": True, "n": 1}
    patience = draw(st.sampled_from([0.005, 0.02, 0.1, None]))
    return Attack(path, body, patience_s=patience, lines=draw(st.integers(0, 12)))


SHOWING = ("echo", "return_prompt_text", "return_token_ids", "return_token_strs")
"""Fields that give a prompt back."""


@st.composite
def requests_with_parts(draw: st.DrawFn) -> Attack:
    """Prompts of parts, asked back; perhaps something is wrong beside the parts, or among them."""
    path = draw(st.sampled_from([COMPLETIONS, CHAT, CHAT, TOKENIZE, EXPLAIN]))
    wrong = draw(st.sampled_from(["nothing", "field", "prompt"]))
    parts = draw(PARTS if wrong == "prompt" else GOOD_PARTS)
    beside = draw(st.none() | JUNK if wrong == "prompt" else st.none())
    if path == CHAT or (path != COMPLETIONS and draw(st.booleans())):
        role = draw(st.sampled_from(["user", "user", "assistant", "system", "w1"]))
        body = {"messages": [{"role": role, "content": parts}, *([] if beside is None else [beside])]}
    else:
        body = {"prompt": parts if beside is None else [parts, beside]}
    body |= {name: True for name in SHOWING if draw(st.booleans())}
    body |= {"stream": draw(st.booleans()), "add_generation_prompt": draw(st.booleans())}
    if wrong == "field":
        name = draw(st.sampled_from(sorted(SAMPLING)))
        body[name] = draw(SAMPLING[name] | JUNK)
    return Attack(path, {**FEW_TOKENS, **body})


def _nested(depth: int) -> bytes:
    return b'{"prompt": "\\u003c|hypic_sep|>", "user": ' + b"[" * depth + b"]" * depth + b"}"


@st.composite
def raw_requests(draw: st.DrawFn) -> Attack:
    """Bodies that are no good JSON, or JSON that parsers disagree about."""
    path = draw(st.sampled_from([COMPLETIONS, CHAT, TOKENIZE, EXPLAIN]))
    good = json.dumps({"prompt": draw(WITH_IDS | COMPOSED), "messages": [], **FEW_TOKENS}).encode()
    cut = draw(st.integers(0, len(good)))
    raw = draw(
        st.one_of(
            st.just(good[:cut]),
            st.just(good[:cut] + b"\xff" + good[cut:]),
            st.just(b"\xef\xbb\xbf" + good),
            st.just(good.decode().encode("utf-16")),
            st.just(good.replace(b'"prompt"', b'"prompt": "w1", "prompt"')),
            st.just(good[:-1] + b', "seed": 1' + b"0" * 5000 + b"}"),
            st.just(b"[" + good + b"]"),
            st.integers(900, 1030).map(_nested),
            st.sampled_from([100, 20000]).map(_nested),
            st.binary(max_size=64),
        )
    )
    kind = draw(
        st.sampled_from(["application/json"] * 4 + ["text/plain", "application/x-www-form-urlencoded", ""])
    )
    return Attack(path, raw=raw, headers={"content-type": kind})


_FAR_OFF = st.sampled_from([0, -0.0, -1, 1.5, 2**63, 1e308, float("nan"), float("-inf")]) | ODD_TEXTS
BAD_OPTIONS: Mapping[str, st.SearchStrategy[Any]] = {
    "hypic_link": _FAR_OFF | st.sampled_from(["epic-1025", "seam-1-1025"]),
    "hypic_seam_tokens": st.sampled_from([-1, 1025, 1.5, 2**63, "8", "", 1e308, [8]]),
    "hypic_context": _FAR_OFF | st.just("page"),
    "hypic_islands": _FAR_OFF
    | st.sampled_from(["query-0", "query-51", "query-010x", "query-10-9999", "query-10-96-1"]),
    "hypic_push_to": OUR_VALUES["hypic_push_to"] | ODD_TEXTS,
    "hypic_remote": OUR_VALUES["hypic_remote"],
    "hypic_command": _FAR_OFF | st.just(["delete"]),
    **dict.fromkeys(["hypic_push_deadline_s", "hypic_remote_deadline_s", "hypic_found", "hypic_"], _FAR_OFF),
}
"""Options, and values of which none is allowed to a client.  Integers of more than 64 bits are refused by
vLLM, which does not say where they stand."""
BAD_OPTION = st.sampled_from(sorted(BAD_OPTIONS)).flatmap(
    lambda name: st.tuples(st.just(name), BAD_OPTIONS[name])
)
