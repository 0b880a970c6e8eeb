"""Import hook: let torchvision, torchaudio and torchcodec be imported beside a CPU build of torch.

PyPI carries their CUDA builds only. Beside a CPU torch their operator libraries do not load and the import
fails, although no text model ever calls those operators. vLLM imports all three, mostly through transformers.

`prepare_env.py` copies this file into an environment that needs it and names it in a `.pth` file. It runs at
every interpreter start, and therefore imports nothing but `sys` until one of the packages is imported.
"""

import sys


def torchvision(run, module):
    """Raises "operator torchvision::nms does not exist" from its shape functions: define the schemas."""
    import torch

    global _torchvision_library  # the definitions live as long as this object
    _torchvision_library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        _torchvision_library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    run(module)


def torchaudio(run, module):
    """Raises OSError for its extension: let it find none, which is a mode of its own (pure Python)."""
    run(module)
    module._load_lib = lambda library: False


def torchcodec(run, module):
    """Raises OSError for its libraries: callers go on without it after an ImportError, and only then."""
    try:
        run(module)
    except OSError as error:
        raise ImportError(f"torchcodec does not load beside this torch: {error}") from error


# The module whose loading each mend wraps.
CAUGHT = {
    "torchvision": torchvision,
    "torchaudio._extension.utils": torchaudio,
    "torchcodec": torchcodec,
}


class MendingFinder:
    """Wraps the loaders of the caught modules: finding a module runs no mend, loading it does."""

    def __init__(self, packages):
        self.mends = {name: mend for name, mend in CAUGHT.items() if mend.__name__ in packages}

    def find_spec(self, name, path=None, target=None):
        if name not in self.mends:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            mend, run = self.mends[name], spec.loader.exec_module
            spec.loader.exec_module = lambda module: mend(run, module)
        return spec


def install(*packages):
    sys.meta_path.insert(0, MendingFinder(packages))
