"""Conversion of other projects' configurations: numbers that a user would compute by hand, and bad input."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from pyarrow import parquet
from pydantic import BaseModel
from typer.testing import CliRunner

from raylearner import cli
from raylearner.config.loader import load
from raylearner.config.problems import ConfigProblems
from raylearner.config.schema import RunConfig
from raylearner.config.section import item_type, section_types
from raylearner.convert.conversion import Conversion, convert
from raylearner.convert.settings import ConversionProblems
from raylearner.convert.table import NAMES, load_table

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "conversions"
PROJECT_OF = {
    "verl_grpo.sh": "verl",
    "verl_composed.yaml": "verl",
    "verl_fully_async.sh": "verl",
    "easyr1/config.yaml": "EasyR1",
    "easyr1/run_vl.sh": "EasyR1",
    "trl_grpo.yaml": "TRL",
    "trl_rloo.sh": "TRL",
    "trl_script.py": "TRL",
    "search_r1.sh": "Search-R1",
}


def values(conversion: Conversion) -> dict[str, Any]:
    return {key: entry.value for key, entry in conversion.draft.entries.items()}


def converted(name: str, *overrides: str) -> dict[str, Any]:
    return values(convert(str(FILES / name), overrides=overrides))


def of_text(folder: Path, name: str, text: str, **options: Any) -> Conversion:
    path = folder / name
    path.write_text(text)
    return convert(str(path), **options)


def problems(folder: Path, name: str, text: str) -> list[str]:
    with pytest.raises(ConversionProblems) as raised:
        of_text(folder, name, text)
    return [f"{p.where.line} {p.key}: {p.text}" for p in raised.value.problems]


@pytest.mark.parametrize(("name", "title"), PROJECT_OF.items())
def test_the_project_is_found_and_the_result_loads_but_for_what_is_not_here(
    name: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FILES)
    conversion = convert(name)
    assert conversion.title == title
    assert conversion.unknown == []
    output = tmp_path / "out.yaml"
    output.write_text(conversion.yaml())
    assert yaml.safe_load(output.read_text()).keys() <= RunConfig.model_fields.keys()
    found: list[str] = []
    try:
        load([str(output)], [])
    except ConfigProblems as error:
        found = [problem.text for problem in error.problems]
    assert [
        text for text in found if "no such" not in text and "cannot be imported" not in text
    ] == []


def all_keys(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Keys of the schema, those of lists of sections included, without their positions."""
    for name, field in root.model_fields.items():
        yield f"{prefix}{name}"
        inner = item_type(field.annotation)
        for model in section_types(field.annotation) or (section_types(inner) if inner else []):
            yield from all_keys(model, f"{prefix}{name}.")


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_the_tables_exists_here(name: str) -> None:
    known = set(all_keys(RunConfig))
    rows = load_table(name).rows.values()
    assert [row.key for row in rows if row.fate in ("copy", "to") and row.text not in known] == []
    assert [
        row.key for row in rows if row.fate in ("auto", "no") and not row.text.endswith(".")
    ] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_enters_another_is_read_by_a_rule(name: str) -> None:
    rules = "".join(path.read_text() for path in (ROOT / "raylearner" / "convert").glob("*.py"))
    table = load_table(name)
    keys = [key for key in table.own_rows if table.rows[key].fate == "to"]
    names = {key: key.removesuffix(".*").rpartition(".")[2].removeprefix("vespo_") for key in keys}
    assert [key for key in keys if not re.search(rf"\b{names[key]}\b", rules)] == []


def test_verl_counts_prompts_and_its_schedule_counts_steps() -> None:
    found = converted("verl_grpo.sh")
    assert (found["replay.groups_per_step"], found["replay.group_size"]) == (512, 8)
    assert found["learner.num_mini_batches"] == 512 // 128
    assert found["learner.warmup_steps"] == 0.1 * 200 * 4
    assert (
        found["learner.max_tokens_per_micro_batch"] == (2048 + 4096) * 2 * 2
    )  # two ranks share it
    assert found["learner.context_parallel_size"] == 2
    assert found["replay.max_staleness"] == 0
    assert found["evaluation.samples_per_prompt"] == 4
    assert found["evaluation.before_first_step"] is False


