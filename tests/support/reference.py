"""The synchronous algorithm in one function: what the loop must equal at `max_staleness: 0`."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from raylearner.actors.engines.scripted import RandomTokens
from raylearner.config.schema import RendererSection, RunConfig
from raylearner.data import load_prompts
from raylearner.replay.groups import episode_seed
from raylearner.replay.sampler import PromptSource
from raylearner.tokenization.renderer import Renderer
from raylearner.types import Sampling


def reference_loop(config: RunConfig, model_folder: Path) -> tuple[list[float], dict[str, Any]]:
    """Sample, score, step, one after the other; the losses and the parameters at the end."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).eval()
    renderer = Renderer.from_pretrained(str(model_folder), RendererSection())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learner.learning_rate, weight_decay=0.0
    )
    script = RandomTokens(vocab_size=200, max_tokens=24)
    prompts = load_prompts(config.data.train, system_prompt=config.data.system_prompt)
    source = PromptSource(prompts, config.run.seed)
    losses, group_id = [], 0
    for _ in range(config.run.num_steps):
        episodes = []
        for _ in range(config.replay.groups_per_step):
            prompt_ids = renderer.render(prompts[source.next_index()].messages)
            group = []
            for index in range(config.replay.group_size):
                seed = episode_seed(config.run.seed, group_id, index, 0)
                sampling = Sampling(max_tokens=64, seed=seed)
                tokens, behavior = asyncio.run(script.complete(prompt_ids, sampling))
                ends = [i for i, t in enumerate(tokens) if t in renderer.end_token_ids]
                size = ends[0] + 1 if ends else len(tokens)
                group.append((prompt_ids, tokens[:size], behavior[:size], 1 - abs(size - 12) / 12))
            rewards = np.array([reward for *_, reward in group])
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            episodes += list(zip(group, advantages, strict=True))
            group_id += 1
        num_tokens = sum(len(tokens) for (_, tokens, _, _), _ in episodes)
        total = torch.zeros((), dtype=torch.float64)
        for (prompt_ids, tokens, behavior, _), advantage in episodes:
            logits = model(torch.tensor([prompt_ids + tokens])).logits[0, len(prompt_ids) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            recorded = torch.tensor(np.array(behavior, np.float32), dtype=torch.float64)
            weight = (logprobs.detach() - recorded).exp().clamp(max=2.0)
            total = total - (weight * (logprobs - logprobs.detach()).exp() * advantage).sum()
        loss = total / num_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()
