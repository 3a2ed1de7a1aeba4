"""The loader: merging, YAML's numbers, and every problem at once with its place."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from minimal import problems_of
from snapshots import assert_snapshot

from raylearner.config.changed_keys import REMOVED_KEYS, RENAMED_KEYS, changed_keys
from raylearner.config.document import parse
from raylearner.config.loader import load, load_section
from raylearner.config.problems import ConfigProblems, Where
from raylearner.config.report import derived, resolved_yaml, worst_staleness
from raylearner.config.schema import RunConfig, TinyModel
from raylearner.errors import ConfigError
from raylearner.jobs.sweep.section import SweepSection

BASE = """\
model: {kind: tiny}
data:
  train: {kind: calculator}
environment: {kind: tool_use}
actors:
  engine: {kind: vllm, max_model_tokens: 512}
"""


@pytest.fixture
def base(tmp_path: Path) -> str:
    return write(tmp_path, BASE, name="base.yaml")


def write(folder: Path, text: str, *, name: str = "config.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def problems(paths: list[str], overrides: list[str] | None = None) -> list[str]:
    """The report's lines without its end, `place  message` with single spaces."""
    with pytest.raises(ConfigError) as caught:
        load(paths, overrides or [])
    *lines, last = str(caught.value).splitlines()
    count = len(lines)
    assert last == f"{count} problem{'s' * (count != 1)}; nothing was started."
    return [" ".join(line.split()) for line in lines]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("1e-6", 1e-6), ("1E5", 1e5), ("1_000", 1000.0), ("2.", 2.0), (".5", 0.5)),
        *(("+3", 3.0), ("010", 10.0), ("0x10", 16.0), ("0o17", 15.0)),
    ],
)
def test_numbers_follow_yaml_1_2_in_files_and_overrides(
    base: str, tmp_path: Path, text: str, number: float
) -> None:
    overlay = write(tmp_path, f"learner: {{learning_rate: {text}}}")
    assert load([base, overlay], []).learner.learning_rate == number
    assert load([base], [f"learner.learning_rate={text}"]).learner.learning_rate == number


def test_a_whole_number_may_be_written_with_an_exponent(base: str) -> None:
    config = load([base], ["cluster.object_store_bytes=4e8"])
    assert config.cluster.object_store_bytes == 400_000_000
    (line,) = problems([base], ["cluster.object_store_bytes=1e-1"])
    assert line.endswith("must be a whole number, got 0.1")


@pytest.mark.parametrize("text", ["yes", "on", "1", "'true'"])
def test_only_true_and_false_are_booleans(base: str, text: str) -> None:
    (line,) = problems([base], [f"observability.tensorboard={text}"])
    assert "must be true or false, got" in line


def test_text_and_null_follow_yaml_1_2(base: str) -> None:
    texts = {text: text for text in ("on", "no", "2024-01-01", "1:30")}
    for text, value in (texts | dict.fromkeys(("null", "~", "Null", ""))).items():
        assert load([base], [f"data.system_prompt={text}"]).data.system_prompt == value


def test_arguments_of_users_get_no_word_for_null_by_accident(base: str) -> None:
    key = "actors.engine.arguments"
    engine = "actors.engine={kind: scripted, script: 'a:B'}"
    assert set(problems_of(base, [engine, f"{key}={{a: None, b: [none]}}"])) == {
        f"{key}.a",
        f"{key}.b.0",
    }
    arguments = f"{key}={{a: 'None', b: ['none'], c: null, d: off}}"
    loaded = load([base], [engine, arguments]).actors.engine.model_dump()["arguments"]
    assert loaded == {"a": "None", "b": ["none"], "c": None, "d": "off"}


def test_a_choice_named_none_is_not_null(base: str) -> None:
    advantage = load([base], ["learner.advantage.normalize=none"]).learner.advantage
    assert advantage.model_dump()["normalize"] == "none"


def test_files_merge_left_to_right_and_overrides_win(base: str, tmp_path: Path) -> None:
    overlay = write(tmp_path, "replay: {group_size: 4}\nlearner: {betas: [0.8, 0.9]}\n")
    config = load([base, overlay], ["replay.group_size=6", "replay.group_size=5"])
    assert config.replay.group_size == 5
    assert config.replay.groups_per_step == 16
    assert config.learner.betas == (0.8, 0.9)


def test_another_kind_replaces_the_section_and_the_order_of_overrides_does_not_matter(
    base: str,
) -> None:
    for overrides in (
        ["model.kind=pretrained", "model.path=owner/name"],
        ["model.path=owner/name", "model.kind=pretrained"],
    ):
        assert load([base, base], overrides).model.kind == "pretrained"
    config = load([base], ["model.num_layers=3"])
    assert isinstance(config.model, TinyModel)
    assert config.model.num_layers == 3


