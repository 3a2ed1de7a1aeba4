"""Lets a torchvision of another build than torch's import, which vLLM's vision models need.

`launch/setup.sh` copies this into the environment's site-packages, where a `.pth` file imports it in
every process. torchvision's CUDA build does not load its operators beside a CPU torch, and fails when
it registers their fake kernels. Image processing uses none of them, so they are declared, without
an implementation, just before torchvision is imported for the first time.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Finder:
    """Finds torchvision as usual, and has it loaded by `_Loader`; looking for it loads nothing."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            spec.loader = _Loader(spec.loader, Path(spec.origin).parent)
        return spec


class _Loader(Loader):
    """Torchvision's own, once operators are declared."""

    def __init__(self, loader: Loader, folder: Path) -> None:
        self._loader = loader
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        declare_operators(self._folder)
        self._loader.exec_module(module)


def declare_operators(folder: Path) -> None:
    """Where the operators in torchvision's `folder` do not load, whatever the reason."""
    import torch

    try:
        for library in folder.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except (ImportError, OSError):
        pass
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", SCHEMA)


sys.meta_path.insert(0, _Finder())
