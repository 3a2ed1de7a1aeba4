"""What the tests of this folder need, said when it is not there."""

import pytest
import torch

NEEDED = {"gpu": 1, "multi_gpu": 2}
"""CUDA GPUs by marker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for marker, needed in NEEDED.items():
            if item.get_closest_marker(marker) and there < needed:
                reason = f"needs {needed} CUDA GPUs, {there} are visible"
                item.add_marker(pytest.mark.skip(reason=reason))
