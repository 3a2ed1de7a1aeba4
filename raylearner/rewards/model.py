"""A sequence-classification model as a reward: prompt and completion in, one number out.

Calls that arrive while the model is busy form the next batch.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from raylearner.config.rewards import RewardModel
from raylearner.errors import ConfigError, RewardError
from raylearner.tokenization.control import ControlTokens
from raylearner.tokenization.template import ChatTemplate, frame_token_ids

Conversation = tuple[dict[str, str], ...]
"""Messages with `role` and `content`, the policy's included."""


class Classifier:
    """One model on one device, in evaluation mode. Not thread-safe."""

    def __init__(self, section: RewardModel) -> None:
        """Raises `ConfigError` for a missing model, or one without an output `label`."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizers: Any = AutoTokenizer
        models: Any = AutoModelForSequenceClassification
        self._section = section
        try:
            self._tokenizer = tokenizers.from_pretrained(section.path)
            model = models.from_pretrained(section.path, dtype=getattr(torch, section.dtype))
        except (OSError, ValueError) as error:
            is_local = Path(section.path).is_dir()
            where = "cannot be read" if is_local else "is neither a directory nor on the hub"
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"rewards.functions: path {section.path!r} {where}: {reason}"
            ) from error
        if section.label >= model.config.num_labels:
            raise ConfigError(
                f"rewards.functions: label {section.label} of {section.path!r}, which has"
                f" {model.config.num_labels} outputs"
            )
        ends = [i for i in (self._tokenizer.eos_token_id,) if i is not None]
        self._control = ControlTokens(self._tokenizer, frame_token_ids(self._tokenizer, {}, ends))
        has_template = bool(self._tokenizer.chat_template)
        self._template = ChatTemplate(self._tokenizer, {}, self._control) if has_template else None
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(section.device).eval()

    def encode(self, conversation: Conversation) -> list[int]:
        """Return tokens by the model's chat template; without one, of the contents joined.

        Control tokens that messages spell are text, so a completion cannot open another turn. Raises
        `RewardError` for more than `max_tokens`, `RenderError` when the template refuses the messages.
        """
        if self._template is not None:
            token_ids = self._control.encode(self._template.render(conversation, opens=False))
        else:
            text = "".join(message["content"] for message in conversation)
            token_ids = self._tokenizer(text, split_special_tokens=True)["input_ids"]
        if len(token_ids) > self._section.max_tokens:
            raise RewardError(
                f"prompt and completion have {len(token_ids)} tokens, max_tokens of"
                f" {self._section.path!r} is {self._section.max_tokens}"
            )
        return token_ids

    def score(self, sequences: Sequence[list[int]]) -> list[float]:
        """Return one reward per sequence, at most `max_batch` of them at once, longest first."""
        import torch

        order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
        rewards = [0.0] * len(sequences)
        size = self._section.max_batch
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            padded = self._tokenizer.pad(
                {"input_ids": [sequences[index] for index in chosen]},
                padding_side="right",
                return_tensors="pt",
            ).to(self._section.device)
            with torch.inference_mode():
                logits = self._model(
                    input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]
                ).logits
            values: list[float] = logits[:, self._section.label].float().tolist()
            for index, value in zip(chosen, values, strict=True):
                rewards[index] = value
        return rewards


class ModelQueue:
    """Gives concurrent calls their rewards, a batch at a time. Loads the model at first use."""

    def __init__(self, section: RewardModel) -> None:
        self._section = section
        self._classifier: Classifier | None = None
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self.num_batches = 0

    async def start(self) -> None:
        """Load the model. Raises `ConfigError` as `Classifier` does."""
        async with self._turn:
            if self._classifier is None:
                loop = asyncio.get_running_loop()
                self._classifier = await loop.run_in_executor(
                    self._thread, Classifier, self._section
                )

    async def score(self, conversation: Conversation) -> float:
        """Return the model's output for one episode. Raises `RewardError` when it is too long."""
        if self._classifier is None:
            await self.start()
        assert self._classifier is not None, "start loads it"
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._classifier.encode(conversation), future))
        try:
            async with self._turn:
                while not future.done():
                    await self._score_batch(self._classifier)
            return future.result()
        finally:
            future.cancel()

    async def _score_batch(self, classifier: Classifier) -> None:
        """Score one batch of waiting calls, oldest first; the call that holds the turn does it for all."""
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]
        batch = self._waiting[: self._section.max_batch]
        loop = asyncio.get_running_loop()
        sequences = [tokens for tokens, _ in batch]
        self.num_batches += 1
        try:
            rewards = await loop.run_in_executor(self._thread, classifier.score, sequences)
        except Exception as error:  # of the model: the failure of every episode in the batch
            for _, future in batch:
                if not future.done():
                    future.set_exception(RewardError(f"{type(error).__name__}: {error}"))
            return
        for (_, future), reward in zip(batch, rewards, strict=True):
            if not future.done():
                future.set_result(reward)
