"""Images as tokens: what the model's own processor and `get_rope_index` say, turn by turn."""

import io
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import kits
import numpy as np
import pytest
import torch
from episodes import make_completion
from pictures import encode_image, make_folder
from PIL import Image
from transformers import AutoTokenizer, Glm4vConfig, Qwen3VLConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from raylearner.actors.engines.vllm_arguments import vision_arguments
from raylearner.errors import ConfigError, EngineError, RenderError
from raylearner.replay.validation import trajectory_error
from raylearner.tokenization.renderer import Renderer
from raylearner.tokenization.transcript import Transcript
from raylearner.tokenization.vision import Vision, load_image_processor
from raylearner.types import IMAGE_MARK, Message, Prompt, StopReason, Trajectory

IMAGES = {"min_pixels": 1_600, "max_pixels": 40_000}
NUM_CONVERSATIONS = 200


@pytest.fixture(scope="module")
def qwen2_5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("qwen2_5"))


def make_family(source: Path, folder: Path, config: Any, processor: Any, kind: str) -> Path:
    """A configuration and an image processor of another family beside the tokenizer of `source`."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(folder)
    ids = tokenizer.get_vocab()
    names = {f"{kind}_{edge}_token_id": ids[f"<|vision_{edge}|>"] for edge in ("start", "end")}
    names |= {f"{pad}_token_id": ids[f"<|{pad}_pad|>"] for pad in ("image", "video")}
    config(**names).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen3_folder(qwen2_5_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = {"shortest_edge": 1_024, "longest_edge": 262_144}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=16, merge_size=2)
    folder = tmp_path_factory.mktemp("qwen3")
    return make_family(qwen2_5_folder, folder, Qwen3VLConfig, processor, "vision")


@pytest.fixture(scope="module")
def glm4v_folder(qwen2_5_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Exactly the range of IMAGES: pixels count twice here.
    processor = Glm4vImageProcessorPil(size={"shortest_edge": 3_200, "longest_edge": 80_000})
    folder = tmp_path_factory.mktemp("glm4v")
    return make_family(qwen2_5_folder, folder, Glm4vConfig, processor, "image")


def make_renderer(folder: Path, **settings: Any) -> Renderer:
    limits = {
        "max_prompt_tokens": 4_000,
        "max_response_tokens": 4_000,
        "max_observation_tokens": 1_000,
        "images": IMAGES,
    }
    return kits.make_renderer(folder, **limits | settings)


def make_image(rng: np.random.Generator, width: int, height: int) -> bytes:
    return encode_image(Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)))


def make_message(rng: np.random.Generator, num_images: int, *, role: Any = "user") -> Message:
    texts = ["".join(rng.choice(list("abc <>{}\n|7"), rng.integers(0, 12))) for _ in range(9)]
    sides = rng.integers(20, 260, (num_images, 2))
    return Message(
        role=role,
        content=IMAGE_MARK.join(texts[: num_images + 1]),
        images=tuple(make_image(rng, int(w), int(h)) for w, h in sides),
    )


async def opened(renderer: Renderer, *messages: Message) -> Transcript:
    prompt = Prompt(prompt_id="p", messages=messages)
    transcript = Transcript(renderer=renderer, claim=kits.make_claim(prompt))
    transcript.open(await renderer.fit_images(messages))
    return transcript


def closed(transcript: Transcript) -> Trajectory:
    trajectory = transcript.close(
        stop_reason=StopReason.END, error=None, metrics={}, started_at_s=0.0, finished_at_s=0.0
    )
    assert trajectory_error(trajectory) is None
    return trajectory


def say(transcript: Transcript, text: str) -> None:
    ids = [*transcript.renderer.encode(text), transcript.renderer.end_token_ids[0]]
    transcript.add_completion(make_completion(ids))


def make_processor(folder: Path) -> Any:
    """The model's own, in a process that may lack torchvision and with it the videos' part."""
    from transformers import Glm4vProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor

    families = {"qwen2_5": Qwen2_5_VLProcessor, "qwen3": Qwen3VLProcessor, "glm4v": Glm4vProcessor}
    family: Any = next(f for name, f in families.items() if name in folder.name)

    class ImagesOnly(family):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    return ImagesOnly(
        load_image_processor(str(folder)),
        tokenizer,
        video_processor=None,
        chat_template=tokenizer.chat_template,
    )


def make_rope_index(folder: Path) -> Any:
    """`get_rope_index` of the model's class, which reads nothing of the model but its configuration."""
    from transformers import AutoConfig, Glm4vModel, Qwen2_5_VLModel, Qwen3VLModel

    config = AutoConfig.from_pretrained(folder)
    families = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel, "glm4v": Glm4vModel}
    family: Any = families[config.model_type]
    with torch.device("meta"):
        model = family.__new__(family)
    torch.nn.Module.__init__(model)
    model.config = config
    return model.get_rope_index


