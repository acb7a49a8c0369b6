"""Whole runs on several machines, each a process of its own that joins the others as under torchrun."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import MachineProcess, MachineStarter

DEBUG = ["--config", "debug.toml", "--engine.num_devices=1", "--engine.measure_steps=0"]


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineStarter]:
    """Yield the process that forks the machines of all tests in this file."""
    starter = MachineStarter(tmp_path_factory.mktemp("printed"))
    yield starter
    starter.close()


def ended(machines: list[MachineProcess], code: int) -> list[str]:
    """Wait for the end of all machines, each with this exit code. Returns what each has printed."""
    codes = [machine.wait() for machine in machines]
    texts = [machine.text() for machine in machines]
    assert codes == [code] * len(machines), "\n---\n".join(texts)
    return texts


def test_several_processes_on_a_host_are_refused_with_how_to_launch(
    starter: MachineStarter, tmp_path: Path
) -> None:
    first, second = ended(starter.start(2, "train:main", DEBUG, folder=tmp_path), 2)
    assert first == second and "--nproc-per-node 1" in first and "machine 0" in first and "machine 1" in first
    assert list(tmp_path.iterdir()) == []
