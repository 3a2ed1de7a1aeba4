"""Tiny models with their own tokenizer, and two engines for the whole session, one after another."""

import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from raylearner.actors.vllm_engine import VllmEngine
from raylearner.config.schema import VllmEngine as VllmEngineSection

PAD, END = "<|pad|>", "<|end|>"
WHOLE = "</t>!"
"""A token whose text goes on after a closing tag."""
VOCABULARY = [PAD, END, WHOLE, "\n", *(chr(code) for code in range(32, 127))]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def token_id(text: str) -> int:
    return VOCABULARY.index(text)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(
        models.WordLevel({text: i for i, text in enumerate(VOCABULARY)}, unk_token=PAD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def make_model(*, is_tied: bool, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(VOCABULARY),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=1024,
            tie_word_embeddings=is_tied,
            initializer_range=0.1,
            eos_token_id=token_id(END),
            pad_token_id=token_id(PAD),
            bos_token_id=None,
        )
    ).eval()


def make_checkpoint(folder: Path, *, is_tied: bool) -> Path:
    make_model(is_tied=is_tied).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def section(**changes: object) -> VllmEngineSection:
    return VllmEngineSection.model_validate(
        {
            "kind": "vllm",
            "dtype": "float32",
            "max_model_tokens": 512,
            "max_sequences": 32,
            "kv_cache_gib": 1,
            **changes,
        }
    )


def make_engine(checkpoint: Path, **changes: object) -> VllmEngine:
    return VllmEngine(
        section(**changes),
        model_path=str(checkpoint),
        seed=0,
        weight_transport="shared_files",
    )


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), is_tied=True)


@pytest.fixture(scope="session")
def untied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("untied"), is_tied=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tied_engine(tied_checkpoint: Path) -> AsyncIterator[VllmEngine]:
    async for engine in _running(tied_checkpoint):
        yield engine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def untied_engine(untied_checkpoint: Path) -> AsyncIterator[VllmEngine]:
    async for engine in _running(untied_checkpoint):
        yield engine


async def _running(checkpoint: Path) -> AsyncIterator[VllmEngine]:
    engine = make_engine(checkpoint)
    started = time.monotonic()
    await engine.start()
    logging.getLogger(__name__).info("engine started in %.1f s", time.monotonic() - started)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
