"""The model of the transformers engine: decode steps over key-value slots, images and weights.

Legend: `B` running requests, `L` tokens so far, `N` rows of a fill, `V` vocab.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.cache_utils import Cache
from transformers.utils.logging import disable_progress_bar

from raylearner.actors.engines.drawing import Draw, draw_tokens
from raylearner.config.schema import TransformersEngine as TransformersEngineSection
from raylearner.errors import EngineError, RenderError, WeightTransferError
from raylearner.images import decode_fitted
from raylearner.tokenization.vision import Vision, deal_out, load_image_processor
from raylearner.weights.checksums import Checksums, plain
from raylearner.weights.update import Probe, WeightUpdate
from raylearner.weights.verification import verify_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Row = tuple[tuple[int, ...], tuple[bytes, ...]]
"""Token ids, in the learner's form, and the images of their placeholders."""


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRow(Draw):
    """A running request in the form that the model takes."""

    images: tuple[bytes, ...] = ()
    offset: int = 0
    """Difference between positions and places behind images, which take fewer positions than tokens."""
    is_cached: bool = False
    """Whether its slot holds the keys and values of all its tokens but the last; set by the model."""


class DecodeModel:
    """Owns a model on one device, its key-value slots, its tokenizer and its weights.

    Running requests occupy the first slots, in order.
    """

    def __init__(self, config: TransformersEngineSection, model_path: str) -> None:
        """Load the model. Raises `EngineError` for layers that the slots cannot cache."""
        disable_progress_bar()
        self._device = torch.device(config.device)
        self.image_encoder = ImageEncoder.from_pretrained(model_path)
        is_text_only = self.image_encoder is None
        family: Any = AutoModelForCausalLM if is_text_only else AutoModelForImageTextToText
        model: Any = family.from_pretrained(
            model_path, dtype=DTYPES[config.dtype], attn_implementation="sdpa"
        )
        kinds = set(
            getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
        )
        if kinds != {"full_attention"}:
            raise EngineError(
                f"layers of kind {', '.join(sorted(kinds))} need another cache; use kind 'vllm'"
            )
        self._model: Any = model.to(self._device).eval()
        self._cache: Any = KeyValueSlots(config.max_sequences, config.max_model_tokens)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        self._decoded: dict[int, str] = {}
        ends = model.generation_config.eos_token_id
        self.end_token_ids = {ends} if isinstance(ends, int) else set(ends or ())

    def free(self) -> None:
        self._model = self._cache = None

    def move_slot(self, source: int, target: int, num_tokens: int) -> None:
        self._cache.move(source, target, num_tokens)

    def ends_with(self, token_ids: Sequence[int], num_sampled: int, stop: Sequence[str]) -> bool:
        """Return whether the last token completes a stop string, special tokens included.

        Only a token with the last character of a stop string, or part of a character, is decoded
        together with those before it.
        """
        last = token_ids[-1]
        if last not in self._decoded:
            self._decoded[last] = self._decode([last])
        text = self._decoded[last]
        if "\ufffd" not in text and not any(string[-1] in text for string in stop):
            return False
        # A token has at least one byte, so more tokens than bytes are not needed.
        size = min(num_sampled, max(len(string.encode()) for string in stop))
        tail = self._decode(token_ids[len(token_ids) - size :])
        return any(string in tail for string in stop)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    @torch.inference_mode()
    def step(self, rows: Sequence[DecodeRow]) -> tuple[list[int], list[float]]:
        """Return one more token for each running request, and its log-probability."""
        first = next((i for i, r in enumerate(rows) if not r.is_cached), len(rows))
        if first < len(rows):
            self._fill(rows, first)
        device = self._device
        lengths = torch.tensor([len(r.token_ids) for r in rows], device=device)
        last = torch.tensor([r.token_ids[-1] for r in rows], device=device)
        places = torch.arange(int(lengths.max()), device=device)
        offsets = torch.tensor([r.offset for r in rows], device=device)
        self._cache.extend(lengths - 1)
        logits = self._model(
            input_ids=last[:, None],
            position_ids=(lengths - 1 + offsets)[:, None],
            attention_mask=(places < lengths[:, None])[:, None, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]  # [B, V]
        tokens, logprobs = draw_tokens(logits, rows)
        return tokens.tolist(), logprobs.tolist()

    def _fill(self, rows: Sequence[DecodeRow], first: int) -> None:
        """Cache all tokens but the last, from slot `first` on; equal rows run once."""
        prefixes = [(tuple(r.token_ids[:-1]), r.images) for r in rows[first:]]
        unique = {prefix: index for index, prefix in enumerate(dict.fromkeys(prefixes))}
        longest = max(len(token_ids) for token_ids, _ in unique)
        if longest:
            padded = [[*token_ids, *[0] * (longest - len(token_ids))] for token_ids, _ in unique]
            positions = torch.arange(longest, device=self._device).expand(len(padded), -1)
            features: dict[str, Any] = {}
            if self.image_encoder is not None and any(images for _, images in unique):
                positions, features = self.image_encoder.encode(self._model, list(unique), longest)
            input_ids = torch.tensor(padded, device=self._device)
            causal = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril()
            indices = torch.tensor([unique[prefix] for prefix in prefixes], device=self._device)
            self._cache.fill(first, indices)
            self._model.base_model(  # padding is on the right, and its output is never read
                input_ids=input_ids,
                attention_mask=causal.expand(len(padded), 1, -1, -1),
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                **features,
            )
        for row in rows[first:]:
            row.is_cached = True

    @torch.no_grad()
    def load_weights(self, payload: Mapping[str, Any]) -> list[str]:
        """Copy all tensors of the file into the model and return their names.

        Raises `WeightTransferError` when one is missing, unknown or has another shape.
        """
        tensors = load_file(payload["path"])
        if len(tensors) != payload["num_tensors"]:
            raise WeightTransferError(
                f"{payload['path']} has {len(tensors)} tensors, but {payload['num_tensors']} were "
                "written"
            )
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        if unknown := sorted(tensors.keys() - parameters.keys()):
            raise WeightTransferError(f"weights refused: the model has no {', '.join(unknown[:5])}")
        # A tied tensor is sent under either name.
        received = {id(parameters[name]) for name in tensors}
        if missing := sorted(n for n, p in parameters.items() if id(p) not in received):
            raise WeightTransferError(f"weights refused: missing: {', '.join(missing[:5])}")
        for name, tensor in tensors.items():
            if tensor.shape != parameters[name].shape:
                raise WeightTransferError(
                    f"weights refused: {name} is {tuple(parameters[name].shape)}, "
                    f"got {tuple(tensor.shape)}"
                )
            parameters[name].copy_(tensor)
        return list(tensors)

    def verify_weights(self, update: WeightUpdate, names: Sequence[str]) -> int:
        """Compare the checksums of the model's parameters with those sent, tensor by tensor."""
        sent = update.payload["checksums"]
        sums = Checksums()
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name in sent.keys() & parameters.keys():
            sums.add(name, parameters[name])
        parts = [[name, name, "all of it", *plain(found)] for name, found in sums.result().items()]
        report = {"names": names, "parts": parts, "repacked": [], "computed": [], "arrived": {}}
        return verify_weights(sent, [report], policy_version=update.policy_version)

    @torch.inference_mode()
    def probe_logprobs(self, probe: Probe) -> list[list[float]]:
        """Return log-probabilities of the last tokens of each probe, by a plain forward."""
        found: list[list[float]] = []
        for token_ids, images, num_scored in probe.prompts():
            inputs: dict[str, Any] = {}
            if images and self.image_encoder is not None:
                token_ids = tuple(self.image_encoder.expand(token_ids, images))
                row = (token_ids, images)
                positions, features = self.image_encoder.encode(self._model, [row], len(token_ids))
                inputs = {"position_ids": positions, **features}
            ids = torch.tensor([token_ids], device=self._device)
            logits = self._model(ids, use_cache=False, **inputs).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            found.append(logprobs[len(logprobs) - num_scored :].tolist())
        return found


class KeyValueSlots(Cache):
    """Owns keys and values of the running requests, one slot each, tokens from the left.

    A step reads the first `B` slots and writes each row's next place; a fill writes whole rows.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        super().__init__(layers=[])
        self._shape = (num_slots, max_tokens)
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._places = torch.empty(0)  # [B] where a step writes
        self._width = 0
        self._filled: tuple[int, Tensor] | None = None

    def extend(self, places: Tensor) -> None:
        """Make the next forward a step that writes these places of the first slots."""
        self._filled = None
        self._places = places
        self._rows = torch.arange(len(places), device=places.device)
        self._width = int(places.max()) + 1

    def fill(self, first: int, indices: Tensor) -> None:
        """Make the next forward write its rows, picked by `indices`, to the slots from `first` on."""
        self._filled = (first, indices)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        for pair in self._tensors:
            for tensor in pair:
                tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self._tensors):
            self._tensors.append((self._new(key_states), self._new(value_states)))
        stored = self._tensors[layer_idx]
        if self._filled is not None:
            first, indices = self._filled
            for tensor, states in zip(stored, (key_states, value_states), strict=True):
                tensor[first : first + len(indices), :, : states.shape[2]] = states[indices]
            return key_states, value_states
        for tensor, states in zip(stored, (key_states, value_states), strict=True):
            tensor[self._rows, :, self._places] = states[:, :, 0]
        keys, values = (tensor[: len(self._rows), :, : self._width] for tensor in stored)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are given to every forward

    def _new(self, states: Tensor) -> Tensor:
        # Zeros: masked values are still multiplied, and must be finite.
        num_slots, max_tokens = self._shape
        _, heads, _, width = states.shape
        with torch.inference_mode(mode=False):
            return states.new_zeros(num_slots, heads, max_tokens, width)


@dataclass(frozen=True, slots=True)
class ImageEncoder:
    """A model's image processor and its numbering of positions; immutable."""

    vision: Vision
    processor: Any

    @classmethod
    def from_pretrained(cls, path: str) -> Self | None:
        """Return the encoder of the model in `path`; None for a text-only one."""
        vision = Vision.from_pretrained(path)
        return None if vision is None else cls(vision, load_image_processor(path))

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Raises `EngineError` for images that do not fit, or do not match the placeholders."""
        try:
            return self.vision.expand(token_ids, images)
        except RenderError as error:
            raise EngineError(str(error)) from error

    def offset(self, token_ids: Sequence[int], images: Sequence[bytes]) -> int:
        """Return the difference between position and place of a token after these."""
        return int(self._positions(token_ids, images).max()) + 1 - len(token_ids)

    def encode(
        self, model: Any, rows: Sequence[Row], longest: int
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return positions `[3, N, L]`, and the trunk's arguments for the images of all rows."""
        device = model.device
        positions = np.zeros((3, len(rows), longest), np.int64)
        for index, (token_ids, images) in enumerate(rows):
            positions[:, index, : len(token_ids)] = self._positions(token_ids, images)
        shown = [image for _, images in rows for image in images]
        distinct = list(dict.fromkeys(shown))
        pixels = self.processor(images=[decode_fitted(i) for i in distinct], return_tensors="pt")
        features = model.base_model.get_image_features(
            pixels["pixel_values"].to(device),
            pixels["image_grid_thw"].to(device),
            return_dict=True,
        )
        deal_out(features, [distinct.index(image) for image in shown])
        found = torch.from_numpy(positions).to(device)
        return found, {"mm_encoder_outputs": {"image": features}}

    def _positions(self, token_ids: Sequence[int], images: Sequence[bytes]) -> np.ndarray:
        grids = [self.vision.grid(image) for image in images]
        return self.vision.positions(np.asarray(token_ids, np.int32), grids)
