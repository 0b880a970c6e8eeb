"""Error bodies in the shape that vLLM's own routes answer with."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from vllm.entrypoints.serve.exception_handling.utils import sanitize_message


def error_body(status: int, message: str) -> dict[str, Any]:
    """``message`` loses the paths of files, as vLLM's own do."""
    phrase = HTTPStatus(status).phrase
    return {"error": {"message": sanitize_message(message), "type": phrase, "param": None, "code": status}}
