"""Run as a program: logprobs of flash-linear-attention's own model on a CPU, in Triton's interpreter.

    python fla_forward.py PACKAGE_FOLDER CHECKPOINT TOKENS OUT

Only up to 64 tokens: there its layers run their recurrent kernels, of which the interpreter knows all
operations.  The logprobs `[n, vocab]` of the tokens `10 ... 9 + n` are saved to `OUT`.
"""

import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner


class _Driver:
    """In place of a GPU's: Triton has none for CPUs, and its interpreter needs none."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", "none", 1)

    def get_benchmarker(self) -> Any:
        return None


def main(package: str, checkpoint: str, tokens: int, out: str) -> None:
    tuned = autotuner.Autotuner.__init__

    def of_one(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing to choose from, so nothing is measured."""
        tuned(self, fn, names, (configs or [])[:1], *args, **kwargs)

    autotuner.Autotuner.__init__ = of_one
    triton.runtime.driver.set_active(_Driver())
    sys.path.insert(0, package)
    import fla  # noqa: F401  makes its models known to transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.arange(10, 10 + tokens)[None]
        logits = model(ids, use_cache=False, logits_to_keep=None).logits[0]
    torch.save(logits.double().log_softmax(-1), out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
