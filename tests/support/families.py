"""Tiny random models of the vision-language families that `model.kind: tiny` does not make."""

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    GenerationConfig,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from raylearner.tiny.model import PAD, make_tokenizer

GLM_SPECIAL = (
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    *(f"<|{part}{kind}|>" for kind in ("image", "video") for part in ("begin_of_", "", "end_of_")),
)
GLM_CHAT_TEMPLATE = (
    "[gMASK]<sop>"
    "{% for message in messages %}"
    "<|{{ 'observation' if message.role == 'tool' else message.role }}|>\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""A turn of the assistant ends where the next message begins."""


def make_qwen3(source: Path, folder: Path) -> Path:
    """Qwen3-VL, with the patches of `source` and features that enter its first layer too."""
    config = AutoConfig.from_pretrained(source)
    text, vision = config.text_config, config.vision_config
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={
                "vocab_size": text.vocab_size,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [6, 5, 5],
                    "mrope_interleaved": True,
                },
            },
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_heads": 2,
                "patch_size": vision.patch_size,
                "out_hidden_size": 64,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            vision_start_token_id=config.vision_start_token_id,
            vision_end_token_id=config.vision_end_token_id,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def make_glm4v(folder: Path) -> Path:
    """GLM-4.1V, with the special tokens that its processor looks for, and its own image processor."""
    tokenizer = make_tokenizer(1024, special=GLM_SPECIAL, chat_template=GLM_CHAT_TEMPLATE)
    tokenizer.eos_token = PAD
    ids = tokenizer.get_vocab()
    torch.manual_seed(0)
    model = Glm4vForConditionalGeneration(
        Glm4vConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 3, 3],
                },
            },
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_heads": 2,
                "image_size": 56,
                "out_hidden_size": 64,
            },
            image_token_id=ids["<|image|>"],
            video_token_id=ids["<|video|>"],
            image_start_token_id=ids["<|begin_of_image|>"],
            image_end_token_id=ids["<|end_of_image|>"],
            video_start_token_id=ids["<|begin_of_video|>"],
            video_end_token_id=ids["<|end_of_video|>"],
        )
    )
    model.generation_config = GenerationConfig(
        eos_token_id=[ids[PAD], ids["<|user|>"], ids["<|observation|>"]], pad_token_id=ids[PAD]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 2 * 784, "longest_edge": 200_000}
    Glm4vImageProcessorPil(size=size).save_pretrained(folder)
    return folder
