"""The GPU benchmark and its command, run on virtual devices: every line of them but CUDA's own calls."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import GPU
from torchround.pipeline.costs import Costs, LayerCost
from torchround.run.engine_parts import build_store
from torchround.run.hardware import find_hardware

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
HIDE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name in {hidden} else find(name, *rest))
"""
SMALL = [
    *("--devices", "cpu", "--flavor", "debug", "--seq-len", "32", "--micro-batch-size", "1"),
    *("--micro-batches", "2", "--steps", "1", "--device-memory-gib", "0.02", "--copy-mib", "1"),
]
JUNIT = """<testsuites><testsuite><testcase name="one"/><testcase name="two"><failure message="no"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    assert GPU.run("gpu", [*SMALL, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_every_run_is_measured_and_predicted(report: dict) -> None:
    runs = report["runs"]
    assert [(run["update"], run["workers"], run["compile"]) for run in runs] == [
        ("sync", 1, "auto"),
        ("sync", 1, "false"),
        ("sync", 2, "auto"),
        ("async", 1, "auto"),
        ("async", 2, "auto"),
    ]
    for run in [*runs, report["resident"]]:
        assert run["tokens_per_s"] > 0 and run["step_s"] > 0
        assert all(map(math.isfinite, run["losses"]))
    for run in runs:
        assert run["predicted_from_measured_layers_s"] > 0
        assert run["allocations_after_warm_up"] == 0 and run["first_step_s"] > 0
        assert 0 < run["device_peak_gib"] <= run["predicted_device_gib"]
        times = run["per_device_and_step"]
        assert times["busy_s"] > 0 and times["uploaded_bytes"] > 0


def test_the_rival_computes_the_same_loss_from_the_same_weights_and_tokens(report: dict) -> None:
    """The first loss comes before any update. The later ones may differ by the noise of bf16."""
    assert report["resident"]["losses"][0] == pytest.approx(report["first_loss"], rel=1e-3)
    assert report["resident"]["losses"][1] == pytest.approx(report["runs"][3]["losses"][1], rel=1e-2)


@pytest.mark.parametrize(
    ("options", "settings"), [([], ["auto", "auto", False]), (["--compile", "true"], [True, True])]
)
def test_runs_are_compiled_as_users_runs_are_and_one_beside_the_first_is_not(
    monkeypatch: pytest.MonkeyPatch, options: list[str], settings: list[bool | str]
) -> None:
    """A benchmark of eager layers and of the uncompiled update would measure what no user runs."""
    asked = []

    def build(*parts: object) -> None:
        asked.append(parts[4].engine.compile)  # type: ignore[attr-defined]
        raise KeyboardInterrupt  # the settings are known

    monkeypatch.setattr(gpu, "build_engine", build)
    bench = gpu.Bench(GPU.parse("gpu", [*SMALL, "--workers", "1", "--updates", "sync", *options]))
    model, table = bench.shape.model, bench._table("sync", 1)
    store = build_store(model, bench._numbers(table), find_hardware(table))
    with pytest.raises(KeyboardInterrupt):
        bench._measure_layers(store)
    for compiled in bench.options.compile:
        with pytest.raises(KeyboardInterrupt):
            bench._engine_run(store, "sync", 1, compiled, Costs((LayerCost("none", 0.0, 0.0),)))
    store.close()
    assert asked == settings


def test_a_rate_is_measured_each_way(report: dict) -> None:
    copies = report["copies"]
    assert copies["upload_gb_per_s"][0] > 0 and copies["download_gb_per_s"][0] > 0
    assert len(copies["both_ways_gb_per_s"][0]) == 2


def test_what_does_not_fit_into_the_time_is_left_out_and_failed_tests_fail_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests.xml").write_text(JUNIT)
    out = tmp_path / "figures.json"
    code = GPU.run(
        "gpu", [*SMALL, "--check", "--budget-s", "0", "--tests-xml", str(tmp_path / "tests.xml"), "--json", str(out)]
    )
    report = json.loads(out.read_text())
    assert code == 1
    assert report["tests"] == {"passed": 1, "failed": 1, "failures": ["two"]}
    assert all(run["left_out"] == "the time was up" for run in report["runs"])
    printed = capsys.readouterr().out
    assert "1 passed, 1 failed: two" in printed and "left out: the time was up" in printed


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Return an environment that hides the packages which docs/gpu_results.md does not name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain(*project["optional-dependencies"].values())
    known = {re.split(r"[^\w-]", line)[0] for line in (*project["dependencies"], *extras)}
    page = (ROOT / "docs" / "gpu_results.md").read_text()
    named = page.split("must be installed:")[1].split(".\n")[0]
    kept = {name for name in known if f"`{name}`" in named}
    assert {"torch", "xxhash"} <= kept
    hidden = known - kept - {"jinja2"}  # which PyTorch brings
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def test_the_accelerators_tests_are_found_on_a_bare_machine(bare: dict[str, str]) -> None:
    command = ["-m", "pytest", "--collect-only", "-q", "-m", "accelerator", "tests/accelerator"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "left out: test_generation.py, which needs transformers" in done.stdout
    assert "test_gpu_benchmark.py::" in done.stdout and "test_training.py::" in done.stdout


def test_the_command_ends_with_the_table_where_there_is_no_gpu_too(tmp_path: Path, bare: dict[str, str]) -> None:
    """The command must not take tests on the simulated accelerator for tests that passed on a GPU."""
    environment = {
        **bare,
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "BENCH_ARGUMENTS": " ".join([*SMALL, "--updates sync --workers 1"]),
    }
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path / "figures.json")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "no GPU" in done.stderr, done.stderr[-2000:]
    assert "plain, all on device" in done.stdout.splitlines()[-1]
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report["machine"]["torch"] == torch.__version__ and "tests" not in report
