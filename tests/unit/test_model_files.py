"""Checkpoints whose config.json and files disagree on the head are named by check and at load."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from raylearner.config.model_files import model_errors
from raylearner.errors import ConfigError
from raylearner.learner.model.loading import load_model


def change(folder: Path, *, is_tied: bool, head: torch.Tensor | None) -> Path:
    """The head that is given, or none, beside what the config says."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if head is not None:
        tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
    return folder


def test_a_head_that_contradicts_the_config_is_refused_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, is_tied=True)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, is_tied=True, head=table.clone())
    assert not list(model_errors(folder))  # a redundant copy
    load_model(str(folder), dtype=torch.float32)
    for is_tied, head in ((True, table + 0.01), (False, None)):
        change(folder, is_tied=is_tied, head=head)
        (fault,) = model_errors(folder)
        assert "tie_word_embeddings" in fault
        assert "lm_head.weight" in fault
        with pytest.raises(ConfigError, match="tie_word_embeddings"):
            load_model(str(folder), dtype=torch.float32)
    change(folder, is_tied=False, head=table + 0.01)
    assert not list(model_errors(folder))
