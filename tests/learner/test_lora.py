"""LoRA: trained, pushed and saved weights, and the policy without its adapter."""

import json
from pathlib import Path
from typing import Any

import learners
import pytest
import torch
from learners import assert_same_weights, make_groups, probe_of, step, weights_of
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from raylearner.config.schema import TinyModel
from raylearner.errors import CheckpointError, ConfigError
from raylearner.learner.learner import Learner
from raylearner.tiny.model import make_tiny_model

PROBE = [[5, 6, 7, 8], [20, 21, 22]]


def make_learner(folder: Path, *, lora: dict[str, Any] | None = None, **changes: Any) -> Learner:
    options = {"compute_dtype": "float64", "learning_rate": 1e-2, "num_epochs": 2} | changes
    adapters = {"rank": 4, "alpha": 8} if lora is None else lora
    return learners.make_learner(folder, options | {"lora": adapters})


def base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def test_an_untrained_adapter_changes_nothing(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder)
    theirs = dict(base(tiny_folder).named_parameters())
    mine = weights_of(learner)
    assert [
        (name, tuple(w.shape)) for name, w in mine.items()
    ] == learner.models.policy.weight_shapes()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_steps_train_adapters_alone_and_peft_merges_them_alike(
    tiny_folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(tiny_folder)
    before = weights_of(learner)
    for seed in range(2):
        step(learner, make_groups(seed, policy_version=seed))
    after, probe = weights_of(learner), probe_of(learner, PROBE)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    linear = {n for n in after if n.endswith("_proj.weight")}
    assert changed == linear
    learner.save(tmp_path)

    adapted = PeftModel.from_pretrained(base(tiny_folder), str(tmp_path / "adapter"))
    merged = dict(adapted.merge_and_unload().named_parameters())
    for name, weight in after.items():
        torch.testing.assert_close(merged[name].double(), weight, rtol=0, atol=1e-6)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    with torch.no_grad():
        for ids, mine in zip(PROBE, probe, strict=True):
            tokens = torch.tensor([ids])
            logprobs = exported(tokens).logits[0, :-1].log_softmax(-1)
            theirs = logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
            assert theirs == pytest.approx(mine, abs=1e-5)


def test_the_reference_without_the_adapter_is_the_frozen_one(tiny_folder: Path) -> None:
    """Both give the same KL and so the same policy; neither touches what is trained."""
    found: dict[str, list[float]] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    for kind in ("adapter_off", "frozen"):
        kl = {"coefficient": 0.1, "reference": {"kind": kind}}
        learner = make_learner(tiny_folder, kl=kl)
        outputs = [step(learner, make_groups(s, policy_version=s)) for s in range(3)]
        found[kind] = [output.metrics["learner/kl"] for output in outputs]
        weights[kind] = weights_of(learner)
    assert found["adapter_off"] == pytest.approx(found["frozen"], rel=1e-9)
    assert found["adapter_off"][2] > 1e-3
    assert_same_weights(weights["adapter_off"], weights["frozen"], atol=1e-10)


def test_a_checkpoint_has_the_state_of_adapters_only(tiny_folder: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_folder)
    learner.save(tmp_path)
    size = sum(f.stat().st_size for f in (tmp_path / "learner" / "tensors").glob("*.safetensors"))
    whole = sum(weight.numel() for weight in weights_of(learner).values()) * 8
    assert size < whole  # three copies of everything would be more than that
    with pytest.raises(CheckpointError, match="lora_A"):
        make_learner(tiny_folder, lora={"rank": 8, "alpha": 8}).restore(tmp_path)


def test_an_existing_adapter_is_trained_further(tiny_folder: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_folder, lora={"rank": 4, "alpha": 8, "target_modules": ["q_proj"]})
    step(learner, make_groups(0))
    learner.save(tmp_path)
    again = make_learner(tiny_folder, lora={"path": str(tmp_path / "adapter")})
    theirs = weights_of(again)
    assert_same_weights(theirs, learner, atol=1e-6)
    step(again, make_groups(1))
    changed = {n for n, w in weights_of(again).items() if not torch.equal(w, theirs[n])}
    assert changed
    assert all(name.endswith("q_proj.weight") for name in changed)


def test_in_half_precision_only_what_is_trained_has_masters(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder, compute_dtype="bfloat16", head_dtype="compute")
    dtypes = {p.requires_grad: p.dtype for p in learner.models.policy.causal_lm.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert not step(learner, make_groups(0)).is_skipped


def test_a_small_update_of_a_half_precision_run_is_exported_whole(
    tiny_folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(tiny_folder, compute_dtype="bfloat16", learning_rate=1e-5, num_epochs=1)
    step(learner, make_groups(0))
    learner.save(tmp_path)
    start = {n: w.bfloat16().float() for n, w in base(tiny_folder).named_parameters()}
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"
    for name, weight in exported.items():
        key = "base_model.model." + name.removesuffix(".weight")
        moved = torch.zeros_like(weight)
        if f"{key}.lora_A.weight" in adapter:
            moved = 2.0 * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
            assert 0 < moved.abs().max() < 1e-4  # a step of bfloat16 is 1e-4 at 0.02
        torch.testing.assert_close(weight - start[name], moved, rtol=0, atol=1e-7)
    with pytest.raises(ConfigError, match=r"learner\.lora"):
        learner.models.policy.named_weights(torch.bfloat16)


def test_reference_and_critic_start_with_the_policys_existing_adapter(
    tiny_folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(tiny_folder, learning_rate=3e-2)
    for seed in range(2):
        step(learner, make_groups(seed, policy_version=seed))
    learner.save(tmp_path)
    for dtype in ("float64", "bfloat16"):
        again = make_learner(
            tiny_folder,
            lora={"path": str(tmp_path / "adapter")},
            compute_dtype=dtype,
            learning_rate=0.0,
            kl={"coefficient": 0.1, "reference": {"kind": "frozen"}},
            advantage={"kind": "gae"},
            critic={},
        )
        critic = again.models.critic
        assert critic is not None
        own = dict(critic.model.named_weights(torch.float32))
        for name, weight in again.models.policy.named_weights(torch.float32):
            start = dict(base(tiny_folder).named_parameters())[name]
            torch.testing.assert_close(
                own[name], weight, rtol=0, atol=2e-3 if dtype == "bfloat16" else 1e-6
            )
            if name.endswith("_proj.weight"):
                assert (own[name] - start).abs().max() > 1e-2
        assert step(again, make_groups(5)).metrics["learner/kl"] == 0.0


def test_modules_that_cannot_be_adapted_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.lora\.target_modules: .*wq"):
        make_learner(tiny_folder, lora={"target_modules": ["wq"]})
    with pytest.raises(ConfigError, match="embed_tokens"):
        make_learner(tiny_folder, lora={"target_modules": ["embed_tokens"]})
    with pytest.raises(ConfigError, match=r"learner\.lora\.path"):
        make_learner(tiny_folder, lora={"path": str(tmp_path)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 1}, "layers.1.*q_proj"),
        ({"num_layers": 3}, "layers.2.*q_proj"),
        (
            {"hidden_size": 32, "num_heads": 1},
            r"q_proj.lora_A.weight.*\(4, 64\).*\(4, 32\)",
        ),
    ],
)
def test_an_adapter_made_for_another_base_is_refused(
    tiny_folder: Path, tmp_path: Path, change: dict[str, int], words: str
) -> None:
    learner = make_learner(tiny_folder, lora={"rank": 4, "target_modules": ["q_proj"]})
    learner.save(tmp_path / "saved")
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "intermediate_size": 96} | change
    other = make_tiny_model(
        TinyModel.model_validate({"kind": "tiny", **sizes}), tmp_path / "other", seed=0
    )
    with pytest.raises(ConfigError, match=words) as no:
        make_learner(other, lora={"path": str(tmp_path / "saved" / "adapter")})
    assert str(tiny_folder) in str(no.value)
