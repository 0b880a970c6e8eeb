"""The router's plan is the engine's, a warm-up prompt makes exactly the record that the plan names, and only
requests that are worth it are tokenised: where text counts, and where it is literal."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.processes import free_port
from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.scheduler.connector import SchedulerConnector
from vllm_hypic.connector.scheduler.planning import PlanRequest
from vllm_hypic.engine.instance import RoutedInstance
from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.states import LinearGeometry
from vllm_hypic.primitives.keys import Namespace
from vllm_hypic.primitives.pieces import PromptError
from vllm_hypic.primitives.plan import PromptPlan
from vllm_hypic.primitives.policies import LinkError
from vllm_hypic.primitives.tokens import PrimitiveIds
from vllm_hypic.segment_parallel.description import Description
from vllm_hypic.segment_parallel.router import plan as router_plan
from vllm_hypic.segment_parallel.router.plan import plan_request
from vllm_hypic.segment_parallel.router.prompt import CHAT, COMPLETIONS, Whole, tokenize_request, whole_reason

from .fake import description

IDS = PrimitiveIds(100, 101, 102)
NAMESPACE = "ab" * 32
MODEL_LEN = 400
# Names that routers of other versions look for.
FIELDS = """
    instance model namespace generation landing events separator pdep pad link seam_tokens min_segment_tokens
    checkpoint_tokens max_model_len context context_tokens islands has_linear has_transition
    reads_successors learned literal_text quadratic ranks deadline_s shared_tiers limits
"""
LIMITS = "pages slots page_tokens max_request_tokens tiles record_tiles state_pages"
LINKS = ["hypic", "epic-0", "epic-3", "seam-2-0+3", "block", "prompt-cache", "naive", "full", "nonsense"]


def engine(linear: bool, reads_successors: bool = False, **options: Any) -> SchedulerConnector:
    attention = (AttentionGeometry("layers.0", 2, 64, torch.bfloat16),)
    gdn = (LinearGeometry("layers.1", 3, 16, 16, 3, 8, torch.bfloat16),) if linear else ()
    # Small: some prompts do not fit.
    pool = PoolGeometry(attention, gdn, page_tokens=16, pages=30, slots=6, transition_blocks=9)
    usual = {"min_segment_tokens": 4, "seam_tokens": 2, "context": "none", "islands": "none"}
    config = HypicConfig.from_mapping({**usual, **options})
    return SchedulerConnector(
        config, pool, Namespace(NAMESPACE), MODEL_LEN, lambda: IDS, reads_successors=reads_successors
    )


def described(side: SchedulerConnector, **more: Any) -> Description:
    """What ``GET /v1/hypic/describe`` of this engine says."""
    traits, config = side.planner.traits, side.config
    said = description(
        **{"namespace": side.namespace.digest, "generation": side.namespace.generation},
        **{"separator": IDS.sep, "pdep": IDS.pdep, "pad": IDS.pad},
        **{name: getattr(config, name) for name in ("link", "seam_tokens", "min_segment_tokens")},
        **{name: getattr(traits, name) for name in ("has_linear", "has_transition")},
        reads_successors=side.planner.reads_successors,
        max_model_len=MODEL_LEN,
        limits=side.planner.limits(),
    )
    return msgspec.json.decode(msgspec.json.encode({**msgspec.to_builtins(said), **more}), type=Description)


prompts = st.lists(
    st.one_of(
        st.lists(st.integers(0, 99), min_size=1, max_size=30),
        st.sampled_from([[IDS.sep], [IDS.sep], [IDS.pdep], [IDS.pad]]),
    ),
    max_size=24,
).map(lambda parts: [token for part in parts for token in part])


@given(
    ids=prompts,
    link=st.sampled_from(LINKS),
    seam=st.sampled_from([None, 0, 3]),
    lead=st.booleans(),
    salt=st.sampled_from([None, "t"]),
    linear=st.booleans(),
    by_a_head=st.booleans(),
)
def test_the_plan_is_the_engines_and_warm_up_prompts_make_its_records(
    ids: list[int], link: str, seam: int | None, lead: bool, salt: str | None, linear: bool, by_a_head: bool
) -> None:
    extra: dict[str, Any] = {"hypic_link": link} | ({} if seam is None else {"hypic_seam_tokens": seam})
    extra |= {"hypic_context": "lead"} if lead else {}
    planned_alike(engine(linear, by_a_head), ids, extra, salt)


def plan_of(
    side: SchedulerConnector, ids: Sequence[int], extra: Mapping[str, Any], salt: str | None = None
) -> PromptPlan | None:
    """The engine's plan of a prompt."""
    return side.plan(PlanRequest(list(ids), side.spec(extra, len(ids)), salt, None))


