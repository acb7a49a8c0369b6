"""The images: each instruction names what is there, packages are the pinned ones, and nothing local gets in.

No image can be built in a test. `.ci/run` also lints both files with hadolint.
"""

import fnmatch
import re
import shlex
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FILES = ("Dockerfile", "Dockerfile.cpu")


def instructions(name):
    """Return (word, arguments) of each instruction, comments left out and lines joined."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def of(name, word):
    return [arguments for found, arguments in instructions(name) if found == word]


@pytest.mark.parametrize("name", FILES)
def test_an_image_installs_pinned_packages_and_extras_that_exist(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    commands = [shlex.split(line) for line in of(name, "RUN") if line.startswith("pip install")]
    first, second = commands
    assert "--no-cache-dir" in first and "--no-cache-dir" in second
    assert first[-3:] == ["-c", "constraints.txt", "torch"], "PyTorch's version is the pinned one"
    assert second[2:5] == ["--no-cache-dir", "-c", "constraints.txt"] and second[5] == "-e"
    extras = re.fullmatch(r"\.\[([a-z,]+)\]", second[6])
    assert extras and set(extras[1].split(",")) <= set(project["optional-dependencies"])


def test_nothing_that_git_ignores_gets_into_an_image():
    kept_out = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    assert set(kept_out) == {".git", *(f"**/{pattern}" for pattern in ignored)}
    # What the images copy and install from must not be among them.
    for needed in ("torchround/trainer.py", "configs/debug.toml", "pyproject.toml", "README.md", "train.py"):
        parts = Path(needed).parts
        assert not any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in parts for pattern in kept_out)
