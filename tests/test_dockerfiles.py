"""The images: each instruction names what is there, packages are the pinned ones, and nothing local gets in.

No image can be built in a test. `.ci/run` also lints both files with hadolint.
"""

import fnmatch
import re
from pathlib import Path

import pytest

from tests.support.toml import EXTRAS

ROOT = Path(__file__).parents[1]
FILES = ("Dockerfile", "Dockerfile.cpu")


@pytest.mark.parametrize("name", FILES)
def test_an_image_installs_pinned_packages_and_extras_that_exist(name):
    text = (ROOT / name).read_text().replace("\\\n", " ")
    first, second = [line.split() for line in text.splitlines() if line.startswith("RUN pip install")]
    assert first[-3:] == ["-c", "constraints.txt", "torch"], "PyTorch's version is the pinned one"
    assert "--no-cache-dir" in first and second[3:7] == ["--no-cache-dir", "-c", "constraints.txt", "-e"]
    extras = re.fullmatch(r"\.\[([a-z,]+)\]", second[7].strip("'\""))
    assert extras and set(extras[1].split(",")) <= {*EXTRAS}


def test_nothing_that_git_ignores_gets_into_an_image():
    kept_out = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    assert set(kept_out) == {".git", *(f"**/{pattern}" for pattern in ignored)}
    # What the images copy and install from must not be among them.
    for needed in ("torchround/trainer.py", "configs/debug.toml", "pyproject.toml", "README.md", "train.py"):
        parts = Path(needed).parts
        assert not any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in parts for pattern in kept_out)
