"""Lets a torchvision of another build than torch's import, which vLLM's vision models need.

`launch/setup.sh` copies this into the environment's site-packages, where a `.pth` file imports it in
every process. torchvision's CUDA build does not load its operators beside a CPU torch, and fails when
it registers their fake kernels. Image processing uses none of them, so they are declared, without
an implementation, just before torchvision is imported for the first time.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Finder:
    """Finds nothing itself; takes its chance when torchvision is looked for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec(name)
            if spec is not None and spec.origin is not None:
                declare_operators(Path(spec.origin).parent)
        return None


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