def test_verl_keeps_its_objective() -> None:
    found = converted("verl_grpo.sh")
    assert found["learner.advantage.normalize"] == "none"
    assert (found["learner.loss.clip_low"], found["learner.loss.clip_high"]) == (0.2, 0.28)
    assert found["learner.loss.dual_clip"] == 10.0
    assert found["learner.aggregation"] == "sequence_mean_of_sums_scaled"
    assert found["learner.aggregation_scale"] == 4096
    kl = ("place", "estimator", "straight_through", "coefficient", "reference.kind")
    assert [found[f"learner.kl.{key}"] for key in kl] == ["loss", "k3", True, 0.005, "frozen"]


def test_a_launch_script_is_read_with_its_variables_and_its_unknown_ones_are_named() -> None:
    conversion = convert(str(FILES / "verl_grpo.sh"))
    found = values(conversion)
    assert found["run.name"] == "Qwen2.5-7B-Instruct-grpo"
    assert found["renderer.max_prompt_tokens"] == 2048
    assert (
        found["renderer.max_response_tokens"] == 4096
    )  # not that of the branch that depends on $1
    assert [source["path"] for source in found["data.train"]] == [
        "~/data/gsm8k/train.parquet",
        "~/data/math/train.parquet",
    ]
    assert any("CHECKPOINTS" in note for note in conversion.notes)
    assert [line for line in conversion.lost if "megatron.* (2 settings)" in line]


def test_engines_of_one_gpu_share_it_with_the_learner_and_larger_ones_do_not() -> None:
    shared = converted("verl_grpo.sh")
    assert (shared["learner.num_ranks"], shared["actors.num_actors"]) == (16, 16)
    assert shared["actors.engine.sleep"] is True
    assert shared["weights.transport"] == "ipc"
    apart = converted("verl_grpo.sh", "actor_rollout_ref.rollout.tensor_model_parallel_size=4")
    assert (apart["learner.num_ranks"], apart["actors.num_actors"]) == (8, 2)
    assert "weights.transport" not in apart


def test_a_composed_configuration_resolves_its_interpolations() -> None:
    found = converted("verl_composed.yaml")
    assert found["run.name"] == "ppo-gsm8k"
    assert found["learner.critic.clip"] == 0.4
    assert "learner.critic.path" not in found  # the policy's own model
    assert (found["learner.advantage.gamma"], found["learner.advantage.lam"]) == (0.99, 0.95)
    assert found["learner.warmup_steps"] == 10 * 4 * 2
    assert (found["learner.kl.place"], found["learner.kl.reference.kind"]) == (
        "reward",
        "adapter_off",
    )
    assert found["replay.partial_groups"] == "drop"


