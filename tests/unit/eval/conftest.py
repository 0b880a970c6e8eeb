"""What several tests of the evaluation need."""

import pytest

from vllm_hypic.harness.generators import EXAMPLE, Generator, find_generator


@pytest.fixture(scope="session", params=["tiny-hybrid-qa", "hybrid-notes"])
def generator(request: pytest.FixtureRequest) -> Generator:
    """Generators of the demo models."""
    found = find_generator(EXAMPLE.parent / request.param / "model")
    assert found is not None
    return found