def test_a_default_kind_and_a_default_greedy_temperature_survive_partial_sections(
    base: str,
) -> None:
    config = load([base], ["learner.loss.clip_low=0.1", "evaluation.sampling.max_turn_tokens=9"])
    loss = config.learner.loss.model_dump()
    assert (loss["kind"], loss["clip_low"]) == ("decoupled_ppo", 0.1)
    assert config.evaluation is not None
    assert config.evaluation.sampling.temperature == 0.0
    assert config.evaluation.sampling.max_turn_tokens == 9


def test_evaluations_take_unset_keys_from_sampling_and_stay_greedy(
    base: str, tmp_path: Path
) -> None:
    overrides = [
        "sampling.max_turn_tokens=7",
        "sampling.temperature=0.8",
        "evaluation.sampling.top_k=5",
    ]
    config = load([base], overrides)
    assert config.evaluation is not None
    sampling = config.evaluation.sampling
    assert (sampling.temperature, sampling.max_turn_tokens, sampling.top_k) == (0.0, 7, 5)
    saved = write(tmp_path, resolved_yaml(config), name="saved.yaml")
    assert load([saved], []).evaluation == config.evaluation
    assert load([base], ["evaluation=null"]).evaluation is None


def test_several_samples_per_prompt_are_sampled_as_in_training(base: str) -> None:
    several = ["sampling.temperature=0.8", "evaluation.samples_per_prompt=4"]
    several.append("data.evaluation={kind: calculator, split: evaluation}")
    evaluation = load([base], several).evaluation
    assert evaluation is not None
    assert evaluation.sampling.temperature == 0.8
    evaluation = load([base], [*several, "evaluation.sampling.temperature=0.5"]).evaluation
    assert evaluation is not None
    assert evaluation.sampling.temperature == 0.5
    found = problems([base], [*several, "evaluation.sampling.temperature=0"])
    assert len(found) == 1
    assert "evaluation.sampling.temperature" in found[0]
    assert "samples_per_prompt=4" in found[0]


def test_evaluation_sets_take_unset_keys_from_the_evaluation(base: str, tmp_path: Path) -> None:
    sets = """
    evaluation:
      every_steps: 10
      sampling: {top_k: 5}
      sets:
        - {name: hard, data: {kind: calculator, seed: 2}, samples_per_prompt: 4}
        - {name: easy, data: {kind: calculator}, every_steps: 2, sampling: {temperature: 0.5}}
    """
    config = load([base, write(tmp_path, sets, name="sets.yaml")], ["sampling.temperature=0.8"])
    assert config.evaluation is not None
    hard, easy = config.evaluation.sets
    assert (hard.every_steps, easy.every_steps) == (10, 2)
    assert (hard.sampling.temperature, easy.sampling.temperature) == (0.8, 0.5)
    assert (hard.sampling.top_k, easy.samples_per_prompt) == (5, 1)
    assert [part.name for part in config.held_out] == ["hard", "easy"]
    saved = write(tmp_path, resolved_yaml(config), name="saved.yaml")
    assert load([saved], []).evaluation == config.evaluation
    found = problems([base, str(tmp_path / "sets.yaml")], ["evaluation.sets.1.name=hard"])
    assert len(found) == 1
    assert "evaluation.sets.1.name" in found[0]


def test_another_kind_of_file_is_one_problem_that_says_what_to_do(
    base: str, tmp_path: Path
) -> None:
    sweep = write(tmp_path, "name: s\nbase: [x.yaml]\naxes: []\nseeds: [0]", name="sweep.yaml")
    verl = write(tmp_path, "actor_rollout_ref: {}\ntrainer: {}", name="verl.yaml")
    for files, advice in (([sweep], "raylearner sweep"), ([base, verl], "raylearner convert")):
        with pytest.raises(ConfigProblems) as refused:
            load(files, [])
        (problem,) = refused.value.problems
        assert advice in problem.text
    with pytest.raises(ConfigProblems) as refused:
        load_section(base, SweepSection)
    (problem,) = refused.value.problems
    assert "`base`" in problem.text


def test_an_override_reaches_into_a_list_by_position(base: str, tmp_path: Path) -> None:
    rewards = "rewards: {functions: [{kind: f1}, {kind: exact_match, weight: 2}]}"
    overlay = write(tmp_path, rewards)
    config = load([base, overlay], ["rewards.functions.1.weight=3"])
    assert [(f.kind, f.weight) for f in config.rewards.functions] == [
        ("f1", 1.0),
        ("exact_match", 3.0),
    ]


