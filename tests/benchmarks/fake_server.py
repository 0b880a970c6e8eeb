"""A small completion server on a real socket: whatever a test wants a server to do."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Self

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from http_server import HttpServer

SEPARATOR = 499
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}


class Fake:
    """Keeps what arrived, and when.

    A request's own fields say how it is answered (``status``, ``waits``, ``raw``, ``usage``, ``done``); for
    requests that have none, ``wait_s`` and ``fails_from`` (the number of the first streamed request that gets
    HTTP 500) do.
    """

    def __init__(self, *, wait_s: float = 0.0, fails_from: int | None = None, steady: bool = True) -> None:
        self.wait_s, self.fails_from, self.steady = wait_s, fails_from, steady
        self.arrived: list[tuple[float, dict[str, Any], str | None]] = []
        self.working = self.most_working = self.broken_off = 0
        app = FastAPI()
        app.post("/v1/completions")(self.completions)
        app.post("/tokenize")(self.tokenize)
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
        streamed = sum(bool(b.get("stream")) for _, b, _ in self.arrived)
        fails = self.fails_from is not None and streamed > self.fails_from
        if status := body.get("status", 500 if fails else None):
            return JSONResponse({"error": {"message": "not today"}}, status)
        if "logprobs" in body:
            value = -0.5 if self.steady else -0.5 - len(self.arrived)
            top = [{"b": -2.0, "a": value}]
            logprobs = {"tokens": ["a"], "token_logprobs": [value], "top_logprobs": top}
            return {"choices": [{"logprobs": logprobs}], "usage": _usage(body)}
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def tokenize(self, request: Request) -> Any:
        text = (await request.json())["prompt"]
        return {"tokens": [SEPARATOR] if text == "<|hypic_sep|>" else [1, 2]}

    async def events(self, body: dict[str, Any]) -> Any:
        self.working += 1
        self.most_working = max(self.most_working, self.working)
        try:
            for i, wait in enumerate(body.get("waits", [self.wait_s])):
                await asyncio.sleep(wait)
                yield _event({"choices": [{"text": "" if i == 0 else "w\u2028"}]})
            if "raw" in body:
                yield body["raw"]
            if body.get("usage", True):
                yield _event({"choices": [], "usage": _usage(body)})
            if body.get("done", True):
                yield "data: [DONE]\n\n"
        except BaseException:  # cancelled: the client has gone
            self.broken_off += 1
            raise
        finally:
            self.working -= 1


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    return USAGE | {"prompt_tokens": len(body.get("prompt", range(USAGE["prompt_tokens"])))}


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
