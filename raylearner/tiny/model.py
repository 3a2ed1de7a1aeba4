"""A small random model generated at startup: Qwen2, a tokenizer of single bytes, a ChatML template."""

from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from raylearner.config.model_files import head_errors
from raylearner.config.schema import TinyModel
from raylearner.errors import ConfigError
from raylearner.tiny.tokenizer import END_OF_TURN, PAD, TAGS, make_tokenizer

__all__ = ["END_OF_TURN", "PAD", "TAGS", "make_tiny_model", "make_tokenizer"]


def make_tiny_model(config: TinyModel, folder: Path, *, seed: int) -> Path:
    """Write a model directory that transformers and vLLM load; the same seed gives the same bytes."""
    for problem in head_errors(config):
        raise ConfigError(f"{problem.key}: {problem.text}")
    if config.vision is not None:
        from raylearner.tiny.vision_model import make_tiny_vision_model

        return make_tiny_vision_model(config, config.vision, folder, seed=seed)
    tokenizer = make_tokenizer(config.max_length)
    end, pad = (tokenizer.get_vocab()[token] for token in (END_OF_TURN, PAD))
    model_config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=config.tie_embeddings,
        attention_dropout=0.0,
        initializer_range=0.5 * config.hidden_size**-0.5,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(model_config)
    with torch.no_grad():
        # Embeddings with twice the layers' scale: copying is learned in half the steps.
        model.model.embed_tokens.weight.mul_(2)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
