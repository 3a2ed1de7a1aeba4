"""Files of vision-language models: missing and invalid values, and contradictions between files."""

import json
from pathlib import Path
from typing import Any

import pytest
from minimal import QUICKSTART, problems_of

from raylearner.config.loader import load
from raylearner.config.problems import ConfigProblems
from raylearner.errors import ConfigError
from raylearner.tokenization.vision import Vision

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 784, "longest_edge": 7_840},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224}}


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def write(folder: Path, config: object = CONFIG, processor: object = PROCESSOR) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


def found_by_check(path: str) -> list[str]:
    """Errors of `check` about files that images need."""
    with pytest.raises(ConfigProblems) as error:
        load([QUICKSTART], [f"model={{kind: pretrained, path: {path}}}"])
    texts = [p.text for p in error.value.problems if p.key == "model.path"]
    return [text for text in texts if "config.json" in text and "safetensors" not in text]


@pytest.mark.parametrize(
    "processor",
    [
        PROCESSOR,
        without(PROCESSOR, "patch_size"),  # its class knows
        PROCESSOR | {"size": {"max_pixels": 7_840}, "min_pixels": 784, "max_pixels": 7_840},
    ],
)
def test_files_of_all_ages_are_read(processor: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, processor=processor)
    vision = Vision.from_pretrained(path)
    assert vision is not None
    assert (vision.patch_size, vision.min_pixels, vision.max_pixels) == (14, 784, 7_840)
    assert found_by_check(path) == []


def test_an_image_processor_beside_a_tokenizers_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, processor=CLIP)
    nested = {"image_processor": PROCESSOR | {"merge_size": 3}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    with pytest.raises(ConfigError, match=r"processor_config\.json: merge_size is 3"):
        Vision.from_pretrained(path)
    assert len(found_by_check(path)) == 1


@pytest.mark.parametrize(
    ("config", "processor", "fragment"),
    [
        (without(CONFIG, "model_type"), PROCESSOR, "config.json: model_type"),
        (CONFIG | {"model_type": "gemma3"}, PROCESSOR, "'gemma3'"),
        *(
            (without(CONFIG, key), PROCESSOR, f"config.json: {key}")
            for key in CONFIG
            if key.endswith("token_id")
        ),
        (CONFIG | {"vision_config": 3}, PROCESSOR, "vision_config"),
        (CONFIG | {"image_token_id": "<image>"}, PROCESSOR, "'<image>'"),
        (CONFIG | {"model_type": "glm4v"}, PROCESSOR, "config.json: image_start_token_id"),
        (CONFIG, [PROCESSOR], "preprocessor_config.json "),
        (CONFIG, CLIP, "shortest_edge <= longest_edge"),
        (CONFIG, PROCESSOR | {"size": {"height": 9, "width": 9}}, "'height': 9"),
        (CONFIG, PROCESSOR | {"patch_size": "14"}, "patch_size must be a whole number >= 1"),
        (CONFIG, PROCESSOR | {"patch_size": 16}, "patch_size is 16"),
        (CONFIG, PROCESSOR | {"merge_size": 1}, "merge_size is 1"),
        (CONFIG, PROCESSOR | {"temporal_patch_size": 1}, "temporal_patch_size is 1"),
    ],
)
def test_what_images_cannot_be_made_by_is_named(
    config: dict[str, Any], processor: object, fragment: str, tmp_path: Path
) -> None:
    path = write(tmp_path, config, processor)
    with pytest.raises(ConfigError) as error:
        Vision.from_pretrained(path)
    assert fragment in str(error.value)
    assert all(line.startswith(f"model.path {path!r}: ") for line in str(error.value).splitlines())
    assert any(fragment in text for text in found_by_check(path))


def test_a_missing_image_processor_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        Vision.from_pretrained(path)
    (text,) = found_by_check(path)
    assert "preprocessor_config.json" in text


@pytest.mark.parametrize(
    ("family", "minimum", "maximum"), [("qwen2_5_vl", 784, 7_840), ("glm4v", 392, 3_920)]
)
def test_check_refuses_a_pixel_budget_beyond_that_of_the_processor(
    tmp_path: Path, family: str, minimum: int, maximum: int
) -> None:
    """GLM counts the pixels of both frames that a patch spans."""
    marks = {"image_start_token_id": 3, "image_end_token_id": 4}
    path = write(tmp_path, CONFIG | marks | {"model_type": family})
    images = f"renderer.images={{min_pixels: {minimum - 1}, max_pixels: {maximum + 1}}}"
    texts = problems_of(QUICKSTART, [f"model={{kind: pretrained, path: {path}}}", images])
    assert f">= {minimum} " in texts["renderer.images.min_pixels"]
    assert f"<= {maximum} " in texts["renderer.images.max_pixels"]
