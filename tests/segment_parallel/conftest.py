"""A receiver, and two peers that speak frames to it."""

from __future__ import annotations

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
def other(owner: Owner) -> Iterator[Peer]:
    with Peer(owner.url) as peer:
        yield peer
