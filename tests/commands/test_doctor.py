"""What `doctor` says of a machine: facts and rates that were measured, each shipped config planned, nothing left behind."""

import platform
import re
import resource
import sys
from pathlib import Path

import pytest

from torchround.commands import doctor
from torchround.config import EngineTable
from torchround.run import hardware, machine
from torchround.run.missing_cards import Absence

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(machine, "DISK_BYTES", 2**24)
    monkeypatch.setenv("COLUMNS", "1000")  # one line for each fact


def facts(printed):
    lines = [line for line in printed.splitlines() if line and not line.startswith((" ", "configs"))]
    return {line[: doctor.NAME_WIDTH].strip(): line[doctor.NAME_WIDTH :] for line in lines}


def test_it_says_what_the_machine_has_and_whether_each_shipped_config_fits(tmp_path, capsys):
    assert doctor.main(["--folder", str(tmp_path)]) == 0
    found = facts(capsys.readouterr().out)
    for name in ("system", "software", "processors", "host memory", "memlock", "driver", "devices", "link", "disk"):
        assert found[name], name
    shipped = {path.name for path in (ROOT / "configs").glob("*.toml")}
    assert shipped <= set(found)
    assert re.fullmatch(r"fits: host memory .+iB, each of 2 devices .+iB, a checkpoint .+iB", found["debug.toml"])
    assert re.match(r"does not fit: .* need \d+\.\d\d GiB of host memory", found["qwen3_235b_lora.toml"])
    assert list(tmp_path.iterdir()) == []


def test_why_no_card_is_used_is_said_once_and_not_as_a_warning(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr(hardware, "present_kind", lambda: None)
    monkeypatch.setattr(hardware, "why_no_accelerator", lambda: Absence("the driver is not loaded", has_card=True))
    config = tmp_path / "auto.toml"
    config.write_text('base = "debug.toml"\n[engine]\ndevices = "auto"\n')
    assert doctor.main(["--folder", str(tmp_path), "--config", str(config)]) == 0
    printed = capsys.readouterr().out
    assert facts(printed)["devices"] == ("1 virtual, on the processor: no accelerator found (the driver is not loaded)")
    assert printed.count("not loaded") == 1 and caplog.messages == []
    hardware.find_hardware(EngineTable())  # elsewhere it stays a warning
    assert len(caplog.messages) == 1


def test_devices_that_cannot_be_used_are_said_and_the_rest_follows(tmp_path, monkeypatch, capsys):
    def broken(table):
        raise RuntimeError("no memory can be taken on the card\nmore lines of PyTorch")

    monkeypatch.setattr(doctor, "find_hardware", broken)
    assert doctor.main(["--folder", str(tmp_path), "--config", "debug.toml"]) == 0
    found = facts(capsys.readouterr().out)
    assert found["devices"] == "cannot be used: no memory can be taken on the card"
    assert found["disk"] and found["debug.toml"] == "cannot be planned: no memory can be taken on the card"


def test_a_config_that_cannot_be_planned_says_why_and_the_others_follow(tmp_path, capsys):
    broken = tmp_path / "broken.toml"
    broken.write_text('base = "debug.toml"\n[model]\nfamily = "lama3"\n')
    assert doctor.main(["--folder", str(tmp_path), "--config", str(broken), "--config", "debug.toml"]) == 0
    found = facts(capsys.readouterr().out)
    assert "cannot be planned: " in found["broken.toml"] and "llama3" in found["broken.toml"]
    assert found["debug.toml"].startswith("fits")
    assert "qwen3_32b.toml" not in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--folder", "missing"], "--folder missing: there is no such folder"),
        (["--config", "nothing.toml"], "nothing.toml"),
    ],
)
def test_a_mistake_is_one_message_before_anything_is_measured(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "machine", lambda folder: pytest.fail("measured"))
    assert doctor.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("doctor: ") and message in captured.err and captured.out == ""


def test_a_disk_that_was_not_measured_has_no_rate(tmp_path, monkeypatch):
    text = machine.disk_text(tmp_path)
    assert re.fullmatch(r"\d+\.\d\d GB/s written, \d+\.\d\d GB/s read, past .*|.*reads not measured: .*", text)

    def full(path, content):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine, "_write", full)
    assert machine.disk_text(tmp_path) == f"not measured in {tmp_path}: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_windows_the_driver_and_the_limit_of_locked_pages_are_read_from_the_system(tmp_path, monkeypatch):
    driver = tmp_path / "proc" / "driver" / "nvidia" / "version"
    driver.parent.mkdir(parents=True)
    driver.write_text("NVRM version: 580.65.06\nGCC version: 12\n")
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, 0))
    found = dict(machine.system_facts(tmp_path))
    assert "(WSL: Linux inside Windows)" in found["system"]
    assert found["driver"] == "NVRM version: 580.65.06"
    assert found["memlock"] == "no limit (ulimit -l)"
    assert sys.version.split()[0] in found["software"]
    assert dict(machine.system_facts(tmp_path / "empty"))["driver"].startswith("none is shown in /proc/driver")