def test_fully_asynchronous_training_keeps_its_versions() -> None:
    found = converted("verl_fully_async.sh")
    assert found["replay.groups_per_step"] == 2 * 32
    assert found["learner.num_mini_batches"] == 2
    assert found["weights.every_steps"] == 4
    assert found["replay.max_staleness"] == 5  # ceil(1.5 * 4) - 1
    assert (found["learner.num_ranks"], found["actors.num_actors"]) == (4, 12 // 2)
    assert found["run.num_steps"] == 51200 // 64
    assert found["run.checkpoint_every_steps"] == 5 * 4
    assert found["evaluation.every_steps"] == 10 * 4
    weights, by_row, by_token = found["learner.corrections"]
    assert weights == {"kind": "icepop", "level": "token", "low": 0.5, "high": 5.0}
    assert (by_row["level"], by_row["low"], by_row["high"]) == ("sequence_mean", 0.99, 1.01)
    assert (by_token["level"], by_token["estimator"]) == ("token", "k3")
    assert found["learner.count_rejected"] is False
    behavior = converted("verl_fully_async.sh", "async_training.compute_prox_log_prob=False")
    assert behavior["learner.proximal"] == "behavior"
    assert all(section["kind"] == "rejection" for section in behavior["learner.corrections"])


def test_easyr1_reads_the_file_that_its_command_names() -> None:
    found = converted("easyr1/run_vl.sh")
    assert found["learner.num_mini_batches"] == 512 // 128
    assert found["replay.group_size"] == 5
    assert found["data.train"][0]["path"] == "owner/geometry"
    assert found["data.train"][0]["image_column"] == "images"
    assert (found["learner.loss.ratio_min"], found["learner.loss.ratio_max"]) == (0.8, 5.0)
    assert "learner.kl.place" not in found
    assert found["data.system_prompt"] == "Think first, then put the answer into \\boxed{}."
    plain = converted("easyr1/config.yaml")
    assert (plain["learner.loss.clip_low"], plain["learner.loss.clip_high"]) == (0.2, 0.3)
    assert (plain["learner.kl.place"], plain["learner.kl.coefficient"]) == ("loss", 0.01)
    assert plain["learner.aggregation"] == "sequence_mean_of_means"


def test_trl_counts_completions_and_updates() -> None:
    found = converted("trl_grpo.yaml")
    assert found["replay.groups_per_step"] == 16 * 8 // 8
    assert found["learner.num_mini_batches"] == 8 // 4
    assert found["learner.num_epochs"] == 2
    assert found["run.num_steps"] == 400 // (2 * 2)
    assert found["learner.warmup_steps"] == 0.1 * 400
    assert found["learner.corrections"] == [{"kind": "tis", "level": "token", "high": 3.0}]
    assert found["learner.aggregation_scale"] == 1024
    assert found["learner.kl.value_limit"] is None
    assert found["learner.kl.reference.every_steps"] == 64 // 4
    assert [f["weight"] for f in found["rewards.functions"]] == [1.0, 0.2]
    assert found["rewards.functions"][1]["kind"] == "my_package.rewards:brevity"


def test_trl_rloo_takes_the_processes_of_its_launcher() -> None:
    found = converted("trl_rloo.sh")
    assert found["replay.groups_per_step"] == 8 * 4 * 2 // 4
    assert found["learner.loss.kind"] == "sequence_ratio"
    assert (found["learner.reward.clip_low"], found["learner.reward.clip_high"]) == (-1, 1)
    assert [found[f"learner.kl.{key}"] for key in ("place", "estimator", "coefficient")] == [
        "reward",
        "k1",
        0.05,
    ]
    assert found["learner.lora.target_modules"] == ["q_proj", "v_proj"]


def test_a_script_of_trl_is_read_and_never_run() -> None:
    conversion = convert(str(FILES / "trl_script.py"))
    found = values(conversion)
    assert found["learner.learning_rate"] == 3e-6  # the default of its argument
    assert found["replay.group_size"] == 8
    assert (found["learner.loss.kind"], found["learner.loss.ratio_max"]) == ("cispo", 5.0)
    assert [f["kind"] for f in found["rewards.functions"]] == ["my_rewards:reward_len", "model"]
    assert any("output_dir" in note for note in conversion.notes)


def test_search_r1_counts_trajectories_and_limits_turns() -> None:
    found = converted("search_r1.sh")
    assert found["learner.num_mini_batches"] == 512 * 5 // 256
    assert found["renderer.max_prompt_tokens"] == 2048
    assert found["renderer.max_response_tokens"] == 4 * 500 + 3 * 500
    assert found["environment.tools"][0]["url"] == "http://127.0.0.1:8000"
    assert found["learner.loss.dual_clip"] is None
    assert found["learner.kl.place"] == "reward"
    assert found["data.train"][0]["answer_column"] == "reward_model.ground_truth.target"


def test_reward_functions_of_other_projects_are_called_from_their_files() -> None:
    functions = converted("verl_grpo.sh")["rewards.functions"]
    assert functions[0]["kind"] == "raylearner.rewards.foreign:verl_score"
    assert functions[0]["arguments"] == {"path": "rewards/math_reward.py", "name": "score"}


def test_defaults_of_hydra_include_files_beside(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "mine.yaml").write_text("ppo_mini_batch_size: 64\noptim: {lr: 3e-6}\n")
    text = (
        "defaults:\n  - ppo_trainer\n  - actor@actor_rollout_ref.actor: mine\n  - _self_\n"
        "data: {train_batch_size: 128}\nactor_rollout_ref: {actor: {optim: {lr: 5e-6}}}\n"
    )
    found = values(of_text(tmp_path, "main.yaml", text))
    assert found["learner.num_mini_batches"] == 2
    assert found["learner.learning_rate"] == 5e-6


def test_variables_without_quotes_are_split_into_words(tmp_path: Path) -> None:
    text = (
        "N=4\nDATA=\"\n  data.train_batch_size=64 \\\n  trainer.experiment_name='a b' \"\n"
        "MORE=$DATA\nenv KEY=secret A.B=1 python -m verl.trainer.main_ppo $MORE $DATA actor_rollout_ref.rollout.n=$N\n"
    )
    conversion = of_text(tmp_path, "run.sh", text)
    assert conversion.unknown == []
    found = values(conversion)
    assert (found["replay.groups_per_step"], found["replay.group_size"]) == (64, 4)


def test_a_configuration_named_by_a_script_is_found_beside_its_module(tmp_path: Path) -> None:
    (tmp_path / "recipe" / "config").mkdir(parents=True)
    (tmp_path / "recipe" / "config" / "mine.yaml").write_text("data: {train_batch_size: 64}\n")
    command = "python -m recipe.main_mine --config-path=config --config-name={} algorithm.gamma=1\n"
    found = of_text(tmp_path, "run.sh", command.format("mine"))
    assert values(found)["replay.groups_per_step"] == 64
    away = of_text(tmp_path, "away.sh", command.format("yours.yaml") + "true\n", project="verl")
    assert any("config/yours.yaml" in note for note in away.notes)


def test_the_rows_of_a_file_that_is_here_turn_epochs_into_steps(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}] * 64
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    text = (
        f"python -m verl.trainer.main_ppo data.train_files={tmp_path}/train.parquet"
        " data.train_batch_size=8 trainer.total_epochs=3 custom_reward_function.path=mine.py\n"
    )
    found = values(of_text(tmp_path, "run.sh", text))
    assert found["run.num_steps"] == 3 * 64 / 8
    assert found["data.train"][0]["answer_column"] == "reward_model.ground_truth"


