"""Which tests `make test` leaves out, since nothing that they depend on has changed since they last passed.

``tests/unchanged.json`` holds a digest for each group of :data:`GROUPS`: of the files that its tests depend
on, when `make test ALL=1` passed last.  Where the files are still the same, the group's tests are slow.
`make test ALL=1`, `make test-slow` and CI on its days (CONTRIBUTING) run every group.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASSED = ROOT / "tests" / "unchanged.json"
RUN_ALL = "HYPIC_TEST_ALL"
"""Environment variable: ``1`` runs every group."""


@dataclass(frozen=True)
class Group:
    """Folders and files of tests, and the files and folders that decide what the tests find."""

    tests: tuple[str, ...]
    depends: tuple[str, ...]

    def files(self, root: Path = ROOT) -> Iterator[Path]:
        for name in (*self.tests, *self.depends, "setup.py", "tests/engine/preloaded.py", "tests/lib"):
            path = root / name
            yield from sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def digest(self, root: Path = ROOT) -> str:
        found = hashlib.sha256()
        for path in self.files(root):
            # This file decides which tests run, and nothing that a test finds.
            if path.suffix not in (".pyc", ".so") and path.name != Path(__file__).name:
                found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
        return found.hexdigest()


def _rooms(names: str) -> tuple[str, ...]:
    return tuple(f"vllm_hypic/{name}" for name in names.split())


GROUPS = {
    "instruction sets": Group(
        ("tests/unit/backends/test_instruction_sets.py",),
        ("csrc", "vllm_hypic/backends/ops", "tests/unit/backends", "tests/unit/linear"),
    ),
    "compiled engines": Group(
        ("tests/engine/test_compiled.py",),
        (
            *(f"tests/engine/{name}.py" for name in ("conftest", "engines", "tiny_models")),
            "tests/engine/test_oracle_agreement.py",
            *_rooms("backends config connector engine models patches pool primitives"),
        ),
    ),
    "several API servers": Group(
        ("tests/server/api/test_several_api_servers.py",),
        (
            *(f"tests/server/api/{name}.py" for name in ("conftest", "test_segments", "test_structure")),
            *_rooms("cache_api config connector engine patches primitives"),
        ),
    ),
    "LMCache": Group(
        ("tests/unit/store/test_lmcache_tier.py",),
        (
            *(
                f"tests/unit/store/{name}.py"
                for name in ("awkward_tiers", "conftest", "stores", "tier_contract")
            ),
            *("tests/unit/store/remote_contract.py", "benchmarks/services.py"),
            *_rooms("config errors.py primitives store"),
        ),
    ),
    "segment parallelism": Group(
        ("tests/cluster/segment_parallel",),
        (
            *("benchmarks/lib", "benchmarks/services.py", "csrc", "examples/demo"),
            "tests/server/api/conftest.py",
            *_rooms("backends cache_api config connector engine errors.py models patches pool primitives"),
            *_rooms("segment_parallel store"),
        ),
    ),
    "oracles": Group(("tests/unit/oracle",), ("benchmarks/lib", "examples/models", "vllm_hypic/primitives")),
    "triton": Group(
        ("tests/cuda/triton",),
        ("benchmarks/kernel_specs", "vllm_hypic/backends/ops", "tests/unit/backends", "tests/unit/linear"),
    ),
    "copies": Group(
        ("tests/cuda/moving",),
        _rooms("backends config connector errors.py pool primitives segment_parallel store"),
    ),
    "cuda": Group(
        ("tests/cuda",),
        (
            *("tests/engine/engines.py", "tests/engine/test_audio.py", "tests/engine/test_images.py"),
            *("tests/engine/tiny_audio.py", "tests/engine/tiny_vision.py"),
            *("benchmarks/kernel_specs", "tests/unit/backends", "tests/unit/linear"),
            *_rooms("backends engine models patches pool"),
        ),
    ),
    "benchmarks": Group(("tests/tools/benchmarks",), ("benchmarks", *_rooms("eval harness store tune"))),
    "evaluation": Group(
        (
            *(f"tests/unit/{name}" for name in ("eval", "harness", "suggest", "tune")),
            "tests/server/integrations/test_suggest.py",
        ),
        (
            *("benchmarks/answers", "benchmarks/engine_calls.py", "benchmarks/lib"),
            *_rooms("eval harness primitives suggest tune"),
        ),
    ),
}


def group_of(nodeid: str) -> str | None:
    """The group that a test belongs to."""
    for name, group in GROUPS.items():
        if nodeid.startswith(tuple(f"{path}{end}" for path in group.tests for end in ("/", "::"))):
            return name
    return None


def left_out() -> set[str]:
    """Names of the groups that `make test` leaves out now."""
    if os.environ.get(RUN_ALL) == "1" or not PASSED.exists():
        return set()
    passed = json.loads(PASSED.read_text())
    return {name for name, group in GROUPS.items() if passed.get(name) == group.digest()}


def write() -> None:
    """Keep the digests: every group has passed."""
    PASSED.write_text(json.dumps({name: group.digest() for name, group in GROUPS.items()}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        write()
    else:
        print(" ".join(sorted(left_out())))
