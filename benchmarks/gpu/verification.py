"""What verification by checksums costs: the learner's and the engine's, for a random model on one GPU.

The engine's time is that of its receipts: reading every parameter, the call to its workers and the
comparison. The first push also makes the map of where tensors go, and is told apart.
"""

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import Result, model_folder, parser

NUM_PUSHES = 4


def random_weights(folder: Path, dtype: Any, device: str) -> dict[str, Any]:
    """Tensors of a model's names and shapes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.manual_seed(0)
    return {
        name: torch.randn(parameter.shape, dtype=dtype, device=device) * 0.02
        for name, parameter in model.named_parameters()
    }


def learner_seconds(weights: dict[str, Any]) -> list[float]:
    from raylearner.weights.checksums import Checksums

    seconds = []
    for _ in range(6):
        started = time.monotonic()
        sums = Checksums()
        for name, tensor in weights.items():
            sums.add(name, tensor)
        sums.result()
        seconds.append(time.monotonic() - started)
    return seconds[1:]


async def run(arguments: Any, result: Result) -> None:
    import torch

    from raylearner.actors.engines.vllm import VllmEngine
    from raylearner.config.schema import VllmEngine as Section
    from raylearner.weights.transports import discard_files
    from raylearner.weights.transports.shared_files import write_weights
    from raylearner.weights.update import Probe, WeightUpdate

    cpu = arguments.cpu
    folder = model_folder(arguments.out, arguments.size, tokenizer=arguments.model)
    section = Section(
        kind="vllm",
        dtype="bfloat16",
        max_model_tokens=256,
        max_sequences=8,
        memory_fraction=0.4,
        extra_arguments={"load_format": "dummy"},
    )
    engine = await VllmEngine.start(
        section, model_path=str(folder), seed=0, weight_transport="shared_files"
    )
    shared = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="verification_"))
    try:
        weights = random_weights(folder, torch.bfloat16, "cpu" if cpu else "cuda")
        num_parameters = sum(tensor.numel() for tensor in weights.values())
        learner = learner_seconds(weights)
        result.add(num_parameters=num_parameters, learner_s=learner, best_learner_s=min(learner))
        receipts = []
        for version in range(1, NUM_PUSHES + 1):
            with torch.no_grad():
                for tensor in weights.values():
                    tensor.mul_(1.01)
            payload = write_weights(weights.items(), shared, version, torch.bfloat16)
            receipt = await engine.receive(
                WeightUpdate(
                    policy_version=version,
                    transport="shared_files",
                    payload=payload,
                    probe=Probe(token_ids=(), logprobs=(), tolerance=1.0),
                )
            )
            assert receipt.num_verified == len(weights)
            receipts.append(
                {
                    "verify_s": receipt.verify_s,
                    "update_s": receipt.update_s,
                    "pause_s": receipt.pause_s,
                }
            )
            discard_files(payload)
        result.add(
            pushes=receipts,
            first_verify_s=receipts[0]["verify_s"],
            best_verify_s=min(receipt["verify_s"] for receipt in receipts[1:]),
            worst_verify_s=max(receipt["verify_s"] for receipt in receipts[1:]),
            num_tensors=len(weights),
        )
        result.done()
    finally:
        await engine.close()
        shutil.rmtree(shared, ignore_errors=True)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--size", default="2.3B")
    arguments = args.parse_args()
    result = Result(arguments.out, "verification")
    if arguments.cpu:
        arguments.size = "tiny"
    result.add(size=arguments.size)
    asyncio.run(run(arguments, result))


if __name__ == "__main__":
    main()
