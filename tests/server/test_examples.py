"""Every example runs and gives the right answer; so does ``LLM`` where text is literal."""

import json
from pathlib import Path

import pytest

from examples.demo.single import make_tasks

from .conftest import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *arguments: str) -> list[str]:
    return [line for line in run_script(EXAMPLES / example, *arguments) if "answer:" in line]


def right(line: str) -> bool:
    answer, expected = line.split("answer:")[1].split("(expected: ")
    return answer.split() == expected.split(")")[0].split()


@pytest.mark.engine
@pytest.mark.parametrize(("example", "answers"), [("offline.py", 3), ("chat.py", 2), ("async_llm.py", 2)])
@pytest.mark.fast("offline.py-3")
def test_example(example, answers):
    lines = run(example)
    assert len(lines) == answers and all(map(right, lines)), lines
    if example != "async_llm.py":
        assert lines[0].endswith("reused tokens: 0")
        assert all(line.endswith("reused tokens: 896") for line in lines[1:])


def test_client(server):
    lines = run("client.py", server.url)
    assert len(lines) == 5 and all(map(right, lines)), lines
    reused = [int(line.rsplit(" ", 1)[1]) for line in lines]
    assert reused == [896, 896, 0, 0, 0]


LITERAL = """
import json

from vllm import LLM, SamplingParams

from examples.demo.single import make_tasks
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.primitives.builder import build_messages, build_prompt

if __name__ == "__main__":
    llm = LLM(
        str(EXAMPLE / "model"), attention_backend="hypic", enforce_eager=True, max_model_len=2048,
        kv_cache_memory_bytes=2**27, additional_config={"hypic": {"token_texts": {"literal": True}}},
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
    script.write_text(LITERAL)
    [*cut, uncut] = json.loads(run_script(script)[-1])
    [task] = make_tasks(5, 1, 4, 96)
    # 96 tokens and what the document says at its end, without 8 on either side.
    assert cut[0] == [task.answer, 0] and cut[1:] == [[task.answer, 4 * 81]] * 3
    assert uncut[1] == 0
