"""LlamaIndex: the response synthesizer of query engines, with its default prompt and OpenAILike.

vllm serve MODEL --attention-backend hypic --additional-config '{"hypic": {"segment": {"mode": "text"}}}'
pip install llama-index-core llama-index-llms-openai-like
python examples/frameworks/llama_index_query.py http://127.0.0.1:8000
"""

import sys

from llama_index.core import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike
from offices import model_of, show


def ask(url, documents, question, chat=True):
    llm = OpenAILike(
        api_base=f"{url}/v1",
        api_key="none",
        model=model_of(url),
        is_chat_model=chat,
        context_window=8192,
        max_tokens=32,
        temperature=0,
    )
    nodes = [TextNode(text=text, metadata={"office": text.split()[1]}) for text in documents]
    nodes = [NodeWithScore(node=node) for node in nodes]
    return str(get_response_synthesizer(llm=llm).synthesize(question, nodes=nodes))


if __name__ == "__main__":
    show(sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000", ask)
