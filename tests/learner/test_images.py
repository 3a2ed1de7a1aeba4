"""Packed sequences with images equal one sequence at a time by transformers, in loss and gradients."""

import functools
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import learners
import numpy as np
import pytest
import torch
from families import make_glm4v, make_qwen3
from learners import assert_same_weights, make_groups, probe_of, step, weights_of
from pictures import Source, make_image
from ranks import run_ranks
from safetensors import safe_open
from torch import Tensor, nn

from raylearner.config.schema import TinyModel, WeightsSection
from raylearner.errors import ConfigError, LearnerError, RenderError
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.batch.pack import pack
from raylearner.learner.learner import Learner
from raylearner.learner.model import images as images_module
from raylearner.learner.model import lora
from raylearner.learner.model.images import ImageReader, PixelLoader, vision_tower
from raylearner.learner.model.loading import ModelFiles, load_model
from raylearner.learner.model.policy import ModelOptions
from raylearner.learner.weight_writer import make_probe
from raylearner.replay.validation import trajectory_error
from raylearner.tokenization.vision import Vision, load_image_processor
from raylearner.types import TrajectoryGroup

TOLERANCE = 1e-4
SIZES = ((56, 84), (140, 112), (28, 28))


@pytest.fixture(scope="module")
def qwen2_5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from raylearner.tiny.model import make_tiny_model

    config = TinyModel.model_validate(
        {"kind": "tiny", "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "vision": {}}
    )
    return make_tiny_model(config, tmp_path_factory.mktemp("qwen2_5"), seed=0)


@pytest.fixture(scope="module")
def qwen3_folder(qwen2_5_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(qwen2_5_folder, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def glm4v_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_glm4v(tmp_path_factory.mktemp("glm4v"))


def test_tensors_load_under_any_names_that_transformers_accepts(family_folder: Path) -> None:
    folder = family_folder
    causal_lm = load_model(str(folder), dtype=torch.float32).causal_lm
    with safe_open(folder / "model.safetensors", "pt") as file:
        keys = set(file.keys())
    # Qwen2.5-VL's parts are saved under the names that they have on the hub.
    assert ("visual.merger.ln_q.weight" in keys) == ("qwen2_5" in folder.name)
    loaded = {name: p.detach().clone() for name, p in causal_lm.named_parameters()}
    for parameter in causal_lm.parameters():
        parameter.detach().zero_()
    files = ModelFiles(folder, causal_lm)
    assert files.find_missing(causal_lm) == []
    files.load(causal_lm)
    for name, parameter in causal_lm.named_parameters():
        assert torch.equal(parameter, loaded[name]), name


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3", "glm4v"])
def family_folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


def reader_of(folder: Path) -> ImageReader:
    reader = ImageReader.from_pretrained(str(folder))
    assert reader is not None
    return reader


def vision_of(folder: Path) -> Vision:
    vision = Vision.from_pretrained(str(folder))
    assert vision is not None
    return vision


def make_sequences(vision: Vision) -> list[tuple[np.ndarray, tuple[bytes, ...]]]:
    """Of text alone, with one image, with one shown twice, and with several of different sizes."""
    rng = np.random.default_rng(0)
    pages = [make_image(seed, *size) for seed, size in enumerate(SIZES)]
    sequences: list[tuple[np.ndarray, tuple[bytes, ...]]] = []
    for shown in ((), (pages[0],), (pages[1], pages[1]), (pages[0], pages[2], pages[1])):
        ids = rng.integers(20, 200, 7).tolist()
        for image in shown:
            ids += [*vision.block(image), *rng.integers(20, 200, 5).tolist()]
        sequences.append((np.array(ids, np.int64), shown))
    return sequences


def scored_places(vision: Vision, token_ids: np.ndarray) -> np.ndarray:
    is_scored = token_ids >= 20
    is_scored[0] = False
    return is_scored & (token_ids != vision.image_token_id)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def reference_loss(
    folder: Path, reader: Any, vision: Vision, sequences: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """One sequence at a time through transformers' own forward."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    total = torch.zeros(())
    for token_ids, images in sequences:
        ids = torch.from_numpy(token_ids)
        inputs: dict[str, Any] = {}
        if images:
            # The processor once for every image shown, as transformers' users call it.
            packed = [reader.pack((image,), names=("",)) for image in images]
            inputs = {
                "pixel_values": torch.cat([p.pixels() for p in packed]),
                "image_grid_thw": torch.cat([p.grids for p in packed]),
                "mm_token_type_ids": (ids == vision.image_token_id).int()[None],
            }
        logits = model(input_ids=ids[None], use_cache=False, **inputs).logits[0]
        logits = logits.index_fill(1, torch.tensor(vision.banned_token_ids), -torch.inf)
        logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total - logprobs[torch.from_numpy(scored_places(vision, token_ids)[1:])].sum()
    total.backward()
    return total.detach(), gradients(model)


def test_packed_images_equal_one_sequence_at_a_time(family_folder: Path) -> None:
    folder = family_folder
    reader, vision = reader_of(folder), vision_of(folder)
    sequences = make_sequences(vision)
    tokens = PackedTokens.of(
        [ids for ids, _ in sequences],
        [scored_places(vision, ids) for ids, _ in sequences],
        reader=reader,
        images=[images for _, images in sequences],
    )
    assert tokens.images is not None
    assert len(tokens.images.grids) == len(SIZES)
    assert len(tokens.images.order) == 6
    model = load_model(str(folder), dtype=torch.float32)
    tower: Any = vision_tower(model.causal_lm)
    # Otherwise transformers attends to one image or window at a time.
    assert tower.config._attn_implementation.startswith("raylearner_flash_images")
    loss = -model(tokens).logprobs.sum()
    loss.backward()
    expected, expected_gradients = reference_loss(folder, reader, vision, sequences)
    torch.testing.assert_close(loss.detach(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    ours = gradients(model.causal_lm)
    assert ours.keys() == expected_gradients.keys()
    assert any("visual" in name and gradient.abs().max() > 1e-3 for name, gradient in ours.items())
    for name, gradient in ours.items():
        scale = float(expected_gradients[name].abs().max()) + 1.0
        gap = float((gradient - expected_gradients[name]).abs().max())
        assert gap < TOLERANCE * scale, name


def test_text_only_batches_run_the_whole_tower_without_effect(family_folder: Path) -> None:
    """A rank whose tower had fewer gradients than another's would reduce other shards than it."""
    folder = family_folder
    reader = reader_of(folder)
    ids = [np.arange(30, 40)]
    tokens = PackedTokens.of(ids, [np.arange(10) > 0], reader=reader)
    model = load_model(str(folder), dtype=torch.float32)
    scores = model(tokens)
    blind = model(replace(tokens, images=None))
    torch.testing.assert_close(scores.logprobs, blind.logprobs, rtol=0, atol=0)
    scores.logprobs.sum().backward()
    tower = {n for n, _ in model.causal_lm.named_parameters() if "visual" in n}
    found = {n: g for n, g in gradients(model.causal_lm).items() if "visual" in n}
    assert found.keys() == tower
    assert all(float(gradient.abs().max()) == 0.0 for gradient in found.values())


def test_a_dummy_is_large_enough_for_the_processor_to_leave_it(qwen2_5_folder: Path) -> None:
    vision, processor = (
        make(str(qwen2_5_folder)) for make in (Vision.from_pretrained, load_image_processor)
    )
    processor.size = {"shortest_edge": 3_136, "longest_edge": 1_000_000}
    packed = ImageReader(replace(vision, min_pixels=3_136), processor).pack((), names=())
    assert packed.grids.tolist() == [[1, 4, 4]]
    assert len(packed.pixels()) == 16


def test_features_and_placeholders_that_disagree_are_refused(qwen2_5_folder: Path) -> None:
    reader, vision = reader_of(qwen2_5_folder), vision_of(qwen2_5_folder)
    small, large = make_image(0, 28, 56), make_image(0, 56, 56)
    ids = np.array([30, *vision.block(large), 31])
    with pytest.raises(RenderError, match="4 placeholders for 2 image features"):
        reader.positions(ids, [small])
    with pytest.raises(ValueError, match="image"):
        PackedTokens.of([ids], [ids < 0], images=[(large,)])


def with_images(groups: list[TrajectoryGroup], vision: Vision) -> list[TrajectoryGroup]:
    """The first trajectory of each group is shown an image in its prompt."""
    image = make_image(3, 56, 56)
    changed = []
    for group in groups:
        first, *others = group.trajectories
        block = np.array(vision.block(image), np.int32)
        nothing = np.zeros(len(block), np.bool_)
        seeing = replace(
            first,
            token_ids=np.concatenate([first.token_ids[:1], block, first.token_ids[1:]]),
            loss_mask=np.insert(first.loss_mask, [1] * len(block), nothing),
            train_mask=np.insert(first.train_mask, [1] * len(block), nothing),
            behavior_logprobs=np.insert(first.behavior_logprobs, [1] * len(block), np.nan),
            policy_versions=np.insert(first.policy_versions, [1] * len(block), -1),
            images=(image,),
            image_token_id=vision.image_token_id,
        )
        assert trajectory_error(seeing) is None
        changed.append(replace(group, trajectories=(seeing, *others)))
    return changed


@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_a_step_on_text_and_images_trains_the_tower_unless_it_is_frozen(
    qwen2_5_folder: Path, tower: str
) -> None:
    vision = vision_of(qwen2_5_folder)
    config = {"compute_dtype": "float32", "learning_rate": 1e-2, "vision_tower": tower}
    learner = learners.make_learner(qwen2_5_folder, config, num_steps=2)
    before = weights_of(learner)
    assert not step(learner, with_images(make_groups(0), vision)).is_skipped
    after = weights_of(learner)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert any("language_model" in name for name in changed)
    assert any("visual" in name for name in changed) == (tower == "trained")
    assert len(probe_of(learner, [[30, 31, 32]])[0]) == 2


def test_the_tower_learns_at_its_own_rate_on_the_same_schedule(
    qwen2_5_folder: Path, tmp_path: Path
) -> None:
    """Adam's first update moves a weight by the rate, whatever its gradient; resuming is exact."""
    vision = vision_of(qwen2_5_folder)

    def make_learner(folder: Path = qwen2_5_folder) -> Learner:
        config = {
            "compute_dtype": "float64",
            "learning_rate": 1e-3,
            "vision_learning_rate": 1e-2,
            "schedule": "linear",
            "warmup_steps": 2,
            "max_grad_norm": 1e6,
        }
        return learners.make_learner(folder, config, num_steps=5)

    whole, resumed = make_learner(), make_learner()
    rates: list[tuple[float, float]] = []
    moved: dict[str, float] = {}
    for version in range(4):
        before = weights_of(whole)
        groups = with_images(make_groups(version, policy_version=version), vision)
        metrics = step(whole, groups).metrics
        rates.append((metrics["learner/learning_rate"], metrics["learner/vision_learning_rate"]))
        if version == 0:
            moved = {n: float((w - before[n]).abs().max()) for n, w in weights_of(whole).items()}
            whole.save(tmp_path)
            resumed.restore(tmp_path)
        else:
            step(resumed, groups)
    for name, distance in moved.items():
        assert distance == pytest.approx(5e-3 if "visual" in name else 5e-4, rel=0.01), name
    for number, share in enumerate((0.5, 1.0, 1.0, 2 / 3)):
        assert rates[number] == pytest.approx((1e-3 * share, 1e-2 * share))
    assert_same_weights(whole, resumed)


def test_the_compiler_leaves_the_tower_alone(qwen2_5_folder: Path) -> None:
    """It would compile a block anew for every number of images and windows."""
    model = load_model(str(qwen2_5_folder), dtype=torch.float32)
    model.prepare_blocks(ModelOptions(should_compile=True, activation_checkpointing="selective"))
    kinds = {
        type(block).__name__: (
            hasattr(block.forward, "_torchdynamo_orig_callable"),
            isinstance(block.forward, functools.partial),
        )
        for block in model.blocks
    }
    assert kinds == {
        "Qwen2_5_VLDecoderLayer": (True, False),
        "Qwen2_5_VLVisionBlock": (False, True),
    }


def test_the_exported_model_loads_with_its_image_processor(
    glm4v_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    config = {"compute_dtype": "float32", "learning_rate": 1e-2}
    learner = learners.make_learner(glm4v_folder, config, num_steps=1)
    step(learner, make_groups(0))
    learner.save(tmp_path)
    folder = tmp_path / "model"
    exported = dict(AutoModelForImageTextToText.from_pretrained(folder).named_parameters())
    for name, tensor in learner.models.policy.named_weights(torch.float32):
        assert torch.equal(exported[name], tensor), name
    assert Vision.from_pretrained(str(folder)) == Vision.from_pretrained(str(glm4v_folder))
    assert "`AutoModelForImageTextToText.from_pretrained`" in (folder / "README.md").read_text()


@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_a_frozen_tower_gets_no_adapters(qwen2_5_folder: Path, tower: str) -> None:
    config = {"compute_dtype": "float32", "vision_tower": tower, "lora": {"rank": 4}}
    learner = learners.make_learner(qwen2_5_folder, config, num_steps=1)
    names = [
        name for name, _ in lora.adapter_weights(learner.models.policy.causal_lm, torch.float32)
    ]
    assert any("language_model" in name for name in names)
    assert any("visual" in name for name in names) == (tower == "trained")


@pytest.mark.parametrize("key", ["critic", "kl.reference"])
def test_a_text_only_model_beside_a_vision_policy_is_refused(
    qwen2_5_folder: Path, tiny_folder: Path, key: str
) -> None:
    settings: dict[str, Any] = {"compute_dtype": "float32"}
    if key == "critic":
        settings["critic"] = {"trunk": "own", "path": str(tiny_folder)}
    else:
        reference = {"kind": "frozen", "path": str(tiny_folder)}
        settings["kl"] = {"coefficient": 0.1, "reference": reference}
    with pytest.raises(ConfigError, match=rf"learner\.{key}\.path"):
        learners.make_learner(qwen2_5_folder, settings, num_steps=1)


def test_a_vision_learning_rate_without_a_tower_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.vision_learning_rate"):
        learners.make_learner(tiny_folder, {"vision_learning_rate": 1e-3})


def test_prefetched_pixel_values_change_no_bit_and_are_loaded_once(
    qwen2_5_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = vision_of(qwen2_5_folder)
    groups = with_images(make_groups(0), vision)
    config = {"compute_dtype": "float32", "learning_rate": 1e-2, "num_epochs": 2}
    results: list[dict[str, Tensor]] = []
    for is_ahead in (True, False):
        if not is_ahead:
            monkeypatch.setattr(PixelLoader, "expect", lambda loader, line: list(line))
        loaded: list[bytes] = []
        make = images_module._load_pixels

        def count(processor: Any, image: bytes, make: Any = make, loaded: Any = loaded) -> Tensor:
            loaded.append(image)
            return make(processor, image)

        monkeypatch.setattr(images_module, "_load_pixels", count)
        learner = learners.make_learner(qwen2_5_folder, config, num_steps=2)
        metrics = step(learner, groups).metrics
        monkeypatch.setattr(images_module, "_load_pixels", make)
        assert metrics["learner/pixel_wait_s"] > 0
        assert len(loaded) == len(set(loaded)) == 2  # the one image of all groups, and the dummy
        results.append(weights_of(learner))
    assert_same_weights(*results)


def test_an_image_that_does_not_decode_ends_the_step_with_its_trajectory(
    qwen2_5_folder: Path,
) -> None:
    vision = vision_of(qwen2_5_folder)
    group, *others = with_images(make_groups(0), vision)
    first, *rest = group.trajectories
    half = tuple(image[: len(image) // 2] for image in first.images)
    broken = replace(group, trajectories=(replace(first, images=half), *rest))
    config = {"compute_dtype": "float32"}
    learner = learners.make_learner(qwen2_5_folder, config, num_steps=2)
    words = rf"group {first.group_id}, sample 0: an image does not decode: OSError: .*truncated"
    with pytest.raises(LearnerError, match=words):
        step(learner, [*others, broken])


def test_the_next_images_load_ahead_and_the_cache_is_bounded() -> None:
    """Pixel values of 400 bytes an image, and room for three."""
    started: list[bytes] = []
    names = [bytes([number]) for number in range(8)]
    may_end = {name: threading.Event() for name in names}

    def load(image: bytes) -> Tensor:
        started.append(image)
        assert may_end[image].wait(10)
        return torch.full((100, 1), float(image[0]))

    line = [(name,) for name in names]
    loader = PixelLoader(load, max_kept_bytes=1200, num_workers=4)
    loader.expect(line)
    may_end[names[0]].set()
    (first,) = loader.pixels((*line[0],))  # a copy, as FSDP makes it
    assert float(first.result()[0]) == 0.0
    while len(started) < 2:
        time.sleep(0.001)
    assert started == names[:2]  # the second is under way, and no other
    loader.drain_waited_s()
    threading.Timer(0.2, may_end[names[1]].set).start()
    loader.pixels(line[1])
    assert 0.1 < loader.drain_waited_s() < 5
    for event in may_end.values():
        event.set()
    for shown in line[2:] + line * 3:
        (future,) = loader.pixels(shown)
        assert float(future.result()[0]) == shown[0][0]
        assert loader.kept_bytes <= 1600  # with the one under way
    assert loader.drain_waited_s() < 1
    assert len(started) >= 4 * 8  # too many to stay from round to round


def test_ranks_of_which_some_show_images_equal_one_rank(qwen3_folder: Path, tmp_path: Path) -> None:
    """Rounds of micro-batches in which one rank has images and the other none, both, and neither."""
    vision = vision_of(qwen3_folder)
    config = {
        "compute_dtype": "float64",
        "learning_rate": 1e-2,
        "max_tokens_per_micro_batch": 64,
        "num_mini_batches": 2,
    }
    pair = make_groups(0, num_groups=1, group_size=2)
    many = with_images(make_groups(1, num_groups=3, policy_version=1), vision)
    steps = [with_images(pair, vision), many, make_groups(2, num_groups=1, policy_version=2)]
    batches = [
        [
            pack(
                groups,
                policy_version=version,
                num_ranks=num_ranks,
                max_tokens_per_micro_batch=64,
                num_mini_batches=1 if version == 0 else 2,
            )
            for version, groups in enumerate(steps)
        ]
        for num_ranks in (1, 2)
    ]
    rounds = {
        tuple(any(row.trajectory.images for row in rows) for rows in micros)
        for step in batches[1]
        for minis in zip(*(rank.mini_batches for rank in step), strict=True)
        for micros in zip(*(mini.micro_batches for mini in minis), strict=True)
    }
    assert rounds == {(True, False), (False, True), (True, True), (False, False)}
    job = {"config": config, "model": str(qwen3_folder), "batches": batches[1]}
    (tmp_path / "job.pkl").write_bytes(pickle.dumps(job))
    run_ranks(Path(__file__).with_name("rank.py"), tmp_path, num_ranks=2)
    theirs = pickle.loads((tmp_path / "result.pkl").read_bytes())
    learner = learners.make_learner(qwen3_folder, config, temperature=0.9)
    before = weights_of(learner)
    for (batch,), expected in zip(batches[0], theirs["outputs"], strict=True):
        output = learner.step(batch)
        assert not output.is_skipped
        for key in ("learner/loss", "learner/grad_norm", "learner/entropy"):
            assert output.metrics[key] == pytest.approx(expected.metrics[key], rel=1e-5), key
    for name, tensor in weights_of(learner).items():
        assert not torch.equal(tensor, before[name]), name
        np.testing.assert_allclose(theirs["weights"][name], tensor, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_a_probe_shows_an_image_that_is_not_cached(
    qwen2_5_folder: Path, cache: Literal["recompute", "keep"]
) -> None:
    """The same one at every push where caches are cleared, and else one that none of them has seen."""
    reader, vision = reader_of(qwen2_5_folder), vision_of(qwen2_5_folder)
    model = load_model(str(qwen2_5_folder), dtype=torch.float32)
    config = WeightsSection(cache=cache, num_probe_tokens=16)
    first, second = (
        make_probe(
            Source(folder=qwen2_5_folder, policy=model, reader=reader),
            config,
            policy_version=version,
            seed=5,
        )
        for version in (1, 2)
    )
    assert (first.images == second.images) == (cache == "recompute")
    assert first.token_ids != second.token_ids
    (*_, (ids, images, num_scored)) = first.prompts()
    assert (len(images), num_scored, len(ids)) == (1, 16, 3 + 16)
    assert vision.grid(images[0])[1:] == (4, 6)
    assert [len(row) for row in first.logprobs] == [15, 16]
