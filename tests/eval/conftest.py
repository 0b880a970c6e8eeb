"""What several tests of the evaluation need."""

import pytest

from vllm_hypic.demo import EXAMPLE
from vllm_hypic.eval.tasks.demo import Generator, find_generator


@pytest.fixture(scope="session")
def generator() -> Generator:
    found = find_generator(EXAMPLE / "model")
    assert found is not None
    return found
