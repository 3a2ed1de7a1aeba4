"""Image columns: what may stand in them, where images go in a prompt, and what is refused by row."""

import base64
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from minimal import QUICKSTART, problems_of
from pictures import encode_image
from PIL import Image
from pyarrow import parquet
from rows import write_jsonl

from raylearner.config.data import FileData, HubData
from raylearner.config.image_checks import check_adapter_transport, check_images, image_warnings
from raylearner.config.loader import load
from raylearner.config.model import PretrainedModel
from raylearner.config.schema import RunConfig
from raylearner.data import load_prompts
from raylearner.errors import ConfigError
from raylearner.images import MAX_BYTES, fit_image
from raylearner.run import evaluate_command, training
from raylearner.services.corpora.visual_pages import Kind, write_visual_pages
from raylearner.types import IMAGE_MARK, Prompt


def plain(width: int = 16, height: int = 12, colour: str = "red") -> bytes:
    return encode_image(Image.new("RGB", (width, height), colour))


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def jsonl(folder: Path, *rows: dict[str, object]) -> FileData:
    return write_jsonl(folder / "rows.jsonl", *rows, image_column="image")


def shown(prompt: Prompt) -> list[tuple[str, tuple[bytes, ...]]]:
    return [(m.content, m.images) for m in prompt.messages]


def test_paths_and_data_urls_one_or_several_become_images_of_the_first_user_message(
    tmp_path: Path,
) -> None:
    red, blue = plain(), plain(colour="blue")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "red.png").write_bytes(red)
    source = jsonl(
        tmp_path,
        {"prompt": "a", "image": "images/red.png", "more": 1},
        {"prompt": "b", "image": [data_url(blue), {"path": "images/red.png"}]},
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}],
            "image": data_url(red),
        },
        {"prompt": "d", "image": None},
    )
    prompts = load_prompts([source])
    assert [shown(prompt) for prompt in prompts] == [
        [(f"{IMAGE_MARK}a", (red,))],
        [(f"{IMAGE_MARK * 2}b", (blue, red))],
        [("s", ()), (f"{IMAGE_MARK}c", (red,))],
        [("d", ())],
    ]
    assert prompts[0].columns == {"more": 1}


def test_marks_and_parts_say_where_images_stand(tmp_path: Path) -> None:
    red, blue = plain(), plain(colour="blue")
    both = [data_url(red), data_url(blue)]
    parts = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    source = jsonl(
        tmp_path,
        {"prompt": "left <image> right <image>?", "image": both},
        {"prompt": [{"role": "user", "content": parts}], "image": both},
        {
            "prompt": [
                {"role": "user", "content": "<image>"},
                {"role": "user", "content": "x<image>"},
            ],
            "image": both,
        },
    )
    assert [shown(prompt) for prompt in load_prompts([source])] == [
        [(f"left {IMAGE_MARK} right {IMAGE_MARK}?", (red, blue))],
        [(f"{IMAGE_MARK}or{IMAGE_MARK}", (red, blue))],
        [(IMAGE_MARK, (red,)), (f"x{IMAGE_MARK}", (blue,))],
    ]


def test_parquet_and_datasets_give_the_encoded_bytes_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    image = encode_image(Image.new("RGB", (16, 12), "red"), "JPEG", quality=30)
    table = pyarrow.table({"prompt": ["a", "b"], "image": [image, None]})
    parquet.write_table(table, tmp_path / "plain.parquet")
    made = datasets.Dataset.from_dict(
        {
            "prompt": ["a"],
            "image": [{"bytes": image, "path": None}],
            "more": [[{"bytes": image}] * 2],
        },
        features=datasets.Features(
            prompt=datasets.Value("string"),
            image=datasets.Image(),
            more=datasets.List(datasets.Image()),
        ),
    )
    (tmp_path / "hub").mkdir()
    made.to_parquet(tmp_path / "hub" / "train.parquet")
    keys = {"image_column": "image"}
    sources = [
        FileData(kind="parquet", path=str(tmp_path / "plain.parquet"), source="a", **keys),
        FileData(kind="parquet", path=str(tmp_path / "hub" / "train.parquet"), source="b", **keys),
        HubData(kind="hub", path=str(tmp_path / "hub"), source="c", **keys),
        HubData(kind="hub", path=str(tmp_path / "hub"), source="d", image_column="more"),
    ]
    images = [[m.images for m in load_prompts([source])[0].messages] for source in sources]
    assert images == [[(image,)], [(image,)], [(image,)], [(image, image)]]


