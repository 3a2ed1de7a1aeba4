"""The tiny model: whole tags, lossless text, a chat template, and files that load again."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from learners import random_trajectory
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from raylearner.config.schema import TinyModel, WarmStart
from raylearner.errors import ConfigError
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model.images import ImageReader
from raylearner.learner.model.loading import load_model
from raylearner.learner.weight_writer import read_vocabulary
from raylearner.tiny.model import TAGS, make_tiny_model
from raylearner.tiny.warm_start import warm_start
from raylearner.tokenization.vision import Vision
from raylearner.types import Trajectory


def test_text_survives_and_tags_are_single_tokens(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    text = "1+2 =\n<calc>1+2</calc><result>3</result><answer>3</answer> <b> é ∑ <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    for tag in TAGS:
        assert len(tokenizer(tag)["input_ids"]) == 1
        assert tokenizer.decode(tokenizer(tag)["input_ids"], skip_special_tokens=True) == tag
    assert len(tokenizer("12+34=")["input_ids"]) == 6
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_chat_template_is_chatml(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"


def test_vocabulary_names_the_special_tokens(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    size, special = read_vocabulary(tiny_folder)
    assert size == len(tokenizer)
    assert special == frozenset(tokenizer.all_special_ids)


def test_packed_forward_equals_plain_transformers(untied_folder: Path) -> None:
    model = load_model(str(untied_folder), dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(untied_folder, dtype=torch.float32)
    torch.manual_seed(0)
    lengths = (3, 30, 28, 1)
    sequences = [torch.randint(3, 250, (length,)) for length in lengths]
    tokens = PackedTokens.of(
        [ids.numpy() for ids in sequences], [np.arange(length) > 0 for length in lengths]
    )
    with torch.no_grad():
        found = model(tokens)
        for ours, bits, ids in zip(
            found.logprobs.split(lengths), found.entropy.split(lengths), sequences, strict=True
        ):
            scores = plain(ids[None]).logits[0].log_softmax(-1)[:-1]
            torch.testing.assert_close(ours[1:], scores.gather(1, ids[1:, None]).squeeze(1))
            torch.testing.assert_close(bits[1:], -(scores.exp() * scores).sum(1))
            assert ours[0] == bits[0] == 0


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    config = TinyModel(kind="tiny", hidden_size=32, num_layers=1, num_heads=1)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(config, tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_narrow_heads_are_refused(tmp_path: Path) -> None:
    config = TinyModel(kind="tiny", hidden_size=64, num_heads=4)
    with pytest.raises(ConfigError, match=r"^model\.num_heads: .* 32; set it to 2"):
        make_tiny_model(config, tmp_path, seed=0)


def test_a_warm_start_imitates_only_what_the_mask_shows(tmp_path: Path) -> None:
    config = TinyModel(kind="tiny", hidden_size=32, num_layers=1, num_heads=1, intermediate_size=64)
    make_tiny_model(config, tmp_path, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    shown, hidden = (tokenizer(text)["input_ids"] for text in ("abcabcabc", "xyz"))
    demonstration = replace(
        random_trajectory(np.random.default_rng(0)),
        token_ids=np.array(hidden + shown, np.int32),
        loss_mask=np.array([False] * len(hidden) + [True] * len(shown)),
    )
    section = WarmStart(num_steps=40, batch_size=4, learning_rate=1e-2)
    *_, report = warm_start(tmp_path, [demonstration], section, seed=0)
    assert "step 40/40" in report
    assert float(report.split()[-1]) < 0.5
    model = load_model(str(tmp_path), dtype=torch.float32)
    ids = np.array(hidden + shown)
    logprobs = model.score(PackedTokens.of([ids], [np.arange(len(ids)) > 0])).logprobs
    assert logprobs[3:].mean() > -0.2
    assert logprobs[1:3].mean() < -1.0


def test_a_warm_start_teaches_the_vision_tower_to_tell_pages_apart(tmp_path: Path) -> None:
    config = TinyModel.model_validate(
        {"kind": "tiny", "hidden_size": 64, "num_layers": 1, "num_heads": 2, "vision": {}}
    )
    make_tiny_model(config, tmp_path, seed=0)
    vision, reader = (
        Vision.from_pretrained(str(tmp_path)),
        ImageReader.from_pretrained(str(tmp_path)),
    )
    assert vision is not None
    demonstrations: list[Trajectory] = []
    for answer, colour in ((60, "red"), (61, "blue")):
        buffer = BytesIO()
        Image.new("RGB", (28, 28), colour).save(buffer, "PNG")
        ids = [30, *vision.block(buffer.getvalue()), answer]
        made = replace(
            random_trajectory(np.random.default_rng(0)),
            token_ids=np.array(ids, np.int32),
            loss_mask=np.arange(len(ids)) == len(ids) - 1,
            images=(buffer.getvalue(),),
            image_token_id=vision.image_token_id,
        )
        demonstrations.append(made)
    before = load_file(tmp_path / "model.safetensors")
    section = WarmStart(num_steps=60, batch_size=8, learning_rate=3e-3)
    *_, report = warm_start(tmp_path, demonstrations, section, seed=0)
    assert float(report.split()[-1]) < 0.1  # 0.69 for who does not look
    after = load_file(tmp_path / "model.safetensors")
    tower = [name for name in after if "visual" in name]
    assert tower
    assert any(not torch.equal(after[name], before[name]) for name in tower)
    model = load_model(str(tmp_path), dtype=torch.float32)
    red, blue = demonstrations
    swapped = PackedTokens.of([red.token_ids], [red.loss_mask], reader=reader, images=[blue.images])
    assert model.score(swapped).logprobs[-1] < -2.0
