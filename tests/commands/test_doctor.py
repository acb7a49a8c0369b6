"""What `doctor` says of a machine: facts and rates that were measured, each shipped config planned, nothing left behind."""

import re
from pathlib import Path

import pytest

from torchround.commands import doctor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def facts(tmp_path, monkeypatch, capsys):
    def run():
        (tmp_path / "disk").mkdir()
        monkeypatch.chdir(tmp_path / "disk")
        assert doctor.main([]) == 0
        assert list((tmp_path / "disk").iterdir()) == []
        printed = capsys.readouterr().out
        lines = [line for line in printed.splitlines() if line and not line.startswith((" ", "configs"))]
        return {line[: doctor.NAME_WIDTH].strip(): line[doctor.NAME_WIDTH :] for line in lines}

    return run


def test_it_says_what_the_machine_has_and_whether_each_shipped_config_fits(facts):
    found = facts()
    for name in ("system", "software", "processors", "host memory", "memlock", "devices", "disk"):
        assert found[name], name
    shipped = {path.name for path in (ROOT / "configs").glob("*.toml")}
    assert shipped <= set(found)
    assert re.fullmatch(r"fits: host memory .+iB, each of 2 devices .+iB, a checkpoint .+iB", found["debug.toml"])
    assert re.match(r"does not fit: .*the host needs \d+\.\d\d GiB .* and may use", found["qwen3_235b_lora.toml"])
    assert re.match(r"\d+\.\d\d [KMGT]iB are free in /", found["disk"])


def test_what_cannot_be_used_is_said_and_the_rest_follows(facts, tmp_path, monkeypatch):
    def broken(table):
        raise RuntimeError("no memory can be taken on the card\nmore lines of PyTorch")

    (tmp_path / "broken.toml").write_text('base = "debug.toml"\n[engine]\nupdate = "asyncc"\n')
    monkeypatch.setattr(doctor, "find_hardware", broken)
    found = facts()
    assert found["devices"] == "cannot be used: no memory can be taken on the card"
    text = doctor.config_text(tmp_path / "broken.toml")
    assert text.startswith("cannot be planned: ") and "nearest: async" in text
    assert found["disk"] and found["debug.toml"] == "cannot be planned: no memory can be taken on the card"