def planned_alike(
    side: SchedulerConnector, ids: list[int], extra: dict[str, Any], salt: str | None
) -> PromptPlan | None:
    """The plan of both, found to be the same; every warm-up prompt makes its record, and only a record that
    depends on the leading segment has none.  ``None``: refused."""
    try:
        expected = plan_of(side, ids, extra, salt)
    except (LinkError, PromptError):
        expected = None
    said = described(side)
    planned = plan_request(ids, extra, salt, said)
    if expected is None:
        assert planned is None
        return None
    assert planned is not None and planned.plan == expected
    assert {s.key for s in planned.segments} == {s.key for s in expected.segments}
    dependent = {s.key for s in expected.segments if s.anchor or s.context is not None}
    assert {s.key for s in planned.segments if not s.prompt} == dependent
    for segment in planned.segments:
        if segment.key in dependent:
            assert not planned.made_by(said, segment)
            continue
        warm = plan_of(side, segment.prompt, planned.options, salt)
        assert warm is not None and warm.warm_only and [s.key for s in warm.segments] == [segment.key]
        assert planned.made_by(said, segment)
        small = dataclasses.replace(said.limits, max_request_tokens=segment.tokens - 1)
        assert not planned.made_by(msgspec.structs.replace(said, limits=small), segment)
        assert not planned.made_by(msgspec.structs.replace(said, ranks=2), segment)
    return expected


@pytest.mark.parametrize("extra", [{"hypic_link": "seam-2-0+3"}, {"hypic_context": "lead"}])
def test_records_behind_the_leading_segment_are_asked_of_no_other_instance(extra: dict[str, Any]) -> None:
    side = engine(True)
    ids = [*range(20), IDS.sep, *range(30, 50), IDS.sep, *range(60, 80), IDS.sep, 7]
    assert planned_alike(side, ids, extra, None) is not None
    planned = plan_request(ids, extra, None, described(side))
    assert planned is not None and [bool(s.prompt) for s in planned.segments] == [True, False, False]


@pytest.mark.parametrize("link", ["hypic", "epic-0", "epic-3", "block", "prompt-cache"])
def test_padding_dependent_tokens_and_fixed_positions(link: str) -> None:
    words = list(range(20))
    sep, pad, pdep = [IDS.sep], [IDS.pad], [IDS.pdep]
    ids = [*words, *sep, *pad * 3, *words, *pad * 2, *words, *pdep, 7, *sep, *words, *sep, 1]
    plan = planned_alike(engine(linear=False), ids, {"hypic_link": link}, None)
    assert plan is not None and len(plan.segments) == 3
    assert any(s.offsets is not None for s in plan.segments)


@pytest.mark.parametrize("token", [-(2**63) - 1, 2**63, 2**70])
@pytest.mark.parametrize("where", [0, 30])
def test_token_ids_of_more_than_63_bits_are_refused(where: int, token: int) -> None:
    ids = [*([1] * 20), IDS.sep, *([2] * 20), IDS.sep, 3]
    ids[where] = token
    side = engine(linear=False)
    with pytest.raises(PromptError, match=f"token id {token}: expected at most {2**63 - 1}"):
        plan_of(side, ids, {"hypic_link": "seam-2-2+4"})
    assert plan_request(ids, {}, None, described(side)) is None