def test_truncated_sampling_is_marked_where_probabilities_are_compared() -> None:
    found = convert(str(FILES / "trl_grpo.yaml"), overrides=["top_k=50"])
    assert dict(found.draft.decisions)["sampling.top_k"]
    alone = convert(str(FILES / "trl_grpo.yaml"), overrides=["top_k=50", "use_vllm=false"])
    assert "sampling.top_k" not in dict(alone.draft.decisions)


def test_all_problems_of_a_file_are_reported_with_their_lines(tmp_path: Path) -> None:
    text = (
        "data:\n  train_batch_size: many\n  max_prompt_length: ${data.max_promt_length}\n"
        "actor_rollout_ref:\n  rollout:\n    n: ${.k}\n    k: ${actor_rollout_ref.rollout.n}\n"
        "    top_p: ${mul:1,2}\n    temperature: ${oc.env:HEAT}\n"
    )
    found = problems(tmp_path, "bad.yaml", text)
    assert len(found) == 5
    assert found[0] == "2 data.train_batch_size: must be a whole number, got 'many'"
    assert "max_prompt_length" in found[1]
    assert "->" in found[2] or "->" in found[3]
    assert any("'mul'" in line for line in found)
    assert any("HEAT" in line for line in found)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("empty.yaml", " \n", "is empty"),
        ("list.yaml", "- a\n- b\n", "must be a mapping"),
        ("broken.yaml", "data: [1,\n", "is not valid YAML"),
        ("merge.yaml", "a: &a {x: 1}\ndata:\n  <<: *a\n", "merge keys"),
        ("twice.yaml", "data: 1\ndata: 2\n", "occurs twice"),
        ("tag.yaml", "data: !!python/name:os.system ''\n", "tag"),
        ("loop.yaml", "data: &a\n  b: *a\n", "refers to itself"),
        ("other.yaml", "kind: Deployment\nspec: {}\n", "no settings of verl"),
        ("none.sh", "echo hello\n", "no command that trains"),
        (
            "sft.sh",
            "python -m verl.trainer.sft_trainer a.b=1 a.c=2 a.d=3\n",
            "no command that trains",
        ),
        ("none.py", "print(1)\n", "no GRPOConfig"),
        ("broken.py", "x = (\n", "is not valid Python"),
        ("note.txt", "hello\n", "must be a .yaml"),
        ("away.yaml", "defaults: [somewhere]\nactor_rollout_ref: {}\n", "not beside this file"),
        ("away.sh", "python -m verl.trainer.main config=none.yaml a.b=1\n", "copy it there"),
    ],
)
def test_a_file_that_cannot_be_converted_is_answered_in_one_line(
    name: str, text: str, expected: str, tmp_path: Path
) -> None:
    found = problems(tmp_path, name, text)
    assert len(found) == 1
    assert expected in found[0]