def test_all_problems_are_reported_at_once_in_order_with_their_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
run: {num_steps: "3"}
model:
  kind: tny
data:
  train: {kind: jsonl}
environment:
  tools: [calculator]
learner:
  learning_rte: 1
  advantage:
    normalize: grup
  betas: [0.9]
replay:
  max_staleness: -1
  learning_rate: 3
actors:
  engine:
    kind: vllm
    frobnicate: 1
""",
    )
    lines = problems([path], ["learner.loss.clip_high=no", "nonsense", "run.keep_last=[1"])
    assert lines == [
        f"{path}:1 run.num_steps: must be a whole number, got '3'",
        f"{path}:3 model.kind: unknown kind 'tny'; must be one of 'tiny', 'pretrained'; did you mean 'tiny'?",
        f"{path}:5 data.train.path: required, but missing",
        f"{path}:6 environment.kind: required, but missing; must be one of 'single_turn', 'tool_use', 'openai_proxy', 'custom'",
        f"{path}:9 learner.learning_rte: unknown key; did you mean 'learning_rate'?",
        f"{path}:11 learner.advantage.normalize: must be one of 'group', 'batch' or 'none', got 'grup'; did you mean 'group'?",
        f"{path}:12 learner.betas.1: required, but the list is shorter",
        f"{path}:14 replay.max_staleness: must be >= 0, got -1",
        f"{path}:15 replay.learning_rate: unknown key; did you mean 'learner.learning_rate'?",
        f"{path}:19 actors.engine.frobnicate: unknown key; valid keys: kind, dtype, "
        "head_dtype, max_model_tokens, max_sequences, memory_fraction, kv_cache_gib, tensor_parallel_size, "
        "eager, sleep, extra_arguments",
        "override learner.loss.clip_high=no: must be a number, got 'no'",
        "override nonsense: must read section.key=value",
        "override run.keep_last=[1: is not valid YAML: expected ',' or ']', but got '<stream end>'",
    ]


def test_a_message_has_the_value_once(base: str) -> None:
    tools = "environment={kind: tool_use, tools: [{kind: search, url: foo}]}"
    (line,) = problems([base], [tools])
    assert line.endswith("must be like http://host:port, got 'foo'")
    data = "data.train={kind: jsonl, path: rows.jsonl, image_mark: ''}"
    assert problems([base], [data])[0].endswith("data.train.image_mark: must not be empty")


def test_places_are_aligned(base: str, tmp_path: Path) -> None:
    overlay = write(tmp_path, "replay: {group_size: 0}")
    with pytest.raises(ConfigProblems) as caught:
        load([base, overlay], ["run.seed=-1"])
    first, second, _ = str(caught.value).splitlines()
    assert first.index("replay.group_size") == second.index("run.seed")
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_a_problem_inside_a_mapping_override_names_its_key(base: str) -> None:
    (line,) = problems([base], ["model={kind: tiny, layers: 3}"])
    assert line.startswith("override model={kind: tiny, layers: 3}: model.layers: unknown key")


def test_a_clash_points_at_the_line_that_set_the_key(base: str, tmp_path: Path) -> None:
    overlay = write(tmp_path, "weights:\n  every_steps: 9\n")
    (line,) = problems([base, overlay])
    assert line.startswith(f"{overlay}:2 weights.every_steps: must be <= ")


LAUGHS = b"".join(
    b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1) if i else b"1"] * 9))
    for i in range(9)
)


BROKEN = [
    (b"", ""),
    (b"# only a comment\n", ""),
    (b"- a\n- b\n", ":1"),
    (b"\nword\n", ":2"),
    (b"run:\n\tname: x\n", ":2"),
    (b"run: {a: 1\n", ":2"),
    (b"run: 1\n---\nrun: 2\n", ":2"),
    (b"run: 1\n# \xff\n", ":2"),
    (b"run: \x00\n", ""),
    (b"run: {}\nrun: {}\n", ":2 run"),
    (b"a: &x {b: 1}\nc:\n  <<: *x\n", ":3 c"),
    (LAUGHS, ""),
    (b"run: {seed: !!python/name:os.system x}\n", ":1 run.seed"),
    (b"run: &r\n  seed: *r\n", ":2 run.seed"),
    (b"run: {1: 2}\n", ":1 run"),
    (b"run:\nmodel: 3\n", ":1 run"),
]
REFUSED = [
    ("model.path=/x", "model.path"),
    ("run.name=../x", "run.name"),
    ("run.name='a b?#c'", "run.name"),
    ("run.name=é", "run.name"),
    ("run.name=''", "run.name"),
    ("data.system_prompt=" + "[" * 60 + "]" * 60, ""),
    ("data.system_prompt=" + "[" * 1000 + "]" * 1000, ""),
    ("run.seed=4294967296", "run.seed"),
    ("learner.betas=[0.9]", "learner.betas.1"),
]
NULL_WORDS = [
    (f"{key}={word}", key)
    for key in (
        *("environment.observation_tag", "cluster.address", "data.system_prompt", "run.dir"),
        "replay.max_concurrent_groups",
    )
    for word in ("None", "none", "NONE", "nil", '"None"', "'null'", '"~"')
]


def broken(content: bytes) -> list[str]:
    Path("broken.yaml").write_bytes(content)
    return problems(["broken.yaml"])


@pytest.mark.parametrize(("content", "place"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_refused_at_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert any(line.startswith(f"broken.yaml{place}") for line in broken(content))


@pytest.mark.parametrize(
    ("override", "key"),
    [*REFUSED, *NULL_WORDS],
    ids=[*range(len(REFUSED)), *(override for override, _ in NULL_WORDS)],
)
def test_an_invalid_value_is_refused_at_its_key(base: str, override: str, key: str) -> None:
    assert list(problems_of(base, [override])) == [key]


def test_messages(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for content, _ in BROKEN for line in broken(content) if "missing" not in line]
    for override, _ in REFUSED:
        lines += [line for line in problems([base], [override]) if len(line) < 300]
    assert_snapshot("config_files", "\n".join(lines) + "\n")


def test_a_missing_file_suggests_its_neighbour(base: str) -> None:
    (line,) = problems([base.replace("base", "bace")])
    assert line.endswith("no such file; did you mean 'base.yaml'?")
    (line,) = problems([str(Path(base).parent)])
    assert line.endswith("is a directory; name a YAML file")


def test_what_never_ends_is_refused_and_what_a_shell_gives_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (str(tmp_path / "fifo"), "/dev/zero"):
        (line,) = problems([path])
        assert "regular file" in line
    reading, writing = os.pipe()
    os.write(writing, BASE.encode())
    os.close(writing)
    assert load([f"/dev/fd/{reading}"], []).environment.kind == "tool_use"
    os.close(reading)


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_an_old_key_is_refused_with_its_line_and_new_name(old: str, new: str) -> None:
    parts = old.replace("*", "0").split(".")
    value: Any = "true"
    for part in reversed(parts):
        value = [value] if part == "0" else {part: value}
    tree, _ = parse(json.dumps(value), Where(0, 0, "old.yaml"))
    assert tree is not None
    (problem,) = changed_keys(tree)
    assert (str(problem.where), problem.key) == ("old.yaml:1", ".".join(parts))
    assert repr(".".join([*parts[:-1], new])) in problem.message


def test_a_renamed_and_a_removed_key_are_reported_once(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = problems([base], ["replay.should_play_greedy=true"])
    assert line.endswith("was renamed to 'replay.play_greedy'")
    monkeypatch.setitem(REMOVED_KEYS, "replay.pause", "set replay.max_staleness: 0")
    (line,) = problems([base], ["replay.pause=true"])
    assert line == "override replay.pause=true: was removed; set replay.max_staleness: 0"


def test_resolved_yaml_loads_again_unchanged(base: str, tmp_path: Path) -> None:
    overrides = [
        *("run.name='1e5'", "learner.learning_rate=1e-6", "data.system_prompt='yes: \"é\"'"),
        "actors.engine={kind: scripted, script: 'a:B', arguments: {a: 'None', b: 'off', c: 'nil'}}",
    ]
    config = load([base], overrides)
    text = resolved_yaml(config)
    assert text.startswith("# git: ")
    assert "# python: 3." in text
    assert load([write(tmp_path, text)], []) == config


def test_derived_numbers_follow_from_the_sections(base: str) -> None:
    config = load([base], ["replay.max_staleness=3", "replay.groups_per_step=4"])
    numbers = dict(derived(config))
    assert numbers["replay capacity"].startswith("16 groups")
    assert numbers["episodes per step"].startswith("32 ")
    assert numbers["tokens per step"].startswith("at most 16,384")
    assert worst_staleness(config) == 4
    synchronous = load([base], ["replay.max_staleness=0"])
    assert worst_staleness(synchronous) == 0
    assert isinstance(config, RunConfig)
