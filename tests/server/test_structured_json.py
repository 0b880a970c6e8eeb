"""JSON answers: grammars are compiled for a vocabulary that the separators have enlarged.

What the model answers is noise; that it obeys the grammar is the point.
"""

from __future__ import annotations

import json
import re

import httpx

from vllm_hypic.harness.serving import Server

SEP = "<|hypic_sep|>"
DOCUMENT = "The Seine is a river in France, and it flows through the city of Paris. "
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "rivers": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "rivers"],
    "additionalProperties": False,
}


def complete(server: Server, **body: object) -> str:
    prompt = SEP.join(["Answer in JSON. ", DOCUMENT, DOCUMENT.upper(), "Which city?"])
    defaults = {"prompt": prompt, "max_tokens": 64, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json={**defaults, **body}, timeout=120)
    return response.raise_for_status().json()["choices"][0]["text"]


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"city", "rivers"}
    assert value["city"] in ("Paris", "Rome") and 0 <= value["rivers"] <= 9


def test_json_schema(byte_server):
    for _ in range(2):  # cold, warm
        check(complete(byte_server, structured_outputs={"json": SCHEMA}))


def test_json_schema_in_chat(byte_server):
    schema = {"name": "answer", "schema": SCHEMA}
    body = {
        "messages": [{"role": "user", "content": SEP.join(["", DOCUMENT, "Which city?"])}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "max_tokens": 64,
    }
    response = httpx.post(f"{byte_server.url}/v1/chat/completions", json=body, timeout=120)
    check(response.raise_for_status().json()["choices"][0]["message"]["content"])


def test_regex_and_choice(byte_server):
    assert re.fullmatch(
        r"[A-Z]{3}-\d{2}", complete(byte_server, structured_outputs={"regex": r"[A-Z]{3}-\d{2}"})
    )
    assert complete(byte_server, structured_outputs={"choice": ["Paris", "Rome"]}) in ("Paris", "Rome")
