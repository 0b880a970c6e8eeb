"""A receiver, two peers that speak frames to it, and one that it does not know."""

from collections.abc import Iterator

import pytest

from .peers import Owner, Peer


@pytest.fixture
def owner() -> Iterator[Owner]:
    with Owner() as owner:
        yield owner


@pytest.fixture
def peer(owner: Owner) -> Iterator[Peer]:
    with Peer(owner.url) as peer:
        yield peer


@pytest.fixture
def stranger(owner: Owner) -> Iterator[Peer]:
    """One that has not greeted."""
    with Peer(owner.url, greet=False) as peer:
        yield peer


other = peer
