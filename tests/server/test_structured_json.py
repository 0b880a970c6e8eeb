"""JSON answers: grammars are compiled for a vocabulary that the separators have enlarged.

What the model answers is noise; that it obeys the grammar is the point.
"""

import json
import re

from vllm_hypic.harness.serving import Server

from .conftest import answered

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
    asked = {"prompt": prompt, "max_tokens": 64, "temperature": 0, **body}
    return answered(server, "/v1/completions", asked)["choices"][0]["text"]


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"city", "rivers"}
    assert value["city"] in ("Paris", "Rome") and 0 <= value["rivers"] <= 9


def test_json_schema(byte_server):
    for _ in range(2):  # cold, warm
        check(complete(byte_server, structured_outputs={"json": SCHEMA}))
    schema = {"name": "answer", "schema": SCHEMA}
    body = {
        "messages": [{"role": "user", "content": SEP.join(["", DOCUMENT, "Which city?"])}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "max_tokens": 64,
    }
    check(answered(byte_server, "/v1/chat/completions", body)["choices"][0]["message"]["content"])


def test_regex_and_choice(byte_server):
    code = r"[A-Z]{3}-\d{2}"
    assert re.fullmatch(code, complete(byte_server, structured_outputs={"regex": code}))
    assert complete(byte_server, structured_outputs={"choice": ["Paris", "Rome"]}) in ("Paris", "Rome")
