"""Room for checkpoints, known at the start, and a fault before the first update."""

import re
import shutil
from types import SimpleNamespace

import pytest

from tests.support.small_run import ASYNC, BOUNDED, COMPACT, TIED, small_runs
from torchround.commands import train_model
from torchround.config import parse_command_line
from torchround.engine.store.bundles import ALIGNMENT_ELEMENTS
from torchround.optim.formats import BLOCK
from torchround.run.run_folder import checkpoint_bytes
from torchround.run.several_machines import RunMachines

__all__ = ["small_runs"]


def disk_of(monkeypatch, free_bytes):
    total = 0 if free_bytes is None else 10**12
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=free_bytes or 0))


BFLOAT16, MUON = "--training.dtype=bfloat16", "--optimizer.name=muon"


@pytest.mark.parametrize(
    "mode",
    [[ASYNC, BFLOAT16, "--lora.rank=2"], [TIED, COMPACT], [BFLOAT16, *BOUNDED], [BFLOAT16, ASYNC, MUON, COMPACT]],
    ids=" ".join,
)
def test_the_size_of_a_checkpoint_is_known_before_anything_is_allocated(small_runs, mode):
    options = parse_command_line(["--config", "small.toml", "--run.name=run", "--training.steps=1", *mode])
    alone = RunMachines()
    parts = train_model.build(options, alone, alone.planned())
    assert small_runs("run", "--training.steps=1", *mode) == 0
    saved, padded_bytes = small_runs.state("run", 1), 0.0
    for name, view in saved.items():
        kind, _, parameter = name.partition("/")
        # A plan counts the padding between parameters, which is not saved.
        numel = saved[f"weights/{parameter}"].numel()
        padded = -(-numel // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        padded_bytes += view.element_size() * padded / (BLOCK if kind.endswith("_scale") else 1)
    assert checkpoint_bytes(parts.question) == padded_bytes


def test_a_disk_that_cannot_hold_one_checkpoint_is_refused(small_runs, monkeypatch, capsys):
    longer = ["--training.steps=4", "--lr_schedule.decay=none"]
    assert small_runs("complete", *longer) == 0
    disk_of(monkeypatch, 150_000)
    for more in ([], ["--dry-run"]):
        capsys.readouterr()
        assert small_runs("run", *more) == 2
        printed = capsys.readouterr()
        said = r"a checkpoint takes 0\.2\d MiB; 0\.14 MiB are free"
        assert re.search(f"run.folder: outputs/run: {said}", printed.err), printed.err
        assert re.search(said, printed.out) and "new run" not in printed.out
        assert not (small_runs.path("run") / "config.toml").exists()
    # A complete run saves nothing more.
    assert small_runs("complete", *longer) == 0
    disk_of(monkeypatch, None)
    assert small_runs("elsewhere", "--training.steps=1") == 0, "a file system that does not say what is free"
