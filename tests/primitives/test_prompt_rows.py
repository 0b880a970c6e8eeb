"""Which rows of a stream say how likely which tokens of the prompt are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives.keys import Namespace
from vllm_hypic.primitives.pieces import PromptError, parse_prompt
from vllm_hypic.primitives.plan import PoolLimits, build_plan
from vllm_hypic.primitives.policies import parse_link
from vllm_hypic.primitives.prompt_rows import prompt_rows
from vllm_hypic.primitives.tokens import PrimitiveIds

SEP, PDEP, PAD = 100, 101, 102
IDS = PrimitiveIds(SEP, PDEP, PAD)
LIMITS = PoolLimits(pages=1000, slots=100, page_tokens=16, max_request_tokens=4096)
LINKS = ["full", "seam-2-2", "seam-0-3", "block", "prompt-cache"]


@given(
    st.lists(st.integers(0, 99) | st.sampled_from([SEP, PDEP, PAD]), min_size=1, max_size=80),
    st.sampled_from(LINKS),
)
def test_a_target_stands_right_behind_the_token_of_its_row(ids: list[int], link: str) -> None:
    try:
        plan = build_plan(
            parse_prompt(ids, IDS), parse_link(link, 4), Namespace(""), LIMITS, min_segment_tokens=4
        )
    except PromptError:
        return
    found = prompt_rows(ids, plan, IDS)
    assert found.tokens == tuple(ids) and list(found.targets) == sorted(set(found.targets))
    for row, target in zip(found.rows, found.targets, strict=True):
        assert ids[target] == plan.stream[row + 1]
        before = [token for token in ids[:target] if token not in (SEP, PDEP)]
        assert before[-1] == plan.stream[row]
    if link == "full":
        own = [i for i, token in enumerate(ids) if token not in (SEP, PDEP, PAD)]
        behind_padding = [i for i in own if [t for t in ids[:i] if t not in (SEP, PDEP)][-1:] == [PAD]]
        assert list(found.targets) == [i for i in own[1:] if i not in behind_padding]
