"""A small completion server on a real socket: whatever a test wants a server to do."""

import asyncio
import json
import time
from typing import Any, Self

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from lib.http_server import HttpServer

SEPARATOR = 499


class Fake:
    """Keeps what arrived, and when.

    ``wait_s``: time to the first token; ``fails_from``: requests that are answered before all others get HTTP
    500; ``steady``: the same prompt has the same logprobs; ``short``: tokens that each answer lacks.
    """

    def __init__(
        self, *, wait_s: float = 0.0, fails_from: int | None = None, steady: bool = True, short: int = 0
    ) -> None:
        self.wait_s, self.fails_from, self.steady, self.short = wait_s, fails_from, steady, short
        self.arrived: list[tuple[float, dict[str, Any], str | None]] = []
        self.working = self.most_working = self.broken_off = self.first_tokens = 0
        self.slow_down_after: int | None = None
        """Streamed requests that are answered before all others wait for a minute."""
        app = FastAPI()
        app.post("/v1/completions")(self.completions)
        app.post("/tokenize")(self.tokenize)
        app.get("/metrics")(self.metrics)
        app.get("/v1/models")(lambda: {"data": [{"id": "fake"}]})
        self._app = app

    @property
    def streamed(self) -> list[dict[str, Any]]:
        """Bodies of the requests that asked for a stream."""
        return [body for _, body, _ in self.arrived if body.get("stream")]

    def __enter__(self) -> Self:
        self._server = HttpServer(self._app, log_level="error")
        self.port, self.url = self._server.port, self._server.url
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop()

    async def completions(self, request: Request) -> Any:
        body = await request.json()
        self.arrived.append((time.perf_counter(), body, request.headers.get("authorization")))
        if self.fails_from is not None and len(self.arrived) > self.fails_from:
            return JSONResponse({"error": {"message": "not today"}}, 500)
        if body.get("stream"):
            return StreamingResponse(self.events(body), media_type="text/event-stream")
        value = -0.5 if self.steady else -0.5 - len(self.arrived)
        top = [{"b": -2.0, "a": value}]
        logprobs = {"tokens": ["a"], "token_logprobs": [value], "top_logprobs": top}
        choice = {"logprobs": logprobs} if "logprobs" in body else {"text": "a"}
        return {"choices": [choice], "usage": _usage(body)}

    async def metrics(self) -> PlainTextResponse:
        counts = {
            "vllm:time_to_first_token_seconds_count": self.first_tokens,
            "vllm:prompt_tokens_cached_total": 5 * self.first_tokens,
            "vllm:num_requests_running": self.working,
        }
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in counts.items()))

    async def tokenize(self, request: Request) -> Any:
        text = (await request.json())["prompt"]
        return {"tokens": [SEPARATOR] if text == "<|hypic_sep|>" else [1, 2]}

    async def events(self, body: dict[str, Any]) -> Any:
        self.working += 1
        self.most_working = max(self.most_working, self.working)
        try:
            slow = self.slow_down_after is not None and len(self.streamed) > self.slow_down_after
            await asyncio.sleep(60.0 if slow else self.wait_s)
            self.first_tokens += 1
            for i in range(body["max_tokens"] - self.short):
                await asyncio.sleep(0.01)  # an event a read
                yield _event({"choices": [{"text": "" if i == 0 else "w\u2028"}]})
            yield _event({"choices": [], "usage": _usage(body, self.short)})
            yield "data: [DONE]\n\n"
        except BaseException:  # cancelled: the client has gone
            self.broken_off += 1
            raise
        finally:
            self.working -= 1


def _usage(body: dict[str, Any], short: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": body["max_tokens"] - short,
        "prompt_tokens_details": {"cached_tokens": 5},
    }


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
