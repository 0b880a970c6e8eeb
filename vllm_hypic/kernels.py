"""``python -m vllm_hypic.kernels``: which kernels a process on this machine uses.

Exits with 1 and the reason where ``HYPIC_ISA`` asks for some that it cannot use.
"""

from .backends.ops import native
from .config import ConfigError

if __name__ == "__main__":
    try:
        print(native.describe())
    except ConfigError as e:
        raise SystemExit(str(e)) from None