def test_the_generators_pages_are_read_by_their_own_column(tmp_path: Path) -> None:
    write_visual_pages(tmp_path, kinds=[Kind.COLOURS], num_documents=8, pages_per_document=1)
    path = str(tmp_path / "questions.jsonl")
    prompts = load_prompts([FileData(kind="jsonl", path=path, image_column="image")])
    assert len(prompts) == 7
    for prompt in prompts:
        (image,) = prompt.messages[0].images
        assert Image.open(io.BytesIO(image)).size == (56, 56)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (plain()[:45], "does not decode as PNG, JPEG, WEBP: .*truncated"),
        (b"no image", "does not decode as PNG, JPEG, WEBP$"),
        (bytes(MAX_BYTES + 1), f"image longer than {MAX_BYTES} bytes"),
        (encode_image(Image.new("RGB", (16, 12)), "GIF"), "does not decode as PNG, JPEG, WEBP"),
        (b"", "does not decode"),
        (plain(1, 1), "image of 1x1 is smaller than 8 pixels"),
        (plain(30_000, 8), "image of 30000x8 is longer than 200 to 1"),
        (
            encode_image(
                Image.new("RGB", (16, 12), "red"),
                save_all=True,
                append_images=[Image.new("RGB", (16, 12), "blue")],
            ),
            "image of 16x12 is animated",
        ),
    ],
    ids=["cut", "text", "long", "gif", "empty", "tiny", "wide", "animated"],
)
def test_an_image_that_cannot_be_shown_is_named_by_its_row(
    tmp_path: Path, image: bytes, words: str
) -> None:
    good, bad = data_url(plain()), data_url(image)
    source = jsonl(tmp_path, {"prompt": "a", "image": good}, {"prompt": "b", "image": [good, bad]})
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:2: image 2 of 2: .*{words}"):
        load_prompts([source])


TURNED = Image.Exif()
TURNED[0x0112] = 6  # by a quarter


def photo_with_two_pictures() -> bytes:
    """As phones take them: the first picture is shown."""
    more = [Image.new("RGB", (40, 30), "blue")]
    first = Image.new("RGB", (16, 12), "red")
    photo = encode_image(first, "MPO", save_all=True, append_images=more, exif=TURNED)
    assert Image.open(io.BytesIO(photo)).n_frames == 2
    return photo