def test_a_missing_file_a_directory_and_an_unknown_project_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("")
    for path, expected in ((tmp_path / "rum.sh", "'run.sh'"), (tmp_path, "regular file")):
        with pytest.raises(ConversionProblems, match=expected):
            convert(str(path))
    with pytest.raises(ConversionProblems, match="'verl'"):
        convert(str(FILES / "verl_grpo.sh"), project="verk")
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConversionProblems, match="regular file"):
        convert(str(tmp_path / "pipe.yaml"))


def test_unknown_keys_are_listed_with_the_nearest_and_left_out(tmp_path: Path) -> None:
    text = "python -m verl.trainer.main_ppo data.train_batch_sise=4 +my.own=1 data.x=2\n"
    conversion = of_text(tmp_path, "run.sh", text)
    assert "'data.train_batch_size'" in conversion.unknown[0]
    assert "my.own" in conversion.unknown[1]


@pytest.mark.parametrize(
    "text",
    ["'" * 50, "a=$(", "${", "$((", "((((" * 200, "if\n" * 500, "x=(" * 100, "\\\n" * 100, "<<E\n"],
)
def test_broken_scripts_end_in_a_problem(text: str, tmp_path: Path) -> None:
    assert len(problems(tmp_path, "run.sh", f"{text}\n")) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.yaml",
            "".join(f"k{i}: ${{k{i - 1}}}${{k{i - 1}}}\n" for i in range(1, 60)) + "k0: xxxx\n",
        ),
        ("b.yaml", "".join(f"a.b{i}: 1\n" for i in range(5_000))),
        ("c.sh", "X=xx\n" + "X=$X$X\n" * 60),
        ("d.sh", "X=(a b)\n" + 'X+=("${X[@]}" "${X[@]}")\n' * 60),
        (
            "e.py",
            "A0 = 1\n"
            + "".join(f"A{i} = [A{i - 1}] * 3 + [A{i - 1}, A{i - 1}]\n" for i in range(1, 20)),
        ),
        (
            "f.py",
            "A0 = 1\n"
            + "".join(f"A{i} = [{', '.join([f'A{i - 1}'] * 9)}]\n" for i in range(1, 20)),
        ),
    ],
)
def test_values_that_would_grow_without_end_are_left_out(
    name: str, text: str, tmp_path: Path
) -> None:
    text += {
        "yaml": "data: {train_files: x.parquet}\nactor_rollout_ref: {rollout: {n: 4}}\n",
        "sh": "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 data.train_files=$X\n",
        "py": "GRPOConfig(num_generations=4, reward_weights=A19)\n",
    }[name.rpartition(".")[2]]
    path = tmp_path / name
    path.write_text(text)
    if name == "a.yaml":
        with pytest.raises(ConversionProblems, match="longer than"):
            convert(str(path))
        return
    conversion = convert(str(path))
    assert values(conversion)["replay.group_size"] == 4
    assert len(conversion.report()) < 10_000_000


