"""``python tests/lib/bare.py MODULE [ARGUMENT ...]``: as ``python -m MODULE`` where little is installed.

Of other people's packages :data:`INSTALLED` and what they require can be imported, and no more: as on a
machine with a GPU that was set up for PyTorch, and not for this package or vLLM.
"""

import os
import runpy
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, packages_distributions, requires
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

INSTALLED = (
    "torch",
    "triton",
    "numpy",
    "click",
    "rich",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
)
OURS = {"vllm_hypic", "benchmarks", "tests"}


def with_requirements(names: Iterable[str]) -> set[str]:
    """These distributions, and all that they need, without extras."""
    found: set[str] = set()
    ahead = list(names)
    while ahead:
        name = canonicalize_name(ahead.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needed = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue  # of another system
        ahead += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def hidden() -> list[str]:
    """Packages, by the names that are imported, which are not to be there."""
    there = with_requirements(INSTALLED)
    owners = packages_distributions().items()
    return [name for name, of in owners if name not in OURS and there.isdisjoint(map(canonicalize_name, of))]


def hide() -> None:
    """Neither their modules nor their plugins are found by this process from now on."""
    sys.modules.update(dict.fromkeys(hidden()))
    there, discover = with_requirements(INSTALLED), Distribution.discover

    def discover_less(**given: Any) -> Iterator[Distribution]:
        return (one for one in discover(**given) if canonicalize_name(one.metadata["Name"]) in there)

    Distribution.discover = staticmethod(discover_less)  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    hide()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
