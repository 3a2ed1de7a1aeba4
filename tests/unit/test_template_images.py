"""Chat templates that write images otherwise than observations do are refused before any episode."""

from collections.abc import Sequence

import pytest

from raylearner.config.schema import RendererSection
from raylearner.errors import ConfigError
from raylearner.tiny.model import make_tokenizer
from raylearner.tokenization.renderer import Renderer
from raylearner.tokenization.vision import Vision

START, IMAGE, END, VIDEO = SPECIAL = ("<start>", "<image>", "<end>", "<video>")


def template(part: str) -> str:
    """A chat template that writes each part of a message as `part` does."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}" + part + "{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}"
    )


def shows(image: str) -> str:
    return template("{% if part['type'] == 'image' %}" + image + "{% else %}-{% endif %}")


def make_renderer(chat_template: str, names: Sequence[str] = SPECIAL) -> Renderer:
    """`names` are the tokens that the model's config.json takes for start, image, end and video."""
    tokenizer = make_tokenizer(64, special=SPECIAL, chat_template=chat_template)
    start, image, end, video = map(tokenizer.convert_tokens_to_ids, names)
    vision = Vision(
        start_token_id=start,
        image_token_id=image,
        end_token_id=end,
        video_token_id=video,
        patch_size=14,
        merge_size=2,
        min_pixels=784,
        max_pixels=7_840,
    )
    images = {"min_pixels": 784, "max_pixels": 7_840}
    section = {"max_prompt_tokens": 64, "max_response_tokens": 64, "images": images}
    return Renderer(tokenizer, RendererSection.model_validate(section), vision)


def test_an_image_between_its_own_tokens_passes() -> None:
    assert make_renderer(shows("picture 1: <start><image><end>")).vision is not None


@pytest.mark.parametrize(
    ("chat_template", "names", "fault"),
    [
        (shows(""), SPECIAL, r"0 placeholders '<image>' .* for one image: .*user\\n--<\|im_end"),
        (shows("<start><image><image><end>"), SPECIAL, "2 placeholders '<image>'"),
        (shows("<start><image><end>"), (START, VIDEO, END, IMAGE), "0 placeholders '<video>'"),
        (shows("<start><image>"), SPECIAL, "as '<start><image>-', .* '<start><image><end>'"),
        (shows("<start><image><end>"), (END, IMAGE, START, VIDEO), "it '<end><image><start>'"),
        (
            template("{{ part + 1 }}"),
            SPECIAL,
            "of a message with one image the chat template refused",
        ),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", SPECIAL, "0 placeholders"),
    ],
)
def test_other_templates_and_ids_are_refused_with_both(
    chat_template: str, names: Sequence[str], fault: str
) -> None:
    with pytest.raises(ConfigError, match=f"{fault}.*config.json"):
        make_renderer(chat_template, names)
