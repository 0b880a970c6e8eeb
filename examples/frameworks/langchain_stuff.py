"""LangChain: create_stuff_documents_chain with the default prompt of its retrieval chains.

vllm serve MODEL --attention-backend hypic --additional-config '{"hypic": {"segment": {"mode": "text"}}}'
pip install langchain-classic langchain-openai
python examples/frameworks/langchain_stuff.py http://127.0.0.1:8000
"""

import sys

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.retrieval_qa.prompt import PROMPT
from langchain_core.documents import Document
from langchain_openai import ChatOpenAI
from offices import model_of, show


def ask(url, documents, question, **options):
    llm = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model_of(url), temperature=0, max_tokens=32)
    chain = create_stuff_documents_chain(llm, PROMPT, **options)
    context = [Document(page_content=text) for text in documents]
    return chain.invoke({"context": context, "question": question})


if __name__ == "__main__":
    show(sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000", ask)
