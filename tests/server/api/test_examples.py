"""Every example runs and gives the right answer; so do ``LLM`` where text is literal, and the demo.

A server ends with the program that started it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.client import Answer
from examples.demo import single

from .conftest import ENV, run_script

ROOT = Path(__file__).parents[3]


def run(example: str, *arguments: str) -> list[str]:
    return [line for line in run_script(ROOT / "examples" / example, *arguments) if "answer:" in line]


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
    assert [int(line.rsplit(" ", 1)[1]) for line in lines] == [896, 896, 0, 0, 0]


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
    [task] = single.make_tasks(5, 1, 4, 96)
    # 96 tokens and what the document says at its end, without 8 on either side.
    assert cut[0] == [task.answer, 0] and cut[1:] == [[task.answer, 4 * 81]] * 3 and uncut[1] == 0


TASK = single.Task("w1 .", ("w2", "w3", "w4"), "? =>", "val1")


def results(texts: list[str], cached: int) -> list[single.Result]:
    prompt = single.Prompt(TASK, (0, 1, 2), "chat", cut=True)
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}
    return [single.Result(prompt, Answer(text, "stop", 0.1, 0.2, usage)) for text in texts]


def test_the_verdict_can_fail_and_orders_differ():
    right, wrong = [" val1"] * 3, [" val1", "val2", ""]
    stock, cold, warm = results(right, 0), results(right, 0), results(right, 5)
    assert single.check(stock, cold, warm) == []
    assert "1 of 3 right" in single.check(stock, cold, results(wrong, 5))[0]
    assert "reused nothing" in single.check(stock, cold, results(right, 0))[0]
    assert "expected none" in single.check(stock, warm, warm)[0]
    assert single.check(results(["x"], 0), results(["x"], 0), results(["x"], 5))
    assert len(set(single.orders(3, 8))) == single.ORDERS
    assert single.orders(0, 1) == [(0,)] * single.ORDERS


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1300)
def test_demo():
    """The demo checks itself that its servers are gone."""
    command = [sys.executable, "-m", "examples.demo", "--tasks", "3", "--documents", "4"]
    env = {**os.environ, **ENV}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed:" in ended.stdout
