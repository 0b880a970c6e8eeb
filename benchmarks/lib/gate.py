"""Correctness checks that must pass before a benchmark reports a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import click

from vllm_hypic.harness.engine_calls import Answer, Ask
from vllm_hypic.harness.engines import Engine, EngineError
from vllm_hypic.harness.fidelity import Distance, distance, top
from vllm_hypic.harness.fidelity import GateFailed as GateFailed
from vllm_hypic.harness.fidelity import require_cold_equals_warm as require_cold_equals_warm
from vllm_hypic.harness.fidelity import require_fresh as require_fresh
from vllm_hypic.harness.fidelity import require_same as require_same
from vllm_hypic.primitives.policies import LinkMethod

GROSS_KL = 3.0
"""Limit, in nats, on the distance of a first-token distribution to stock vLLM's. Reuse with separators is an
approximation whose quality depends on the model, so that only gross errors are refused."""


def reporting_failures(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a click command report a failed gate or a dead engine in one message, with exit code 1."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except GateFailed as e:
            raise click.ClickException(f"correctness gate: {e}") from e
        except EngineError as e:
            raise click.ClickException(str(e)) from e

    return wrapped


def require_reuse(answer: Answer, documents: int, tokens: int, link: LinkMethod) -> None:
    """Raise :class:`GateFailed` unless records served ``documents`` documents of ``tokens`` tokens, without
    their seams and islands."""
    inside = documents * (tokens - link.head - link.tail)
    least = inside - (0 if link.islands is None else link.islands.budget(inside))
    if answer.cached < least:
        raise GateFailed(
            f"{answer.cached} of {answer.prompt_tokens} tokens were reused, expected at least {least}; "
            "is the pool too small (--kv-gib, --hypic)?"
        )


def first_token_distance(stock: Engine, plain: list[int], other: Engine, ask: Ask) -> Distance:
    """Return the distance of ``other``'s answer to ``ask`` to stock vLLM's answer without separators.

    Both engines return the same tokens' logprobs. Raises :class:`GateFailed` if logprobs are not finite.
    """
    reference = stock.ask(Ask(plain)).logprobs
    tokens = top(reference)
    found = other.ask(Ask(ask.tokens, logprobs_of=tokens, extra=ask.extra)).logprobs
    return checked_distance(reference, found, other.name)


def checked_distance(reference: Mapping[int, float], found: Mapping[int, float], who: str) -> Distance:
    bad = [i for i, value in found.items() if not math.isfinite(value)]
    if bad:
        raise GateFailed(f"{who}: the logprob of token {bad[0]} is {found[bad[0]]}")
    return distance(reference, found)


def require_close(found: Distance) -> None:
    if found.kl > GROSS_KL:
        raise GateFailed(
            f"the first token's distribution is {found.kl:.2f} nats from stock vLLM's, "
            f"more than {GROSS_KL:g}: a gross error"
        )
