"""Low-rank adapters."""

import json
from pathlib import Path
from typing import Literal

from raylearner.config.section import PositiveFloat, PositiveInt, Section
from raylearner.errors import ConfigError


class LoraSection(Section):
    """Adapters are trained and nothing else (LoRA, 2106.09685). A checkpoint's `model/` has them merged, in float32."""

    rank: PositiveInt = 32
    """Inner width of each adapter."""
    alpha: PositiveFloat = 64.0
    """Adapters count alpha / rank times."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get one: all but the head, or those whose names end so (`q_proj`)."""
    path: str | None = None
    """An adapter to go on from, in peft's form; rank, alpha and target_modules are then its own."""

    @property
    def own_keys(self) -> list[str]:
        """Keys set that an adapter to go on from decides itself."""
        if self.path is None:
            return []
        return sorted(self.model_fields_set & {"rank", "alpha", "target_modules"})


def lora_rank(section: LoraSection) -> int:
    """The rank that engines must make room for. Raises `ConfigError` naming the file it is read from."""
    if section.path is None:
        return section.rank
    file = Path(section.path).expanduser() / "adapter_config.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"learner.lora.path: {section.path!r} is no adapter in peft's form: {file}: {error!r}"
        ) from error
