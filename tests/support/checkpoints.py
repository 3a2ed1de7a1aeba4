"""Small models with random weights and a tokenizer of single characters, as vLLM loads them."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from raylearner.weights.probe import probe_tokens
from raylearner.weights.update import Probe

PAD, END = "<|pad|>", "<|end|>"
WHOLE = "</t>!"
"""A token whose text goes on after a closing tag."""
VOCABULARY = [PAD, END, WHOLE, "\n", *(chr(code) for code in range(32, 127))]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


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
            eos_token_id=VOCABULARY.index(END),
            pad_token_id=VOCABULARY.index(PAD),
            bos_token_id=None,
        )
    ).eval()


def make_checkpoint(folder: Path, *, is_tied: bool) -> Path:
    make_model(is_tied=is_tied).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def make_probe(model: Qwen2ForCausalLM, version: int, *, tolerance: float) -> Probe:
    """What an engine that holds the model's weights must answer, on the model's own device."""
    token_ids = probe_tokens(
        seed=0,
        policy_version=version,
        vocab_size=len(VOCABULARY),
        special_token_ids=[VOCABULARY.index(PAD), VOCABULARY.index(END)],
        num_tokens=32,
    )
    logprobs: list[tuple[float, ...]] = []
    for ids in token_ids:
        tensor = torch.tensor([ids], device=model.device)
        scores = model(tensor).logits[0, :-1].log_softmax(-1)
        logprobs.append(tuple(scores.gather(1, tensor[0, 1:, None])[:, 0].tolist()))
    return Probe(token_ids=token_ids, logprobs=tuple(logprobs), tolerance=tolerance)
