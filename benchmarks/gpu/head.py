"""The log-probability head alone, 32k tokens by 150k vocabulary: chunked against all logits at once.

The unchunked form is the plain one: logits in float32, log_softmax, gather, entropy. Where it does
not fit, it is measured on half as many tokens, and both memory and time are scaled to the whole.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.common import Result, parser
from raylearner.learner.model.logprobs import chunked_logprobs

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states, head and targets to a loss."""


def chunked(chunk_tokens: int, *, should_compile: bool) -> Head:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logprobs, entropy = chunked_logprobs(
            hidden, weight, targets, chunk_tokens=chunk_tokens, should_compile=should_compile
        )
        return -(logprobs + 0.01 * entropy).sum()

    return loss


def unchunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    scores = torch.log_softmax((hidden @ weight.t()).float(), -1)
    entropy = -(scores.exp() * scores).sum(1)
    return -(scores.gather(1, targets[:, None]).squeeze(1) + 0.01 * entropy).sum()


def unchunked_without_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    scores = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return -scores.gather(1, targets[:, None]).sum()


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)


def measure(
    head: Head, *, num_tokens: int, vocab: int, width: int, device: str, repeats: int
) -> dict[str, float]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(num_tokens, width, device=device, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocab, width, device=device, dtype=dtype)).requires_grad_()
    targets = torch.randint(vocab, (num_tokens,), device=device)
    times = []
    base = 0
    for repeat in range(repeats + 1):
        hidden.grad = weight.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        started = time.monotonic()
        loss = head(hidden, weight, targets)
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat:
            times.append(time.monotonic() - started)
    peak = torch.cuda.max_memory_allocated() - base if device == "cuda" else 0
    return {
        "num_tokens": num_tokens,
        "seconds": min(times),
        "peak_gib": peak / 2**30,
        "loss_per_token": loss.item() / num_tokens,
    }


def main() -> None:
    arguments = parser(__doc__).parse_args()
    result = Result(arguments.out, "head")
    device = "cpu" if arguments.cpu else "cuda"
    size = {"vocab": 150_000, "width": 1536} if device == "cuda" else {"vocab": 3000, "width": 64}
    wanted = 32_768 if device == "cuda" else 256
    heads: dict[str, Head] = {
        "chunked_1024": chunked(1024, should_compile=False),
        "chunked_2048": chunked(2048, should_compile=False),
        "chunked_4096": chunked(4096, should_compile=False),
        "unchunked": unchunked,
        "unchunked_without_entropy": unchunked_without_entropy,
    }
    if device == "cuda":
        heads["liger"] = liger
        heads["chunked_compiled_1024"] = chunked(1024, should_compile=True)
        heads["chunked_compiled_2048"] = chunked(2048, should_compile=True)
        heads["chunked_compiled_4096"] = chunked(4096, should_compile=True)
    for name, head in heads.items():
        num_tokens = wanted
        while True:
            try:
                numbers = measure(head, num_tokens=num_tokens, device=device, repeats=3, **size)
                break
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                num_tokens //= 2
            except Exception as error:
                numbers = {"error": f"{type(error).__name__}: {error}"[:500]}
                break
        scale = wanted / num_tokens
        if "seconds" in numbers:
            numbers |= {
                "seconds_at_32k": numbers["seconds"] * scale,
                "peak_gib_at_32k": numbers["peak_gib"] * scale,
            }
        result.add(**{name: numbers})
        if device == "cuda":
            torch.cuda.empty_cache()
    plain = result.content["unchunked"]
    for name in heads:
        ours = result.content[name]
        if name.startswith("chunked") and "seconds" in ours:
            result.add(
                **{
                    f"{name}_to_unchunked": {
                        "time": ours["seconds_at_32k"] / plain["seconds_at_32k"],
                        "memory": ours["peak_gib_at_32k"] / max(plain["peak_gib_at_32k"], 1e-9),
                    }
                }
            )
    result.done()


if __name__ == "__main__":
    main()
