"""The pass before the first step: it compiles for all shapes, and leaves no trace."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learners import full_state, make_groups, make_learner, step

from raylearner.config.schema import LearnerSection
from raylearner.errors import LearnerError
from raylearner.learner import warm_up as module
from raylearner.learner.warm_up import should_warm_up, warm_up

SECTION = LearnerSection.model_validate(
    {
        "compute_dtype": "float32",
        "max_tokens_per_micro_batch": 96,
        "critic": {},
        "advantage": {"kind": "gae"},
        "kl": {"coefficient": 0.1, "reference": {"kind": "frozen"}},
    }
)


def run(learner: Any) -> None:
    warm_up(learner.models, SECTION, temperature=1.0, device="cpu")


def test_a_step_after_the_pass_equals_one_without_it_bit_for_bit(tiny_folder: Path) -> None:
    states: list[Any] = []
    for is_warm in (False, True):
        learner = make_learner(tiny_folder, SECTION)
        if is_warm:
            before = torch.get_rng_state()
            run(learner)
            assert torch.equal(torch.get_rng_state(), before)
            assert all(p.grad is None for p in learner.models.policy.parameters())
        output = step(learner, make_groups(1))
        states.append((full_state(learner), output.metrics["learner/loss"]))
    (cold, cold_loss), (warm, warm_loss) = states
    assert cold_loss == warm_loss
    assert cold.keys() == warm.keys()
    for name, values in cold.items():
        assert (values == warm[name]).all(), name


def test_blocks_are_compiled_for_more_than_one_shape(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: set[tuple[int, bool]] = set()

    def compile(function: Any, **_: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            for argument in arguments:
                if isinstance(argument, torch.Tensor) and argument.ndim == 3:
                    sizes.add((argument.shape[1], torch.is_grad_enabled()))
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(torch, "compile", compile)
    learner = make_learner(tiny_folder, SECTION.model_copy(update={"compile": True}))
    sizes.clear()
    run(learner)
    num_shapes = 4 if learner.models.shares_prefixes else 2
    assert len({size for size, has_gradients in sizes if has_gradients}) == num_shapes
    assert len({size for size, has_gradients in sizes if not has_gradients}) == num_shapes
    assert max(size for size, _ in sizes) <= SECTION.max_tokens_per_micro_batch / 2


def test_no_position_is_beyond_those_of_the_model(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learned position that does not exist would end the process of a GPU."""
    models = make_learner(tiny_folder, SECTION).models
    monkeypatch.setattr(models.policy.causal_lm.config, "max_position_embeddings", 12)
    section = SECTION.model_copy(update={"max_tokens_per_micro_batch": 65_536})
    shown = list(module._tokens(models, section, device="cpu"))
    assert {int(tokens.position_ids.max()) < 12 for tokens in shown} == {True}
    assert len({len(tokens.input_ids) for tokens in shown}) == len(shown)


def test_a_model_that_does_not_compile_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch._dynamo.exc.BackendCompilerFailed(fail, RuntimeError("no ptxas"), None)

    monkeypatch.setattr(module, "_tokens", lambda *_, **__: [None])
    monkeypatch.setattr(module, "_pass", fail)
    models: Any = SimpleNamespace(discard_gradients=lambda: None)
    with pytest.raises(LearnerError, match=r"learner\.compile.*no ptxas"):
        warm_up(models, SECTION, temperature=1.0, device="cpu")


@pytest.mark.parametrize(
    ("gpus", "compiles", "expected"),
    [
        (1.0, True, True),
        (1.0, False, True),
        (0.5, True, False),  # engines measure the memory that is left
        (0.0, False, False),
        (0.0, True, True),
    ],
)
def test_a_rank_with_a_gpu_of_its_own_or_a_compiler_warms_up(
    gpus: float, compiles: bool, expected: bool
) -> None:
    section = LearnerSection.model_validate({"gpus_per_rank": gpus, "compile": compiles})
    assert should_warm_up(section) is expected
