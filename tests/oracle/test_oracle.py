"""Every case of the oracle (verl 0.9.1, TRL 1.16.0, torchrl) against our functions."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"oracle_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


adapter = _load("adapter")
CASES: list[dict[str, Any]] = json.loads((HERE / "oracle_index.json").read_text())["cases"]


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(HERE / "oracle.npz") as archive:
        return {key: archive[key] for key in archive.files}


def _compared(case: dict[str, Any], inputs: dict[str, np.ndarray], shape: tuple[int, ...]) -> Any:
    """Where a case is to be compared: everywhere, unless its note confines it to the mask."""
    if "compare only where mask==1" in case["note"]:
        return inputs["response_mask"] > 0
    return np.ones(shape, dtype=bool)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case_matches(case: dict[str, Any], stored: dict[str, np.ndarray]) -> None:
    inputs = {name: stored[entry["key"]] for name, entry in case["inputs"].items()}
    outputs = adapter.run_case(case, inputs)
    for name, entry in case["outputs"].items():
        wanted = stored[entry["key"]]
        where = _compared(case, inputs, wanted.shape)
        np.testing.assert_allclose(
            outputs[name][where],
            wanted[where],
            rtol=case["rtol"],
            atol=case["atol"],
            err_msg=name,
        )


def test_all_cases_are_there() -> None:
    assert len({case["name"] for case in CASES}) == 142
