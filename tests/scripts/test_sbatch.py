"""The Slurm script of the example for several machines, run by bash beside stand-ins for Slurm's own programs."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from torchround.config import load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "configs" / "qwen3_32b_4_machines.sbatch"
# Writes down how it was called, waits for the signal that ends it or for a file, and ends with the code in that file.
SRUN = """#!/bin/bash
printf '%s\\n' "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@" > srun.txt
trap 'echo 1 > code.txt' TERM
mv srun.txt called.txt
until [ -s code.txt ]; do sleep 0.01; done
exit "$(cat code.txt)"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else echo "$@" > scontrol.txt; fi
"""


@pytest.fixture
def job(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "4"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), "--training.steps", "10"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        yield process
        (tmp_path / "code.txt").write_text("9\n", encoding="utf-8")


def called(folder, job):
    while not (folder / "called.txt").exists():
        assert job.poll() is None, "the script ended before it called srun"
    return (folder / "called.txt").read_text(encoding="utf-8").splitlines()


def test_torchrun_starts_one_process_a_node_that_meet_at_the_first_one(tmp_path, job):
    grace_s, *arguments = called(tmp_path, job)
    start = arguments.index("torchrun")
    assert all(argument.startswith("--") for argument in arguments[:start])
    # torchrun's own parser, so that each option is one that it has.
    parsed = get_args_parser().parse_args(arguments[start + 1 :])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("4", "1", 3)
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.rdzv_id) == ("c10d", "node7:23456", "123456")
    assert parsed.training_script == "train.py"
    assert parsed.training_script_args[:2] == ["--config", "qwen3_32b_4_machines.toml"]
    assert parsed.training_script_args[2:] == ["--training.steps", "10"]
    # The time before the limit at which Slurm sends its signal has room for the step and its save.
    assert f"--signal=B:TERM@{int(grace_s) + 60}\n" in SCRIPT.read_text(encoding="utf-8")


def test_a_signal_reaches_the_run_and_queues_the_job_again(tmp_path, job):
    called(tmp_path, job)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 1
    assert (tmp_path / "scontrol.txt").read_text(encoding="utf-8") == "requeue 123456\n"


@pytest.mark.parametrize("code", [0, 2])
def test_a_run_that_ends_by_itself_ends_the_job(tmp_path, job, code):
    called(tmp_path, job)
    (tmp_path / "code.txt").write_text(f"{code}\n", encoding="utf-8")
    assert job.wait(60) == code
    assert not (tmp_path / "scontrol.txt").exists()


def test_the_nodes_are_as_many_as_the_config_plans_for():
    config = load_config(SCRIPT.with_suffix(".toml"))
    assert f"#SBATCH --nodes={config.machines.planned}\n" in SCRIPT.read_text(encoding="utf-8")