def test_warm_up_prompts_of_one_request_do_not_grow_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the bound a segment has none, and no instance is said to make it."""
    monkeypatch.setattr(router_plan, "MOST_PADDING", 300)
    side = engine(linear=False)
    ids = [t for i in range(5) for t in (IDS.sep, *[i] * 50)] + [IDS.sep, 99]
    planned = plan_request(ids, {"hypic_link": "prompt-cache"}, None, described(side))
    assert planned is not None and planned.plan == plan_of(side, ids, {"hypic_link": "prompt-cache"})
    assert [len(s.prompt) for s in planned.segments] == [52, 102, 152, 202, 0]
    made = [planned.made_by(planned.description, s) for s in planned.segments]
    assert made == [True, True, True, True, False]
    moved = plan_request(ids, {"hypic_link": "hypic"}, None, described(side))
    assert moved is not None and all(s.prompt for s in moved.segments)


def test_the_longest_segment_that_a_model_takes() -> None:
    for n in (MODEL_LEN - 2, MODEL_LEN - 1, MODEL_LEN):
        plan = planned_alike(engine(linear=True), [*([1] * n), IDS.sep, *([2] * 40), IDS.sep, 3], {}, None)
        assert plan is not None and len(plan.segments) == (2 if n < MODEL_LEN else 1)


def test_an_engine_describes_itself_so() -> None:
    events = f"tcp://127.0.0.1:{free_port()}"
    side = engine(linear=True, segment_parallel={"listen": "tcp://127.0.0.1:7100", "events": events})
    instance = RoutedInstance(side, ("m",), MODEL_LEN)
    try:
        said = instance.describe()
    finally:
        instance.close()
    assert said is not None and said.deadline_s == 120 and said.instance
    own = {"instance": "i", "events": "tcp://127.0.0.1:7101", "deadline_s": None}
    assert msgspec.structs.replace(said, **own) == described(side)
    wire = msgspec.json.encode(said)
    assert msgspec.json.decode(wire, type=Description) == said
    told = msgspec.json.decode(wire)
    assert set(told) == set(FIELDS.split()) and set(told["limits"]) == set(LIMITS.split())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"namespace": ""}, "namespace"),
        ({"separator": -1}, "separator"),
        ({"pdep": 100}, "must differ"),
        ({"landing": "tcp://nowhere"}, "tcp://ADDRESS:PORT"),
        ({"limits": {}}, "limits"),
        ({"limits": {"pages": 1, "slots": 1, "page_tokens": 0, "max_request_tokens": 9}}, "page_tokens=0"),
        ({"limits": {"pages": 1, "slots": -1, "page_tokens": 1, "max_request_tokens": 9}}, "slots=-1"),
        ({"model": []}, "model"),
        ({"has_linear": 1}, "has_linear"),
    ],
)
def test_descriptions_that_make_no_sense(change: dict, said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        described(engine(linear=True), **change)


def test_a_chat_is_tokenised_with_what_its_template_gets() -> None:
    """vLLM's chat requests put more into the template's arguments than its tokenise requests do."""
    kept = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    template = {"documents": [{"text": "d"}], "reasoning_effort": "none"}
    body = {**kept, **template, "chat_template_kwargs": {"a": 1}, "temperature": 0.5, "stream": True}
    given = {"a": 1, **template, "enable_thinking": False}
    assert tokenize_request(CHAT, body) == {**kept, "chat_template_kwargs": given}


def test_only_instances_of_one_generation_make_each_others_records() -> None:
    """One whose caches were reset may have other weights: its records have other keys."""
    ids = [IDS.sep, *range(40), IDS.sep, 7]
    before, after = engine(False), engine(False)
    after.reset("2")
    for combine, other in ((before, after), (after, before)):
        planned_alike(combine, ids, {}, None)
        planned = plan_request(ids, {}, None, described(combine))
        assert planned is not None and planned.segments
        assert not any(planned.made_by(described(other), segment) for segment in planned.segments)
    assert described(before).planning != described(after).planning


# -- requests that are worth tokenising

SEP, SEP_ID = "<|hypic_sep|>", IDS.sep
SEP_PART, SEGMENT = {"type": "hypic_sep"}, {"type": "hypic_segment", "id": "x"}
TEXT = {"type": "text", "text": f"document{SEP}<|hypic_segment:x|>"}
NAMED, NONE, UNSUPPORTED = Whole.SEGMENT_IDS, Whole.NO_SEGMENTS, Whole.UNSUPPORTED


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("body", "marked", "literal"),
    [
        ({"prompt": f"a{SEP}b"}, None, NONE),
        ({"prompt": "a"}, NONE, NONE),
        ({"prompt": "<|hypic_segment:x|>"}, NAMED, NONE),
        ({"prompt": [1, SEP_ID, 2]}, None, None),
        ({"prompt": [1, SEP_ID, 2], "prompt_logprobs": 1}, None, None),
        ({"prompt": [1, SEP_ID, 2], "echo": True, "logprobs": 1}, None, None),
        ({"prompt": [1, SEP_ID, 2], "n": 2}, UNSUPPORTED, UNSUPPORTED),
        ({"prompt": [1, 2]}, NONE, NONE),
        ({"prompt": [{"type": "text", "text": "a"}, SEP_PART]}, None, None),
        ({"prompt": [TEXT, SEP_PART]}, NAMED, None),
        ({"prompt": [SEP_PART, SEGMENT]}, NAMED, NAMED),
        ({"prompt": ["a", SEP]}, UNSUPPORTED, UNSUPPORTED),
        (chat(SEP), None, NONE),
        (chat([TEXT]), NAMED, NONE),
        (chat([TEXT, SEP_PART]), NAMED, None),
        (chat([SEGMENT]), NAMED, NAMED),
        (chat([SEP_PART, {"type": "image_url"}]), UNSUPPORTED, UNSUPPORTED),
    ],
)
def test_text_counts_only_where_it_is_not_literal(
    body: dict[str, Any], marked: Whole | None, literal: Whole | None
) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    assert whole_reason(path, body, ("m",), SEP, SEP_ID) is marked
    for known in (SEP, None):
        assert whole_reason(path, body, ("m",), known, SEP_ID, literal=True) is literal


def test_the_instance_is_asked_for_the_tokens_of_the_parts() -> None:
    for path, body in ((CHAT, chat([TEXT, SEP_PART])), (COMPLETIONS, {"prompt": [TEXT, SEP_PART]})):
        assert tokenize_request(path, body) == body
