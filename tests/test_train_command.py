"""`train.py` as a process of its own under torchrun, also with wandb."""

import os
import signal
import socket
import time

import psutil
import pytest

# What `SmallRuns.start` trains, for the runs of this process that it is compared with.
DEBUG = ["--model.family=llama3", "--model.flavor=debug", "--engine.plan=none"]
ENDLESS = ["--training.steps=100000", "--lr_schedule.decay=none"]


def wait_until(condition, process):
    while not condition():
        assert process.poll() is None, f"exit code {process.returncode}\n{process.stderr.read()}"
        time.sleep(0.02)


def has_logged(runs, name, step):
    metrics = runs.path(name) / "metrics.jsonl"
    return lambda: metrics.exists() and f'"step": {step},' in metrics.read_text()


@pytest.mark.nightly
def test_torchrun_restarts_a_worker_that_was_killed_and_the_run_equals_an_uninterrupted_one(small_runs):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=2", "--monitor-interval=0.1")
    often = ["--training.steps=40", "--checkpoint.interval_steps=1", "--lr_schedule.decay=none"]
    process = small_runs.start("run", *often, launcher=launcher)
    wait_until(has_logged(small_runs, "run", 2), process)
    [worker] = psutil.Process(process.pid).children()
    worker.kill()
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert printed.count("resuming after step") == 1 and printed.count("the run is complete") == 1
    assert [line["step"] for line in small_runs.steps("run")] == list(range(1, 41))
    assert small_runs("whole", *DEBUG, *often) == 0
    small_runs.assert_same("run", "whole", step=40)


@pytest.mark.nightly
def test_torchrun_forwards_a_signal_to_a_run_that_reports_to_wandb(small_runs, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(small_runs.folder))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ("-m", "torch.distributed.run", f"--master-port={port}", "--max-restarts=2")
    process = small_runs.start("run", *ENDLESS, "--metrics.wandb=offline", launcher=launcher)
    wait_until(has_logged(small_runs, "run", 2), process)
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate()
    [saved] = small_runs.saved("run")
    assert list(small_runs.losses("run")) == list(range(1, saved + 1))
    assert "SIGTERM: finishing the steps under way and saving" in errors and "reporting to wandb failed" not in errors
    assert "run the same command to continue" in printed.splitlines()[-1]
    assert process.returncode == 1 and "resuming after step" not in printed  # stopped, not restarted
    page = small_runs.saved_state("run", saved)["wandb_run_id"]
    assert page and len(list((small_runs.path("run") / "wandb").glob(f"offline-run-*-{page}"))) == 1
