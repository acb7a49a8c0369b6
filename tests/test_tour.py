"""The page `docs/tour.md` is true: its files and functions exist, imports connect them, and a step runs them in order."""

import re
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STOP = re.compile(r"^\| (\d+) \| `((?:torchround|models)/[\w/]+\.py)` \| `([\w.]+)` \| .+ \|$", re.MULTILINE)


def stops():
    found = STOP.findall((ROOT / "docs" / "tour.md").read_text(encoding="utf-8"))
    assert [int(number) for number, _, _ in found] == list(range(1, len(found) + 1))
    # Modules are imported through the package's link to the models.
    return [(re.sub("^models/", "torchround/models/", file), function) for _, file, function in found]


@pytest.mark.documented
def test_a_step_runs_the_functions_of_the_tour_in_its_order(small_runs):
    """Python reports every call in every thread; the first call of each function counts."""
    wanted = {(str(ROOT / file), function.split(".")[-1]): (file, function) for file, function in stops()}
    seen = []
    first = stops()[0]

    def note(frame, event, argument):
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


def _class_of(frame):
    """Return the name of the class whose method runs; None for a subclass that calls an inherited one, "" for a function."""
    owner = frame.f_locals.get("self")
    if owner is None:
        return ""
    return type(owner).__name__ if frame.f_code.co_name in vars(type(owner)) else None
