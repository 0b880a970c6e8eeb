"""Error bodies in the shape that vLLM's own routes answer with."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    return {
        "error": {"message": message, "type": HTTPStatus(status).phrase, "param": param, "code": status},
    }
