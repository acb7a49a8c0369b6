"""Faults to plant in the engine's ordering, named by the call that they break, and short runs that show them.

A call site is found in the engine's source, not listed by hand: a wait that is added later is a new site, and the
table of `tests/accelerator/test_planted.py` must then say how its absence is seen.
"""

import ast
import inspect
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import torchround.engine
from torchround.engine.device import Device, Event, PastEvent, Stream

ENGINE = Path(inspect.getfile(torchround.engine)).parent


@dataclass(frozen=True)
class CallSite:
    """One call of a device's method in the engine. `words` is its source text in one line."""

    module: str
    function: str
    words: str
    first_line: int
    last_line: int

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.words}"


@cache
def call_sites(method: str) -> dict[tuple[str, int], CallSite]:
    """Find the calls `device.METHOD(..)` in the engine. Returns them by file and line, once for each of their lines."""
    found = {}
    for path in sorted(ENGINE.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for call in calls_in(function, method):
                    site = CallSite(
                        path.stem, function.name, ast.unparse(call), call.lineno, call.end_lineno or call.lineno
                    )
                    found |= {(str(path), line): site for line in range(site.first_line, site.last_line + 1)}
    return found


def calls_in(function: ast.FunctionDef, method: str) -> list[ast.Call]:
    """Return the calls of a device's method in a function."""
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and ast.unparse(node.func.value).endswith("device")
    ]


def caller_of(sites: dict[tuple[str, int], CallSite]) -> CallSite | None:
    """Return the call site at which the function that asks was called."""
    frame = sys._getframe(2)
    return sites.get((frame.f_code.co_filename, frame.f_lineno))


class Planted:
    """A fault in the engine. `times` counts how often it came to effect."""

    def __init__(self) -> None:
        self.times = 0


def drop_wait(monkeypatch: pytest.MonkeyPatch, site: str) -> Planted:
    """Let no stream wait at one call site."""
    planted, wait, sites = Planted(), Device.wait, call_sites("wait")

    def dropping(device: Device, stream: Stream, event: Event) -> None:
        if str(caller_of(sites)) == site:
            planted.times += 1
        else:
            wait(device, stream, event)

    monkeypatch.setattr(Device, "wait", dropping)
    return planted


def empty_event(monkeypatch: pytest.MonkeyPatch, site: str) -> Planted:
    """Let one call site record an event that has passed before anything was done."""
    planted, record, sites = Planted(), Device.record, call_sites("record")

    def recording(device: Device, stream: Stream) -> Event:
        if str(caller_of(sites)) != site:
            return record(device, stream)
        planted.times += 1
        return PastEvent()

    monkeypatch.setattr(Device, "record", recording)
    return planted
