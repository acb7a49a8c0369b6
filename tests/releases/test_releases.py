"""The table of releases: each is read, trained, resumed, exported and loaded again, or refused for the reason that docs give."""

import pytest

from tests.support.releases import PAGE, releases, row, try_release
from tests.support.small_run import working_in

RELEASES = {release.name.split("/")[1]: release for release in releases()}
# A dense one, and one of experts in 4 bits. `test_frozen_exports.py` trains and exports one of FP8 blocks.
BY_DEFAULT = ("Qwen3-8B", "gpt-oss-20b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else pytest.mark.releases) for name in RELEASES]
)
def test_a_release_trains_like_transformers_and_its_export_loads_there(name, tmp_path):
    with working_in(tmp_path):
        outcome = try_release(RELEASES[name])
    documented = PAGE.read_text("utf-8")
    if outcome.reason:
        assert row(RELEASES[name], outcome) in documented
    else:
        assert f"| {RELEASES[name].name} |" in documented
        line = next(line for line in documented.splitlines() if line.startswith(f"| {RELEASES[name].name} |"))
        assert "| passes: " in line
