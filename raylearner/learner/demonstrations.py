"""Imperfect scripted demonstrations of the calculator task, as token rows for the warm start.

A share of them call the tool and copy its result; the others guess, mostly wrongly. Imitating both
leaves the policy undecided, which is what reinforcement then settles.
"""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from raylearner.config.schema import RendererSection, TinyModel
from raylearner.learner.tiny_model import make_tiny_model
from raylearner.learner.warm_start import warm_start
from raylearner.tokenization.renderer import Renderer
from raylearner.types import Message, Prompt

TokenRowWithMask = tuple[list[int], list[bool]]


def prepare_tiny_model(
    model: TinyModel,
    renderer_section: RendererSection,
    prompts: Sequence[Prompt],
    folder: str,
    seed: int,
) -> float | None:
    """Makes the model directory `folder`; returns the warm start's last loss, None without one."""
    partial = Path(f"{folder}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_tiny_model(model, partial, seed=seed)
    loss = None
    if model.warm_start is not None:
        renderer = Renderer.from_pretrained(str(partial), renderer_section)
        rows = demonstrate(
            prompts,
            renderer,
            num_rows=model.warm_start.num_steps * model.warm_start.batch_size,
            tool_fraction=model.warm_start.tool_fraction,
            seed=seed,
        )
        loss = warm_start(partial, rows, model.warm_start, seed=seed)
    partial.rename(folder)
    return loss


def demonstrate(
    prompts: Sequence[Prompt],
    renderer: Renderer,
    *,
    num_rows: int,
    tool_fraction: float,
    seed: int,
    observation_tag: str = "result",
) -> list[TokenRowWithMask]:
    """`num_rows` pairs of token ids and a mask that is True on what the demonstrator wrote."""
    rng = random.Random(seed)
    rows: list[TokenRowWithMask] = []
    for _ in range(num_rows):
        prompt = rng.choice(prompts)
        expression = str(prompt.columns["expression"])
        token_ids = renderer.render(prompt.messages)
        mask = [False] * len(token_ids)

        def write(text: str, tokens: list[int] = token_ids, mask: list[bool] = mask) -> None:
            written = renderer.encode(text)
            tokens.extend(written)
            mask.extend([True] * len(written))

        if rng.random() < tool_fraction:
            write(f"<calc>{expression}</calc>")
            content = f"<{observation_tag}>{prompt.answer}</{observation_tag}>"
            reply = renderer.render_reply(
                [Message(role="user", content=content)], last_token_id=token_ids[-1]
            )
            token_ids.extend(reply)
            mask.extend([False] * len(reply))
            write(f"<answer>{prompt.answer}</answer>")
        else:
            write(f"<answer>{rng.randint(1, 9999)}</answer>")
        rows.append((token_ids, mask))
    return rows
