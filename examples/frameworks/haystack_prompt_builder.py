"""Haystack: a PromptBuilder with the template of its documentation, and OpenAIChatGenerator.

vllm serve MODEL --attention-backend hypic --additional-config '{"hypic": {"segment": {"mode": "text"}}}'
pip install haystack-ai
python examples/frameworks/haystack_prompt_builder.py http://127.0.0.1:8000
"""

import sys

from haystack import Document, Pipeline
from haystack.components.builders import PromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.utils import Secret
from offices import model_of, show

TEMPLATE = """
    Given these documents, answer the question.
    Documents:
    {% for doc in documents %}
        {{ doc.content }}
    {% endfor %}

    Question: {{query}}
    Answer:
    """


def ask(url, documents, question):
    llm = OpenAIChatGenerator(
        api_base_url=f"{url}/v1",
        api_key=Secret.from_token("none"),
        model=model_of(url),
        generation_kwargs={"temperature": 0, "max_tokens": 32},
    )
    pipeline = Pipeline()
    pipeline.add_component("prompt_builder", PromptBuilder(template=TEMPLATE, required_variables="*"))
    pipeline.add_component("llm", llm)
    pipeline.connect("prompt_builder", "llm")
    inputs = {"documents": [Document(content=text) for text in documents], "query": question}
    return pipeline.run({"prompt_builder": inputs})["llm"]["replies"][0].text


if __name__ == "__main__":
    show(sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000", ask)
