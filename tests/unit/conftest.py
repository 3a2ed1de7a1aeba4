"""Fixtures of the unit tests: one tiny tokenizer for the whole session."""

from pathlib import Path

import pytest
from hypothesis import settings

from raylearner.config.schema import RendererSection
from raylearner.tokenization.renderer import Renderer

# Claims are about behaviour: how long an example takes depends on what else the machine does.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from raylearner.tiny.model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(max_length=512).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(tokenizer_folder: Path) -> Renderer:
    return Renderer.from_pretrained(str(tokenizer_folder), RendererSection())
