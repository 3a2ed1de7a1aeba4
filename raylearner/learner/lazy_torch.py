"""`torch`, imported at its first use.

Configuration sections are defined beside their formulas, and a configuration loads without torch.
Modules that a section's module imports take `torch` from here.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _LazyTorch:
        def __getattr__(self, name: str) -> Any:
            import torch as module

            value = getattr(module, name)
            setattr(self, name, value)
            return value

    torch = _LazyTorch()
    Tensor = Any  # annotations are evaluated where functions and dataclasses are defined

__all__ = ["Tensor", "torch"]
