"""What ``load`` asks of a server besides the requests that it times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


class ClientError(RuntimeError):
    """The server's answer cannot be used; the message says what was asked and what came."""


@dataclass(frozen=True)
class Complete:
    """A whole answer with log-probabilities, to compare answers bit by bit."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[str, float], ...], ...]
    prompt_tokens: int
    cached_tokens: int


class Client:
    """A client of one server; ``url`` is the server's root or its ``/v1``."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key, self.timeout_s = api_key, timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def model(self) -> str:
        """Name of the first model that the server lists; :class:`ClientError` when it lists none."""
        answer = self._json("GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as e:
            raise ClientError(f"{self.url}/v1/models lists no model: {answer}") from e

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, special tokens around it left out; vLLM's ``/tokenize``."""
        return list(self._json("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])

    def metrics(self) -> dict[str, float] | None:
        """The samples of ``/metrics`` by name, summed over labels; ``None`` where there are none."""
        try:
            response = httpx.get(f"{self.url}/metrics", timeout=30)
        except httpx.HTTPError:
            return None
        if response.is_error:
            return None
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def idle(self, timeout_s: float = 60.0) -> None:
        """Wait until a vLLM server has no request left, at least a moment with others.

        :class:`ClientError` when it still has after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            time.sleep(0.3)  # what ends now is counted a moment later
            left = working(self.metrics() or {})
            if not left:
                return
            if time.monotonic() > deadline:
                raise ClientError(f"{self.url}: {left:.0f} requests are left after {timeout_s:g} s")

    def prompt_tokens(self, body: Mapping[str, Any]) -> int:
        """Send ``body`` and return how many tokens the server counted in its prompt."""
        try:
            return int(self._json("POST", "/v1/completions", dict(body))["usage"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError) as e:
            raise ClientError(f"{self.url}: the answer does not count its prompt's tokens") from e

    def complete(self, body: Mapping[str, Any]) -> Complete:
        """The whole answer to ``body``, which must ask for ``logprobs``; :class:`ClientError` else."""
        answer = self._json("POST", "/v1/completions", dict(body))
        try:
            [choice] = answer["choices"]
            found = choice["logprobs"]
            usage = answer["usage"]
            return Complete(
                tuple(found["tokens"]),
                tuple(found["token_logprobs"]),
                tuple(tuple(sorted(top.items())) for top in found["top_logprobs"]),
                int(usage["prompt_tokens"]),
                int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise ClientError(f"{self.url}: no log-probabilities in the answer: {str(answer)[:300]}") from e

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        try:
            response = httpx.request(
                method, self.url + path, json=body, headers=self._headers, timeout=self.timeout_s
            )
        except httpx.TimeoutException as e:
            raise ClientError(f"{self.url}{path}: no answer after {self.timeout_s:g} s") from e
        except httpx.HTTPError as e:
            raise ClientError(f"{self.url}{path}: {type(e).__name__}: {e}") from e
        if response.is_error:
            raise ClientError(f"{self.url}{path}: HTTP {response.status_code}: {response.text[:300]}")
        try:
            return response.json()
        except ValueError as e:
            raise ClientError(f"{self.url}{path}: no JSON: {response.text[:300]}") from e


def working(metrics: Mapping[str, float]) -> float:
    """How many requests a vLLM server has, by its metrics."""
    return sum(metrics.get(f"vllm:num_requests_{state}", 0.0) for state in ("running", "waiting"))