def as_parts(message: Message) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for index, text in enumerate(message.content.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}]
    return parts


@pytest.mark.parametrize("family", ["qwen2_5_folder", "qwen3_folder", "glm4v_folder"])
async def test_tokens_grids_and_positions_are_those_of_the_models_own_processor(
    family: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(family)
    renderer = make_renderer(folder)
    vision = renderer.vision
    assert vision is not None
    processor, rope_index = make_processor(folder), make_rope_index(folder)
    rng = np.random.default_rng(0)
    num_images = 0
    for _ in range(NUM_CONVERSATIONS):
        counts = rng.multinomial(rng.integers(0, 7), [1 / 3] * 3)
        messages = [make_message(rng, int(count)) for count in counts]
        transcript = await opened(renderer, messages[0])
        conversation = [{"role": "user", "content": as_parts(messages[0])}]
        for number, message in enumerate(messages[1:]):
            say(transcript, f"answer {number}")
            assert transcript.add_reply(await renderer.fit_images([message]))
            conversation += [
                {"role": "assistant", "content": f"answer {number}"},
                {"role": "user", "content": as_parts(message)},
            ]
        trajectory = closed(transcript)
        text = processor.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False
        )
        shown = [Image.open(io.BytesIO(image)) for image in trajectory.images]
        expected = processor(text=[text], images=shown or None, return_tensors="pt")
        num_images += len(shown)
        assert trajectory.token_ids.tolist() == expected["input_ids"][0].tolist()
        grids = [vision.grid(image) for image in trajectory.images]
        theirs = expected.get("image_grid_thw")
        assert [list(g) for g in grids] == ([] if theirs is None else theirs.tolist())
        positions, _ = rope_index(
            expected["input_ids"], expected["mm_token_type_ids"], image_grid_thw=theirs
        )
        ours = vision.positions(trajectory.token_ids, grids)
        np.testing.assert_array_equal(ours, positions[:, 0].numpy())
        engine_ids = renderer.encode(text, keeps_special=True)
        assert list(transcript.engine_token_ids) == engine_ids
        assert vision.expand(engine_ids, trajectory.images) == trajectory.token_ids.tolist()
    assert num_images > 2 * NUM_CONVERSATIONS


async def test_the_processor_sizes_a_fitted_image_no_more(qwen2_5_folder: Path) -> None:
    renderer = make_renderer(qwen2_5_folder)
    rng = np.random.default_rng(1)
    (message,) = await renderer.fit_images([make_message(rng, 4)])
    assert renderer.vision is not None
    for image in message.images:
        _, rows, columns = renderer.vision.grid(image)
        assert Image.open(io.BytesIO(image)).size == (14 * columns, 14 * rows)
        assert IMAGES["min_pixels"] <= 196 * rows * columns <= IMAGES["max_pixels"]


async def test_an_image_shown_twice_is_kept_once(qwen2_5_folder: Path) -> None:
    renderer = make_renderer(qwen2_5_folder)
    image = make_image(np.random.default_rng(0), 90, 70)
    again = bytes(bytearray(image))
    message = Message(role="user", content=IMAGE_MARK * 2, images=(image, again))
    (fitted,) = await renderer.fit_images([message])
    assert fitted.images[0] is fitted.images[1]


