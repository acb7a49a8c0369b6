"""The page `docs/tour.md` is true: its files and functions exist, imports connect them, and a step runs them in order."""

import ast
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.small_run import SmallRuns, small_runs

__all__ = ["small_runs"]

ROOT = Path(__file__).parents[1]
MOST_FILES = 11
STOP = re.compile(r"^\| (\d+) \| `((?:torchround|models)/[\w/]+\.py)` \| `([\w.]+)` \| .+ \|$", re.MULTILINE)


def stops() -> list[tuple[str, str]]:
    """Return file and function of each stop."""
    found = STOP.findall((ROOT / "docs" / "tour.md").read_text(encoding="utf-8"))
    assert [int(number) for number, _, _ in found] == list(range(1, len(found) + 1))
    # Modules are imported through the package's link to the models.
    return [(re.sub("^models/", "torchround/models/", file), function) for _, file, function in found]


def imported_files(file: str) -> set[str]:
    """Return the files of the package that a file imports, by itself or through a file that offers their names."""
    names = set()
    for module, name in imports_from(file):
        names |= {module, f"{module}.{name}"}
        offered_by = f"{module.replace('.', '/')}.py"
        if module.startswith("torchround.") and (ROOT / offered_by).is_file():
            names |= {source for source, offered in imports_from(offered_by) if offered == name}
    return {f"{name.replace('.', '/')}.py" for name in names}


def imports_from(file: str) -> list[tuple[str, str]]:
    """Return module and name of each `from module import name` in a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return [(node.module or "", alias.name) for node in found for alias in node.names]


def test_the_tour_has_few_files_and_each_is_joined_to_an_earlier_one_by_an_import() -> None:
    files = [file for file, _ in stops()]
    assert 6 <= len(files) == len(set(files)) <= MOST_FILES
    imports = {file: imported_files(file) for file in files}
    for number, file in enumerate(files[1:], start=1):
        earlier = files[:number]
        assert any(file in imports[other] or other in imports[file] for other in earlier), file


def test_a_step_runs_the_functions_of_the_tour_in_its_order(small_runs: SmallRuns) -> None:
    """Python reports every call in every thread; the first call of each function counts."""
    wanted = {(str(ROOT / file), function.split(".")[-1]): (file, function) for file, function in stops()}
    seen: list[tuple[str, str]] = []
    first = stops()[0]

    def note(frame: FrameType, event: str, argument: Any) -> None:
        # The same name may occur in several classes of a file, so the class is compared too.
        stop = wanted.get((frame.f_code.co_filename, frame.f_code.co_name)) if event == "call" else None
        # What reserves memory before the first step calls some of them too.
        is_in_step = bool(seen) or stop == first
        if stop is None or stop in seen or not is_in_step:
            return
        if _class_of(frame) in (stop[1].rpartition(".")[0], None):
            seen.append(stop)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert small_runs("tour", "--training.steps=1", "--lr_schedule.warmup_steps=0") == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert seen == stops()


def _class_of(frame: FrameType) -> str | None:
    """Return the name of the class whose method runs; None for a subclass that calls an inherited one, "" for a function."""
    owner = frame.f_locals.get("self")
    if owner is None:
        return ""
    return type(owner).__name__ if frame.f_code.co_name in vars(type(owner)) else None
