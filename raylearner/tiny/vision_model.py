"""A small random vision-language model generated at startup: Qwen2.5-VL with the tiny model's tokenizer."""

from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils.logging import disable_progress_bar

from raylearner.config.model import TINY_MAX_PIXELS, TINY_MIN_PIXELS, TinyModel, TinyVision
from raylearner.tiny.model import END_OF_TURN, PAD, make_tokenizer

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
PATCH_SIZE = 14
MERGE_SIZE = 2
WINDOW_SIZE = 112
"""Side in pixels of the squares within which all vision blocks but the last attend."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's own, without its default system message."""


def make_tiny_vision_model(
    config: TinyModel, vision: TinyVision, folder: Path, *, seed: int
) -> Path:
    """Write a model directory that transformers and vLLM load; the same seed gives the same bytes."""
    tokenizer = make_tokenizer(
        config.max_length,
        special=(VISION_START, VISION_END, IMAGE, VIDEO),
        chat_template=CHAT_TEMPLATE,
    )
    ids = tokenizer.get_vocab()
    model_config = Qwen2_5_VLConfig(
        text_config=_text(config, len(tokenizer), end=ids[END_OF_TURN], pad=ids[PAD]),
        vision_config={
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_heads,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "window_size": WINDOW_SIZE,
            "fullatt_block_indexes": [vision.num_layers - 1],
            "out_hidden_size": config.hidden_size,
            "hidden_act": "silu",
        },
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=config.tie_embeddings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(model_config)
    with torch.no_grad():
        # As in the text-only tiny model: copying is learned in half the steps.
        model.get_input_embeddings().get_parameter("weight").mul_(2)
    model.generation_config = GenerationConfig(
        eos_token_id=[ids[END_OF_TURN], ids[PAD]], pad_token_id=ids[PAD]
    )
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": TINY_MIN_PIXELS, "longest_edge": TINY_MAX_PIXELS},
        patch_size=PATCH_SIZE,
        merge_size=MERGE_SIZE,
    )
    processor.save_pretrained(folder)
    return folder


def _text(config: TinyModel, vocab_size: int, *, end: int, pad: int) -> dict[str, object]:
    half = config.hidden_size // config.num_heads // 2
    space = 3 * half // 8
    return {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "max_position_embeddings": config.max_length,
        "attention_dropout": 0.0,
        "initializer_range": 0.5 * config.hidden_size**-0.5,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            # Shares of time, rows and columns, as in the large models.
            "mrope_section": [half - 2 * space, space, space],
        },
    }