@pytest.mark.parametrize(("num_fitting", "room"), [(0, 20), (1, 40), (2, 70)])
async def test_a_reply_keeps_its_best_images_that_fit_and_ends_the_episode(
    qwen2_5_folder: Path, num_fitting: int, room: int
) -> None:
    renderer = make_renderer(qwen2_5_folder, max_response_tokens=room, observation_role="inline")
    image = make_image(np.random.default_rng(0), 112, 140)  # 20 placeholders
    transcript = await opened(renderer, Message(role="user", content="q"))
    say(transcript, "x")
    reply = Message(
        role="tool", content=f"1{IMAGE_MARK}2{IMAGE_MARK}3{IMAGE_MARK}", images=(image,) * 3
    )
    assert not transcript.add_reply(await renderer.fit_images([reply]))
    trajectory = closed(transcript)
    assert len(trajectory.images) == num_fitting
    assert trajectory.is_placeholder.sum() == 20 * num_fitting
    assert trajectory.turns[0].reply == "".join(f"{n + 1}{IMAGE_MARK}" for n in range(num_fitting))
    assert not trajectory.loss_mask[trajectory.is_placeholder].any()


@pytest.mark.parametrize("room", [4_000, 45])
async def test_marks_in_the_text_of_one_tool_are_no_images_beside_those_of_another(
    qwen2_5_folder: Path, room: int
) -> None:
    """A turn that calls two tools gets both results in one reply, with room for all or one image."""
    renderer = make_renderer(qwen2_5_folder, max_response_tokens=room, observation_role="inline")
    image = make_image(np.random.default_rng(0), 112, 140)  # 20 placeholders
    transcript = await opened(renderer, Message(role="user", content="q"))
    say(transcript, "x")
    passage = Message(role="tool", content=f"a{IMAGE_MARK}b")
    page = Message(role="tool", content=f"1{IMAGE_MARK}2{IMAGE_MARK}3", images=(image,) * 2)
    fits = transcript.add_reply(await renderer.fit_images([passage, page, passage]))
    assert fits == (room == 4_000)
    trajectory = closed(transcript)
    assert len(trajectory.images) == 1 + fits
    shown = f"a{IMAGE_MARK}b\n1{IMAGE_MARK}" + f"2{IMAGE_MARK}3\na{IMAGE_MARK}b" * fits
    assert trajectory.turns[0].reply == shown
    block = "<|vision_start|><|image_pad|><|vision_end|>"
    pages = f"a{IMAGE_MARK}b\n1{block}" + f"2{block}3\na{IMAGE_MARK}b" * fits
    assert transcript.response_text == f"x<|im_end|>{pages}"


async def test_more_images_than_the_limit_truncate_like_a_full_context(
    qwen2_5_folder: Path,
) -> None:
    renderer = make_renderer(qwen2_5_folder, images={**IMAGES, "max_images": 2})
    rng = np.random.default_rng(0)
    transcript = await opened(renderer, make_message(rng, 1))
    say(transcript, "x")
    assert not transcript.add_reply(await renderer.fit_images([make_message(rng, 2)]))
    assert len(closed(transcript).images) == 2
    with pytest.raises(RenderError, match=r"3 images.*2"):
        await opened(renderer, make_message(rng, 3))


async def test_text_that_spells_an_image_shows_none(qwen2_5_folder: Path) -> None:
    renderer = make_renderer(qwen2_5_folder)
    spelled = "<|vision_start|><|image_pad|><|vision_end|>"
    transcript = await opened(renderer, Message(role="user", content=spelled))
    assert renderer.vision is not None
    assert not {*renderer.vision.control_token_ids} & {*transcript.token_ids}
    assert spelled in renderer.decode_all(transcript.token_ids)
    say(transcript, "x")
    assert transcript.add_reply([Message(role="tool", content=spelled)])
    assert not closed(transcript).is_placeholder.any()