def test_terminal_escapes_of_a_file_stay_inert(tmp_path: Path) -> None:
    text = "python -m verl.trainer.main_ppo algorithm.adv_estimator='\x1b[31mred' data.x=1\n"
    conversion = of_text(tmp_path, "run.sh", text)
    assert "\x1b" not in conversion.yaml()
    yaml.safe_load(conversion.yaml())


def test_tools_of_a_file_beside_are_carried(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(
        "tools:\n"
        "  - class_name: verl.tools.search_tool.SearchTool\n"
        "    config: {retrieval_service_url: 'http://host:8000/retrieve', topk: 5}\n"
        "  - class_name: my.Tool\n    tool_schema: {function: {name: weather}}\n"
    )
    text = (
        "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.multi_turn.enable=True"
        " actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"
        " actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5\n"
    )
    conversion = of_text(tmp_path, "run.sh", text)
    found = values(conversion)
    search, other = found["environment.tools"]
    assert search == {"kind": "search", "form": "retrieve", "url": "http://host:8000", "top_n": 5}
    assert other == {"kind": "function", "function": "my_tools:weather"}
    assert "my.Tool" in dict(conversion.draft.decisions)["environment.tools"]
    assert found["environment.max_turns"] == 4


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"touch {mark}\nX=$(touch {mark})`touch {mark}`\npython -m verl.trainer.main_ppo data.seed=$X\n"
    of_text(tmp_path, "run.sh", text)
    assert not mark.exists()


def test_an_override_after_the_end_of_the_command_is_named(tmp_path: Path) -> None:
    text = "python -m verl.trainer.main_ppo \\\n  data.seed=1 \\\n  # data.seed=2 \\\n  trainer.nnodes=2\n"
    conversion = of_text(tmp_path, "run.sh", text)
    assert any("trainer.nnodes=2" in note for note in conversion.notes)


def test_the_command_writes_yaml_and_reports_to_standard_error(tmp_path: Path) -> None:
    output = tmp_path / "new" / "my.yaml"
    arguments = ["convert", str(FILES / "search_r1.sh"), "trainer.nnodes=2", "--out", str(output)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "reward_model.structure_format_score = 0.2" in result.stderr
    assert yaml.safe_load(output.read_text())["learner"]["num_ranks"] == 16
    again = CliRunner().invoke(cli.app, arguments)
    assert again.exit_code == 2
    assert "exists" in again.stderr
    shown = CliRunner().invoke(cli.app, ["convert", str(FILES / "trl_grpo.yaml")])
    assert yaml.safe_load(shown.stdout)["replay"]["group_size"] == 8


def test_a_value_that_needs_a_decision_is_marked_and_listed() -> None:
    conversion = convert(str(FILES / "trl_script.py"))
    marked = [line for line in conversion.yaml().splitlines() if "# DECIDE" in line]
    assert len(marked) - 1 == len(conversion.draft.decisions) - 1 >= 3
    assert "replay.max_staleness" in conversion.report()
