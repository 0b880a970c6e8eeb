"""Real router and servers whose text is literal: parts cut prompts and chats, what documents say does not."""

from collections.abc import Iterator
from typing import Any

import pytest
from api.conftest import answered
from cache_api.conftest import led, separated

from benchmarks.lib.cluster import Cluster, Setup
from benchmarks.lib.serving import Server
from examples.demo.single import make_tasks
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.primitives.tokens import PrimitiveTexts

pytestmark = [pytest.mark.engine, pytest.mark.slow]
RECEIVED = "vllm:hypic_segments_received_total"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    setup = Setup(
        EXAMPLE / "model",
        workers=1,
        cache_bytes=1 << 26,
        pool_bytes=1 << 26,
        hypic={"token_texts": {"literal": True}},
        # Prompts here are too short to gain by workers.  On a busy machine a worker may take seconds.
        router=("--min-gain", "-1", "--straggler-min-s", "60"),
        options=("--chat-template", str(EXAMPLE / "chat_template.jinja")),
    )
    with Cluster(setup) as running:
        yield running


def ask(server: Server, path: str, body: dict[str, Any], salt: str) -> dict[str, Any]:
    return answered(server, f"/v1/{path}", {"temperature": 0, "max_tokens": 8, "cache_salt": salt, **body})


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_parts_have_segments_computed_by_workers(cluster: Cluster, path: str) -> None:
    [combine] = cluster.combines
    [task] = make_tasks(23, 1, 4, 128)
    # Two of its documents say what cuts other servers' prompts.
    documents = [f"{d} {PrimitiveTexts().sep}" for d in task.documents[:2]] + list(task.documents[2:])
    if path == "completions":
        body = {"prompt": separated(f"<bos> <sys> {task.system}", *documents, task.question)}
    else:
        user = {"role": "user", "content": led(*documents, task.question)}
        body = {"messages": [{"role": "system", "content": task.system}, user]}
    alone = ask(combine, path, body, f"alone {len(path)}")
    for attempt in range(10):
        # The router does not use a worker that it has not heard of for 2 s, as on a busy machine.
        cluster.router.ready(len(cluster.instances))
        before = combine.metrics().get(RECEIVED, 0)
        routed = ask(cluster.router, path, body, f"routed {len(path)} {attempt}")
        assert routed["choices"] == alone["choices"]
        if (received := combine.metrics().get(RECEIVED, 0) - before) >= len(documents):
            break
    assert received >= len(documents), "they came from the worker"
    assert routed["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


def test_text_alone_cuts_nothing(cluster: Cluster) -> None:
    [combine] = cluster.combines
    [task] = make_tasks(24, 1, 4, 128)
    body = {"prompt": PrimitiveTexts().sep.join([task.system, *task.documents, task.question])}
    before = combine.metrics().get(RECEIVED, 0)
    routed, alone = (ask(server, "completions", body, "text") for server in (cluster.router, combine))
    assert routed["choices"] == alone["choices"] and combine.metrics().get(RECEIVED, 0) == before