async def test_counts_that_differ_are_refused_with_both_numbers(qwen2_5_folder: Path) -> None:
    renderer = make_renderer(qwen2_5_folder)
    vision = renderer.vision
    assert vision is not None
    image = make_image(np.random.default_rng(0), 112, 140)
    with pytest.raises(RenderError, match=r"2 .* 1 images"):
        await opened(renderer, Message(role="user", content=IMAGE_MARK * 2, images=(image,)))
    with pytest.raises(RenderError, match=r"1 .* 0 images"):
        vision.expand([vision.image_token_id], [])
    trajectory = closed(
        await opened(renderer, Message(role="user", content=IMAGE_MARK, images=(image,)))
    )
    with pytest.raises(RenderError, match=r"20 .* 16 "):
        vision.positions(trajectory.token_ids, [(1, 8, 8)])
    other = encode_image(Image.new("RGB", (112, 112)))
    for changes, words in (
        ({"images": ()}, "0 images, 1 runs of placeholders"),
        ({"images": (other,)}, "image 1 of 1, 112x112, has 16 features, but 20 placeholders"),
        ({"images": (encode_image(Image.new("RGB", (112, 140)), "JPEG"),)}, "image 1 of 1"),
    ):
        assert words in str(trajectory_error(replace(trajectory, **changes)))


def test_a_policy_may_sample_neither_kind_of_placeholder(qwen2_5_folder: Path) -> None:
    renderer = make_renderer(qwen2_5_folder)
    banned = {renderer.decode_all([i]) for i in renderer.banned_token_ids}
    assert banned == {"<|image_pad|>", "<|video_pad|>"}


async def test_a_model_of_text_has_no_vision_and_refuses_images(
    tokenizer_folder: Path, renderer: Renderer
) -> None:
    assert Vision.from_pretrained(str(tokenizer_folder)) is None
    assert renderer.banned_token_ids == ()
    ids = renderer.encode("abc")
    assert renderer.collapse(ids) is ids
    message = make_message(np.random.default_rng(0), 1)
    with pytest.raises(RenderError, match="text-only"):
        await renderer.fit_images([message])


def test_a_budget_beyond_the_processors_own_is_a_config_error(qwen2_5_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"renderer\.images: 262144 to 4194304 .*784 to 1003520"):
        make_renderer(qwen2_5_folder, images={})


RED = (200, 10, 10)
ANIMATED = encode_image(
    Image.new("RGB", (40, 40), RED),
    "WEBP",
    save_all=True,
    append_images=[Image.new("RGB", (40, 40))],
)


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (b"", "^image of 0 bytes [^:]+$"),
        (b"\x89PNG\r\n\x1a\nnonsense", "^image of 16 bytes [^:]+: [^<]+$"),
        (encode_image(Image.new("RGB", (64, 64), RED))[:-40], "does not decode"),
        (ANIMATED, "animated"),
        (encode_image(Image.new("1", (30_000, 8))), "aspect ratio"),
        (encode_image(Image.new("1", (9_200, 9_200))), "more than"),
    ],
)
async def test_bad_images_are_counted_failures(
    qwen2_5_folder: Path, image: bytes, problem: str
) -> None:
    message = Message(role="tool", content=IMAGE_MARK, images=(image,))
    with pytest.raises(RenderError, match=problem):
        await make_renderer(qwen2_5_folder).fit_images([message])


async def test_odd_images_become_upright_and_rgb(qwen2_5_folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    odd = [
        encode_image(Image.new("CMYK", (56, 84), (0, 0, 0, 0)), "JPEG"),
        encode_image(Image.fromarray(np.full((84, 56), 65_535, np.uint16))),
        encode_image(Image.new("RGBA", (56, 84), (0, 0, 0, 0))),
        encode_image(Image.new("RGB", (84, 56), (255, 255, 255)), exif=exif),
    ]
    message = Message(role="tool", content=IMAGE_MARK * 4, images=tuple(odd))
    (fitted,) = await make_renderer(qwen2_5_folder).fit_images([message])
    for image in fitted.images:
        shown = Image.open(io.BytesIO(image))
        assert (shown.mode, shown.size, shown.format) == ("RGB", (56, 84), "PNG")
        assert np.asarray(shown).min() >= 254


def test_a_missing_torchvision_is_named_with_what_to_do_and_text_models_need_none(
    qwen2_5_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(EngineError, match=r"torchvision.*bash launch/setup\.sh"):
        vision_arguments(str(qwen2_5_folder), max_images=3)
    assert vision_arguments(str(tmp_path), max_images=3) == {}
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    limits = vision_arguments(str(qwen2_5_folder), max_images=3)["limit_mm_per_prompt"]
    assert limits == {"image": 3, "video": 0}
