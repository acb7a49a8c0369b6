"""The simulated accelerator is built once for all processes, and says why it cannot be built."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_accelerator import build
from tests.simulated_accelerator.build import NotBuilt

# Takes a while to make an empty file, and notes each call that makes one. It refuses wrong.cpp.
COMPILER = """#!/bin/sh
case "$*" in *wrong.cpp*) echo "error: this is no C++" >&2; exit 1;; esac
for last; do previous=$word; word=$last; [ "$previous" = -o ] && target=$word; done
if [ -n "$target" ]; then sleep 0.1; echo "$target" >> "$CALLS"; : > "$target"; else echo "compiler 1"; fi
"""
BUILD = """
from tests.simulated_accelerator.build import build
print("ready", flush=True)
input()
print(build())
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that only pretends; returns the file with its calls."""
    script, calls = tmp_path / "compiler", tmp_path / "calls"
    script.write_text(COMPILER)
    script.chmod(0o755)
    for name, value in {"CXX": script, "CALLS": calls, "TORCHROUND_CACHE": tmp_path / "cache"}.items():
        monkeypatch.setenv(name, str(value))
    return calls


def test_processes_that_start_together_build_once(compiler, pytestconfig):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([sys.executable, "-c", BUILD], cwd=pytestconfig.rootpath, **pipes) for _ in range(3)]
    for run in runs:
        assert run.stdout.readline() == "ready\n"
    for run in runs:
        print(file=run.stdin, flush=True)
    [built] = {run.communicate()[0].strip() for run in runs}
    assert Path(built).exists()
    assert len(compiler.read_text().splitlines()) == len(list(build.SOURCES.glob("*.cpp"))) + 1


def test_another_state_of_the_sources_is_built_anew(compiler, tmp_path, monkeypatch):
    first = build.build()
    assert build.build() == first
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text("int one() { return 1; }")
    monkeypatch.setattr(build, "SOURCES", sources)
    second = build.build()
    (sources / "one.cpp").write_text("int one() { return 2; }")
    assert len({first, second, build.build()}) == 3


def test_a_machine_without_a_compiler_is_told_so(compiler, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotBuilt, match="no-such-compiler, which is not installed"):
        build.build()


def test_a_compiler_that_refuses_is_quoted(tmp_path, compiler, monkeypatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "wrong.cpp").write_text("this is no C++")
    monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(NotBuilt, match=r"refused wrong.cpp:\nerror: this is no C\+\+"):
        build.build()
    assert not list((tmp_path / "cache").rglob("*.so"))
