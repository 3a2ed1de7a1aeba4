"""Prompts that no episode could open with are named before anything starts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pictures import encode_image
from PIL import Image
from typer.testing import CliRunner

from raylearner import cli
from raylearner.config.actors import ImagesSection
from raylearner.config.schema import RunConfig
from raylearner.data import load_prompts
from raylearner.errors import ConfigError
from raylearner.images import read_size
from raylearner.run import prompt_checks
from raylearner.tokenization.vision import ImageFitter, Vision

LIMIT = 64
TEXTS = ("1+1?", "x" * 45, "x" * 46, "y" * 3000)
"""45 characters are the most that 64 tokens hold: `<|im_start|>user`, a newline, and so on take 19."""


def make_config(folder: Path, texts: tuple[str, ...] = TEXTS, **changes: Any) -> RunConfig:
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "answer": "2"}) + "\n" for text in texts)
    )
    values: dict[str, Any] = {
        "model": {"kind": "tiny"},
        "data": {"train": {"kind": "jsonl", "path": str(folder / "rows.jsonl")}, **changes},
        "environment": {"kind": "single_turn"},
        "renderer": {"max_prompt_tokens": LIMIT},
        "actors": {"engine": {"kind": "vllm", "max_model_tokens": 512}},
        "learner": {"compute_dtype": "float32"},
        "replay": {"groups_per_step": 4},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return RunConfig.model_validate(values)


def fitting(config: RunConfig, **options: Any) -> list[str]:
    renderer = prompt_checks.make_renderer(config)
    assert renderer is not None
    prompts = load_prompts(config.data.train, system_prompt=config.data.system_prompt)
    kept = prompt_checks.select_fitting(config, prompts, renderer, key="data.train", **options)
    return [prompt.messages[-1].content for prompt in kept]


def test_long_prompts_are_counted_and_named_and_the_run_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fitting(make_config(tmp_path))
    text = str(caught.value)
    assert "2 of 4 prompts" in text
    assert f"rows.jsonl:3 ({LIMIT + 1})" in text
    assert "rows.jsonl:4 (3019)" in text
    assert "data.long_prompts" in text


def test_long_prompts_are_dropped_where_asked_and_what_remains_counted(tmp_path: Path) -> None:
    reports: list[str] = []
    config = make_config(tmp_path, long_prompts="drop")
    assert fitting(config, report=reports.append) == list(TEXTS[:2])
    (report,) = reports
    assert "2 of 4 prompts" in report
    assert "2 remain, fewer than the 4 of a step" in report


def test_what_stands_before_a_prompt_counts(tmp_path: Path) -> None:
    config = make_config(tmp_path, TEXTS[:2], system_prompt="Answer.", long_prompts="drop")
    assert fitting(config) == [TEXTS[0]]
    with pytest.raises(ConfigError, match="none is left"):
        fitting(make_config(tmp_path, TEXTS[2:], long_prompts="drop"))


def test_prompts_that_fit_are_all_kept_without_a_word(tmp_path: Path) -> None:
    reports: list[str] = []
    assert fitting(make_config(tmp_path, TEXTS[:2]), report=reports.append) == list(TEXTS[:2])
    assert reports == []


@pytest.mark.parametrize(("rule", "code"), [("refuse", 2), ("drop", 0)])
def test_check_measures_rows_of_files(
    rule: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_config(tmp_path, long_prompts=rule)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["check", "config.yaml"])
    assert result.exit_code == code
    assert "2 of 4 prompts" in (result.stdout if code == 0 else result.stderr)


def encoded(width: int, height: int, form: str, orientation: int = 1) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode_image(Image.fromarray(pixels), form, exif=exif)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_stand_in_has_the_size_of_the_fitted_image(form: str, orientation: int) -> None:
    vision = Vision(
        image_token_id=1,
        video_token_id=2,
        start_token_id=3,
        end_token_id=4,
        patch_size=14,
        merge_size=2,
        min_pixels=56 * 56,
        max_pixels=560 * 560,
    )
    section = ImagesSection(min_pixels=56 * 56, max_pixels=280 * 280)
    fitter = ImageFitter(vision, section)
    image = encoded(300, 200, form, orientation)
    assert read_size(fitter.stand_in(image)) == read_size(fitter.fit(image))
