"""OpenAI's client: documents in a message, blank lines between them.

vllm serve MODEL --attention-backend hypic --additional-config '{"hypic": {"segment": {"mode": "text"}}}'
pip install openai
python examples/frameworks/openai_client.py http://127.0.0.1:8000
"""

import sys

from offices import model_of, show
from openai import OpenAI


def ask(url, documents, question):
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=model_of(url),
        messages=[
            {"role": "system", "content": "You answer from documents."},
            {"role": "user", "content": "\n\n".join([*documents, question])},
        ],
        temperature=0,
        max_tokens=32,
    )
    return answer.choices[0].message.content


if __name__ == "__main__":
    show(sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000", ask)