@pytest.mark.parametrize(
    ("make", "size", "colour"),
    [
        (
            lambda: encode_image(Image.new("CMYK", (16, 12), (0, 255, 255, 0)), "JPEG"),
            (16, 12),
            (254, 0, 0),
        ),
        (
            lambda: encode_image(Image.fromarray(np.full((12, 16), 65535, np.uint16))),
            (16, 12),
            (255, 255, 255),
        ),
        (
            lambda: encode_image(Image.new("RGB", (16, 40), "red"), "JPEG", exif=TURNED),
            (40, 16),
            (254, 0, 0),
        ),
        (photo_with_two_pictures, (12, 16), (254, 0, 0)),
    ],
    ids=["cmyk", "16-bit", "exif", "photo"],
)
def test_unusual_images_are_taken_and_made_plain(
    tmp_path: Path, make: Callable[[], bytes], size: tuple[int, int], colour: tuple[int, int, int]
) -> None:
    (prompt,) = load_prompts([jsonl(tmp_path, {"prompt": "a", "image": data_url(make())})])
    fitted = Image.open(io.BytesIO(fit_image(prompt.messages[0].images[0], lambda h, w: (h, w))))
    assert fitted.mode == "RGB"
    assert fitted.size == size
    assert np.abs(np.asarray(fitted).astype(int) - colour).max() <= 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, r"no column 'image' \(image_column\); the row has: prompt"),
        ({"prompt": "a", "image": "nowhere.png"}, "'nowhere.png' cannot be read: No such file"),
        ({"prompt": "a", "image": "/dev/zero"}, "image '/dev/zero'"),
        ({"prompt": "a", "image": "a\0b"}, "cannot be read: embedded null byte"),
        (
            {"prompt": "a", "image": "a" * 9999},
            r"image 'a{200}' cannot be read: File name too long",
        ),
        ({"prompt": "a", "image": "../other.png"}, "is outside of"),
        ({"prompt": "a", "image": "x/../../other.png"}, "is outside of"),
        ({"prompt": "a", "image": "/etc/passwd"}, "is outside of"),
        ({"prompt": "a", "image": {"path": "/proc/self/environ"}}, "is outside of"),
        ({"prompt": "a", "image": "file:///etc/passwd"}, "cannot be read"),
        ({"prompt": "a", "image": "data:image/png;base64"}, "it is not in base64"),
        ({"prompt": "a", "image": 7}, "an image is encoded bytes, a path.*; got int"),
        ({"prompt": "a", "image": "data:image/png,x"}, "it is not in base64"),
        ({"prompt": "a", "image": "data:image/png;base64,%"}, "data URL"),
        ({"prompt": "<image>", "image": []}, "1 marks '<image>' for 0 images"),
        ({"prompt": "<image>", "image": [data_url(plain())] * 2}, "1 marks '<image>' for 2 images"),
        ({"prompt": "a", "image": [data_url(plain())] * 5}, "5 images, .*max_images is 4"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}], "image": None},
            r"messages\[0\]\.content\[0\]",
        ),
    ],
)
def test_a_row_that_does_not_fit_its_images_is_refused(
    tmp_path: Path, row: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:1: .*{words}") as error:
        load_prompts([jsonl(tmp_path, row)], max_images=4)
    assert str(error.value).count("rows.jsonl:1") == 1


def test_a_checkpoint_that_reads_text_alone_is_refused_by_check_and_before_a_cluster_starts(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = jsonl(tmp_path, {"prompt": "a", "answer": "b", "image": data_url(plain())})
    data = f"{{kind: jsonl, path: {source.path}, image_column: image}}"
    overrides = [
        f"data={{train: {data}, evaluation: {data}}}",
        "model={kind: pretrained, path: owner/name}",
        "environment={kind: single_turn}",
        "learner.vision_learning_rate=1e-5",
        f"run.dir={tmp_path / 'run'}",
    ]
    config = load([QUICKSTART], overrides)

    def of(folder: Path) -> RunConfig:
        model = PretrainedModel(kind="pretrained", path=str(folder))
        return config.model_copy(update={"model": model})

    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    keys = {
        "data.train.0.image_column",
        "data.evaluation.0.image_column",
        "learner.vision_learning_rate",
    }
    assert {finding.key for finding in check_images(of(tmp_path))} == keys
    # A hub id is found out at the start, and so is this folder, whose config.json is missing.
    assert check_images(of(tokenizer_folder)) == []
    for start in (training.run, partial(evaluate_command.evaluate, checkpoint=None)):
        with pytest.raises(ConfigError, match=r"model\.path") as error:
            start(of(tokenizer_folder))
        assert {line.partition(":")[0] for line in str(error.value).splitlines()} == keys


def test_pages_that_no_response_has_room_for_are_noted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 16, "merge_size": 2}')
    overrides = [
        "environment={kind: tool_use, tools: [{kind: page_fetch, url: 'http://h'}]}",
        "model={kind: pretrained, path: owner/name}",
        "renderer.images={min_pixels: 1024, max_pixels: 256_000}",
    ]
    config = load([QUICKSTART], overrides)
    assert list(image_warnings(config)) == []
    model = PretrainedModel(kind="pretrained", path=str(tmp_path))
    (warning,) = image_warnings(config.model_copy(update={"model": model}))
    assert warning.startswith("renderer.images.max_pixels")
    assert "252 tokens" in warning


def test_what_would_be_given_the_policys_images_must_see_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    overrides = [
        "model.vision={}",
        f"learner.critic={{trunk: own, path: {tmp_path}}}",
        f"learner.kl={{coefficient: 0.1, reference: {{kind: frozen, path: {tmp_path}}}}}",
    ]
    paths = {"learner.critic.path", "learner.kl.reference.path"}
    assert paths <= set(problems_of(QUICKSTART, overrides))
    of_text = problems_of(QUICKSTART, [*overrides[1:], "learner.lora.rank=0"])
    assert of_text
    assert not paths & set(of_text)


def test_adapters_of_a_tower_are_not_sent_where_vllm_would_leave_them_out() -> None:
    overrides = [
        "model={kind: tiny, vision: {}}",
        "renderer.images={min_pixels: 1024, max_pixels: 256_000}",
        "actors.engine={kind: vllm, max_model_tokens: 512}",
        "weights.transport=adapter",
        "learner.lora={}",
    ]
    assert "weights.transport" in problems_of(QUICKSTART, overrides)
    frozen = load([QUICKSTART], [*overrides, "learner.vision_tower=frozen"])
    check_adapter_transport(frozen)
    learner = frozen.learner.model_copy(update={"vision_tower": "trained"})
    with pytest.raises(ConfigError, match=r"weights\.transport: 'adapter'"):
        check_adapter_transport(frozen.model_copy(update={"learner": learner}))


def test_rows_reference_images_below_their_folder_also_by_links_and_absolute_paths(
    tmp_path: Path,
) -> None:
    elsewhere, rows = tmp_path / "elsewhere", tmp_path / "rows"
    elsewhere.mkdir()
    rows.mkdir()
    (elsewhere / "red.png").write_bytes(plain())
    (rows / "images").symlink_to(elsewhere)
    inside = ["images/red.png", str(rows / "images" / "red.png"), "images/../images/red.png"]
    source = jsonl(rows, *({"prompt": "a", "image": path} for path in inside))
    assert len(load_prompts([source])) == len(inside)
    with pytest.raises(ConfigError, match="is outside of"):
        load_prompts([jsonl(rows, {"prompt": "a", "image": str(elsewhere / "red.png")})])


def test_rows_of_a_dataset_cannot_reference_images_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(plain())
    (tmp_path / "hub").mkdir()
    table = pyarrow.table({"prompt": ["a"], "image": [str(tmp_path / "red.png")]})
    parquet.write_table(table, tmp_path / "hub" / "train.parquet")
    source = HubData(kind="hub", path=str(tmp_path / "hub"), image_column="image")
    with pytest.raises(ConfigError, match="is outside of"):
        load_prompts([source])
