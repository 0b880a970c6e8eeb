"""An agent with 30 tools and OpenAI's client: one tool more, less or elsewhere leaves the others cached.

vllm serve MODEL --attention-backend hypic --enable-auto-tool-choice --tool-call-parser hermes \
    --additional-config '{"hypic": {"seam_tokens": 4, "segment": {"mode": "text"}}}'
pip install openai
python examples/frameworks/agent_tools.py http://127.0.0.1:8000

A model in ChatML whose chat template knows no tools: --chat-template examples/frameworks/tools.jinja.
"""

import json
import random
import sys

from offices import CITIES, NAMES, model_of, reused_tokens
from openai import OpenAI

SYSTEM = "You manage offices. Call tools until you can answer."
TASK = "Book a room for six people in Paris, then tell me its number."


def tool(name):
    """A tool with a schema of about 200 tokens."""
    rng = random.Random(name)
    fields = rng.sample(
        ("floor", "desk", "dock", "gate", "badge", "hours", "people", "weeks", "extension"), 2
    )
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name.replace('_', ' ')} in an office. {rng.choice(NAMES)} is told of it. "
            f"Ask before you call it for {rng.choice(CITIES)}, at most {rng.randrange(2, 10)} times a day.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": list(CITIES)},
                    **{
                        field: {
                            "type": "integer",
                            "minimum": 1,
                            "maximum": rng.randrange(100, 1000),
                            "description": f"The {field}, as {rng.choice(NAMES)} counts them.",
                        }
                        for field in fields
                    },
                },
                "required": ["city", *fields],
            },
        },
    }


WHAT = ("room", "desk", "parcel", "badge", "alarm", "library", "canteen", "archive", "garage", "bicycle")
TOOLS = [tool(f"{verb}_{what}") for verb in ("book", "cancel", "report") for what in WHAT]


START = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]


def agent(url, tools, messages=START, **options):
    """A loop until the model calls no tool, at most four times; returns all messages."""
    client, model = OpenAI(base_url=f"{url}/v1", api_key="none"), model_of(url)
    messages = list(messages)
    for _ in range(4):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=tools, temperature=0, max_tokens=64, **options
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = json.dumps({"done": call.function.name})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return messages


def main(url="http://127.0.0.1:8000"):
    swapped = [tool("water_plants"), *TOOLS[1:]]
    moved = [*TOOLS[1:], TOOLS[0]]
    for name, tools in (
        ("cold", TOOLS),
        ("one swapped", swapped),
        ("one removed", TOOLS[1:]),
        ("moved", moved),
    ):
        before = reused_tokens(url)
        agent(url, tools)
        print(f"{name}: reused tokens: {reused_tokens(url) - before}")


if __name__ == "__main__":
    main(*sys.argv[1:])
