"""Plants faults in the engine's ordering, by call site or by method, and makes a thread late.

Call sites of a device's `wait` and `record` are found in the engine's source. A wait that is added later is a new site,
and the table of `tests/accelerator/test_planted.py` must then say how its absence is seen.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import torchround.engine
from torchround.engine.device import Device, Event, PastEvent, Stream

ENGINE = Path(inspect.getfile(torchround.engine)).parent
Plant = Callable[[pytest.MonkeyPatch], "Planted"]


class Planted:
    """A fault in the engine. `times` counts how often it came to effect."""

    def __init__(self) -> None:
        self.times = 0

    def happens(self) -> None:
        """Note that the fault comes to effect now."""
        self.times += 1


@dataclass(frozen=True)
class CallSite:
    """One call of a device's method in the engine. `words` is its source text in one line."""

    module: str
    function: str
    words: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.words}"


@cache
def call_sites(method: str) -> dict[tuple[str, int], CallSite]:
    """Find the calls `device.METHOD(..)` in the engine. Returns them by file and line, once for each of their lines."""
    found = {}
    for path in sorted(ENGINE.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for call in _calls(function, method):
                    site = CallSite(path.stem, function.name, ast.unparse(call))
                    lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
                    found |= {(str(path), line): site for line in lines}
    return found


def _calls(function: ast.FunctionDef, method: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and ast.unparse(node.func.value).endswith("device")
    ]


def _site_of_caller(sites: dict[tuple[str, int], CallSite]) -> str:
    frame = sys._getframe(2)
    return str(sites.get((frame.f_code.co_filename, frame.f_lineno)))


def no_wait_at(site: str) -> Plant:
    """Let no stream wait at one call site."""

    def plant(patch: pytest.MonkeyPatch) -> Planted:
        planted, wait, sites = Planted(), Device.wait, call_sites("wait")

        def dropping(device: Device, stream: Stream, event: Event) -> None:
            if _site_of_caller(sites) == site:
                planted.happens()
            else:
                wait(device, stream, event)

        patch.setattr(Device, "wait", dropping)
        return planted

    return plant


def empty_event_at(site: str) -> Plant:
    """Let one call site record an event that has passed before anything was done."""

    def plant(patch: pytest.MonkeyPatch) -> Planted:
        planted, record, sites = Planted(), Device.record, call_sites("record")

        def recording(device: Device, stream: Stream) -> Event:
            if _site_of_caller(sites) != site:
                return record(device, stream)
            planted.happens()
            return PastEvent()

        patch.setattr(Device, "record", recording)
        return planted

    return plant


def replaced(owner: Any, name: str, make: Callable[[Any, Planted], Any]) -> Plant:
    """Replace a method by `make(original, planted)`."""

    def plant(patch: pytest.MonkeyPatch) -> Planted:
        planted = Planted()
        patch.setattr(owner, name, make(getattr(owner, name), planted))
        return planted

    return plant


def skipped(owner: Any, name: str, answer: Any = None) -> Plant:
    """Let a method do nothing and return `answer`."""

    def make(original: Any, planted: Planted) -> Any:
        def nothing(*arguments: Any, **options: Any) -> Any:
            planted.happens()
            return answer

        return nothing

    return replaced(owner, name, make)


def both(*plants: Plant) -> Plant:
    """Plant several faults that are one only together. The last one counts."""

    def plant(patch: pytest.MonkeyPatch) -> Planted:
        return [one(patch) for one in plants][-1]

    return plant


def linger(times: int = 40) -> None:
    """Let the calling thread be late: it waits again and again for a device that no engine uses.

    The scheduler serves such a wait only when every other thread waits too, so they get as far as they can.
    """
    stream = torch.Stream(device="simulated:3")
    for _ in range(times):
        stream.record_event().synchronize()
