"""``python -m vllm_hypic.kernels``: which kernels a process on this machine uses."""

from .backends.ops import native

if __name__ == "__main__":
    print(native.describe())
