"""``LLM`` where text is literal: prompts that the process writes itself are cut, whatever documents say."""

from __future__ import annotations

import json
import os
import sys

import pytest
from lib import forked
from one_process import ONE_PROCESS

from vllm_hypic.demo.single import make_tasks

from .conftest import ENV

SCRIPT = """
import json

from vllm import LLM, SamplingParams

from vllm_hypic.demo.single import make_tasks
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.primitives.builder import build_messages, build_prompt

if __name__ == "__main__":
    llm = LLM(
        str(EXAMPLE / "model"), attention_backend="hypic", enforce_eager=True, max_model_len=2048,
        kv_cache_memory_bytes=2**27, additional_config={"hypic": {"tokens": {"literal": True}}},
    )
    [task] = make_tasks(5, 1, 4, 96)
    params, texts = SamplingParams(temperature=0, max_tokens=8), llm.get_tokenizer().prompt_texts
    template = (EXAMPLE / "chat_template.jinja").read_text()
    system, found = f"<bos> <sys> {task.system}", []
    for order in (task.documents, task.documents[::-1]):
        said = [f"{document} <|hypic_sep|>" for document in order]
        prompt = build_prompt(system=system, segments=said, query=task.question, texts=texts)
        found += llm.generate(prompt, params, use_tqdm=False)
        messages = build_messages(system=task.system, documents=said, question=task.question, texts=texts)
        found += llm.chat(messages, params, chat_template=template, use_tqdm=False)
    assert all("<|hypic_sep|>" in o.prompt and "hypic_tokens" not in o.prompt for o in found)
    plain = "<|hypic_sep|>".join([system, *task.documents, task.question])
    found += llm.generate(plain, params, use_tqdm=False)
    print(json.dumps([[output.outputs[0].text.strip(), output.num_cached_tokens] for output in found]))
"""


@pytest.mark.slow
@pytest.mark.engine
def test_the_tokenizers_own_texts_cut_and_others_do_not(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = forked.run(
        [sys.executable, str(script)],
        env={**os.environ, **ENV, **ONE_PROCESS},
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    [*cut, uncut] = json.loads(ended.stdout.splitlines()[-1])
    [task] = make_tasks(5, 1, 4, 96)
    # 96 tokens and what the document says at its end, without 8 on either side.
    assert cut[0] == [task.answer, 0] and cut[1:] == [[task.answer, 4 * 81]] * 3
    assert uncut[1] == 0
