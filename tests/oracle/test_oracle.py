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

DEVIATIONS = {
    "adv_grpo_nan_reward": "left out of its group",
    "agg_nan_outside_mask_seq-mean-token-mean": "masked by selection",
    "agg_all_masked_token-mean": "has loss 0",
    "trl_loss_gmpo": "a row without a trained token has no loss",
    "trl_loss_vespo_is": "weights off the mask",
}
"""The cases in which our choice differs, with a part of the reason the adapter gives."""

MAX_DEVIATIONS = 20


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
def test_case_matches_or_is_a_listed_deviation(
    case: dict[str, Any], stored: dict[str, np.ndarray]
) -> None:
    inputs = {name: stored[entry["key"]] for name, entry in case["inputs"].items()}
    if case["name"] in DEVIATIONS:
        with pytest.raises(adapter.Deviation, match=DEVIATIONS[case["name"]]):
            adapter.run_case(case, inputs)
        return
    outputs = adapter.run_case(case, inputs)
    assert outputs.keys() == case["outputs"].keys()
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


def test_all_cases_are_there_and_few_deviate() -> None:
    names = {case["name"] for case in CASES}
    assert len(names) == 148
    assert names >= DEVIATIONS.keys()
    assert len(DEVIATIONS) <= MAX_DEVIATIONS
