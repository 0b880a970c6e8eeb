"""What launches of kernels would be compiled to on an H100, recorded without a GPU; a program.

Prints, as JSON, one list per line: kernel, types of its arguments, names of those that are known to be
multiples of 16, constants, warps, stages.  Tensors lie on the CPU; nothing is compiled or run.
"""

import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vllm_hypic.backends.ops.span_attention import plan
from vllm_hypic.backends.ops.span_attention.triton import latents, operators

RECORDED: list[str] = []


class H100:
    """As much of a driver as a launch asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def record(
    self: JITFunction,
    key: str,
    signature: dict[str, str],
    device: int,
    constants: dict[tuple[int, ...], Any],
    options: Any,
    attributes: dict[tuple[int, ...], Any],
    warmup: bool,
) -> None:
    """What ``JITFunction._do_compile`` is told, added to ``RECORDED``."""
    names = self.arg_names
    types = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    aligned = sorted(names[i[0]] for i, given in attributes.items() if ["tt.divisibility", 16] in given)
    named = {names[i[0]]: value for i, value in constants.items()}
    RECORDED.append(json.dumps([self.__name__, types, aligned, named, options.num_warps, options.num_stages]))


def install() -> None:
    """From now on this process compiles and runs no kernel."""
    driver.set_active(H100())
    JITFunction._do_compile = record
    plan.many_rows = operators.many_rows = latents.many_rows = lambda size, *_: 32 if size > 256 else 128


def main() -> None:
    install()
    cpu = torch.device("cpu")
    bf16 = torch.bfloat16
    for heads, kv_heads, size, rotary, neox in (
        (64, 8, 64, 64, True),
        (64, 8, 128, 128, True),
        (64, 8, 128, 128, False),
        (16, 2, 256, 64, True),
        (16, 2, 256, 64, False),
    ):
        table = torch.zeros(16, rotary, dtype=bf16)
        cache = torch.zeros(2, kv_heads, 16, 2 * size, dtype=bf16).transpose(1, 2).split(size, dim=-1)
        operators.warm_up(heads, kv_heads, size, bf16, table, neox, cpu, cache)
        in_fp8 = [half.to(torch.float8_e4m3fn) for half in cache]
        operators.warm_up(heads, kv_heads, size, bf16, table, neox, cpu, in_fp8, torch.float8_e4m3fn)
    for neox in (True, False):
        cache = torch.zeros(2, 64, 512 + 64, dtype=bf16)
        latents.warm_up(16, 64, torch.zeros(16, 64, dtype=bf16), neox, cache)
    print(*RECORDED, sep="\n")


if __name__ == "__main__":
    main()
