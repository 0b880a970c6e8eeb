"""Seeded prompts."""

import pytest

from benchmarks.lib.prompts import Writer
from vllm_hypic.eval.task import Prompt

VOCABULARY = list(range(100, 200))


def test_the_same_seed_writes_the_same() -> None:
    one, same, other = (Writer(VOCABULARY, seed).prompt(3, 10, head=4, question=5) for seed in (0, 0, 1))
    assert one == same
    assert one != other


def test_documents_are_fresh_and_of_ordinary_tokens() -> None:
    writer = Writer(VOCABULARY, 0)
    prompts = [writer.prompt(4, 50, head=8, question=8) for _ in range(3)]
    assert len({d for p in prompts for d in p.documents}) == 12
    assert all(token in VOCABULARY for p in prompts for token in p.plain())


def test_forms_of_a_prompt() -> None:
    prompt = Prompt((1, 2), ((3, 4), (5,)), (6,))
    assert prompt.plain() == [1, 2, 3, 4, 5, 6]
    assert prompt.marked(0) == [1, 2, 0, 3, 4, 0, 5, 0, 6]
    assert len(prompt) == 6
    assert prompt.reordered([1, 0], (7,)) == Prompt((1, 2), ((5,), (3, 4)), (7,))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_another_order_shares_no_document_with_the_prefix(n: int) -> None:
    """Else a prefix cache would hit more than the leading segment; one document has one order."""
    writer = Writer(VOCABULARY, 0)
    for _ in range(20):
        order = writer.order(n)
        assert sorted(order) == list(range(n))
        assert (order[0] == 0) == (n == 1)
