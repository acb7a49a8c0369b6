#!/usr/bin/env python3
"""Plant one fault at a time in the product, and count how many of them the default tests find.

    python scripts/mutants.py calls CALLS            # runs the default tests once, and notes which functions each calls
    python scripts/mutants.py run CALLS RESULTS      # plants 100 faults, and runs the tests that call the changed function
    python scripts/mutants.py show RESULTS [OTHER]   # counts; with another suite's results, what only one of them found

A fault is a flipped comparison, a dropped call, a wrong index, a swapped branch or a left-out wait. Their places are drawn
by `--seed` from all files of the package, so two suites get the same faults if the product is the same: check out the
other commit's `tests` beside this one's product. If no test calls the function in its own process, those that start
programs run. CALLS and RESULTS are files of JSON lines; a run that was stopped continues. The tree is changed while it
runs, so work in a checkout of its own. What follows `--` goes to pytest (default: `-n 2`).
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("torchround", "torchround/models", "torchround/simulate")  # a search does not follow the links
CALLS_VARIABLE = "TORCHROUND_CALLS"
FLIPPED = {
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
WAITS = ("wait", "join", "synchronize", "acquire", "drain", "await_")
SKIPPED = ("warn", "info", "debug", "print")  # dropping them changes words alone
LIMIT_S = 1200
HANG_S = 200  # for one test


@dataclass(frozen=True)
class Fault:
    """One changed piece of a file: the text from `start` to `end` becomes `new`. `function` is the line it begins at."""

    kind: str
    path: str
    line: int
    function: int
    start: int
    end: int
    new: str


class Finder(ast.NodeVisitor):
    """Collects the faults that could be planted in one file's functions."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.function = path, text, 0
        self.starts = [0]
        for line in text.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Fault] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Remember the function around a fault, as a code object names it: by its first line, decorators included."""
        before, self.function = self.function, min([node.lineno, *(d.lineno for d in node.decorator_list)])
        for child in node.body:
            self.visit(child)
        self.function = before

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave invariants alone: they check the program, not the other way round."""

    def visit_Compare(self, node: ast.Compare) -> None:
        """Flip a comparison."""
        if len(node.ops) == 1 and type(node.ops[0]) in FLIPPED:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            self._add("flipped comparison", node, f"({left} {FLIPPED[type(node.ops[0])]} {right})")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Drop a call or leave out a wait."""
        if isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func).split(".")[-1]
            if not name.endswith(SKIPPED):
                self._add("left-out wait" if name.startswith(WAITS) else "dropped call", node, "pass")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Take the next element, or in place of the last one the first one."""
        index = ast.unparse(node.slice)
        if index.lstrip("-").isdigit() and isinstance(node.ctx, ast.Load):
            self._add("wrong index", node.slice, str(int(index) + 1))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Take the other branch."""
        self._add("swapped branch", node.test, f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Take the other value."""
        self._add("swapped branch", node.test, f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def _add(self, kind: str, node: ast.expr | ast.stmt, new: str) -> None:
        if self.function and node.end_lineno is not None and node.end_col_offset is not None:
            start = self.starts[node.lineno - 1] + node.col_offset
            end = self.starts[node.end_lineno - 1] + node.end_col_offset
            self.found.append(Fault(kind, self.path, node.lineno, self.function, start, end, new))


def draw(seed: int, count: int) -> list[Fault]:
    """Draw `count` faults, as many of each kind as of every other."""
    by_kind: dict[str, list[Fault]] = {}
    paths = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    for path in sorted(paths):
        finder = Finder(str(path.relative_to(ROOT)), path.read_text("utf-8"))
        finder.visit(ast.parse(finder.text))
        for fault in finder.found:
            by_kind.setdefault(fault.kind, []).append(fault)
    drawn = random.Random(seed)
    for faults in by_kind.values():
        drawn.shuffle(faults)
    kinds = sorted(by_kind)
    return [by_kind[kinds[number % len(kinds)]].pop() for number in range(count)]


def calls(out: Path, options: list[str]) -> int:
    """Run the tests once with the plugin below."""
    environment = {**os.environ, CALLS_VARIABLE: str(out.resolve())}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "scripts.mutants", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def run(called: Path, results: Path, seed: int, count: int, options: list[str]) -> int:
    """Plant each fault that has no result yet, run the tests that call its function, and write the result."""
    records = list(_lines(called))
    done = {(r["path"], r["start"], r["kind"]) for r in _lines(results)} if results.exists() else set()
    for number, fault in enumerate(draw(seed, count), 1):
        if (fault.path, fault.start, fault.kind) in done:
            continue
        place = f"{fault.path}:{fault.function}"
        chosen = [r for r in records if place in r["calls"]] or [r for r in records if r["starts"]]
        # A test that calls little else is the most likely to find the fault, and the first ones need no second process.
        names = [r["test"] for r in sorted(chosen, key=lambda r: (len(r["calls"]), r["seconds"]))]
        start, result = time.monotonic(), ""
        for first, last, how in ((0, 30, ["-n", "0"]), (30, 300, options), (300, len(names), options)):
            if names[first:last] and not result:
                result = _found_by(fault, names[first:last], how)
        seconds = round(time.monotonic() - start, 1)
        record = {**asdict(fault), "tests": len(names), "found": result, "seconds": seconds}
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{number}/{count} {fault.kind} {fault.path}:{fault.line}: {result or 'NOT FOUND'}", flush=True)
    return show(results, None)


def _found_by(fault: Fault, names: list[str], options: list[str]) -> str:
    """Find the first test that fails, or how the run ended otherwise; empty if all pass."""
    path = ROOT / fault.path
    before = path.read_bytes()
    names_file = ROOT / ".mutant_tests"
    names_file.write_text("\n".join(names))
    try:
        path.write_bytes(before[: fault.start] + fault.new.encode() + before[fault.end :])
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            f"faulthandler_timeout={HANG_S}",
            *options,
            f"@{names_file}",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if done.returncode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(
                f"CALLS is of other tests than these:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        found = failed[0][:200] if failed else f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        found = "a hang"
    finally:
        path.write_bytes(before)
        names_file.unlink()
    return found


def show(results: Path, other: Path | None) -> int:
    """Print how many faults of each kind were found, and with a second file what only one suite found."""
    records = list(_lines(results))
    drawn, found = Counter(r["kind"] for r in records), Counter(r["kind"] for r in records if r["found"])
    for kind in sorted(drawn):
        print(f"{kind:20} {found[kind]:3} of {drawn[kind]}")
    print(f"{'all':20} {found.total():3} of {drawn.total()}")
    theirs = {(r["path"], r["start"]): r["found"] for r in _lines(other)} if other else {}
    for r in records:
        difference = theirs.get((r["path"], r["start"]))
        if other is None and not r["found"]:
            print(f"not found: {r['kind']} at {r['path']}:{r['line']} -> {r['new']}")
        elif difference is not None and bool(difference) != bool(r["found"]):
            print(
                f"only {'here' if r['found'] else 'there'}: {r['kind']} at {r['path']}:{r['line']} -> {r['new']}"
            )
    return 0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        yield from map(json.loads, file)


# The plugin: notes which functions of the product each test calls, and whether it starts a program.


class CallNotes:
    """What the running test has called so far."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.starts = False

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call, as the profiler of every thread."""
        if event == "call":
            self.codes.add(frame.f_code)

    def audit(self, event: str, _: object) -> None:
        """Note a program that is started."""
        self.starts |= event in ("subprocess.Popen", "os.fork", "os.posix_spawn")

    def places(self) -> list[str]:
        """List the functions of the product, by file and first line."""
        files = {code: os.path.realpath(code.co_filename) for code in list(self.codes)}
        folders = tuple(os.path.realpath(ROOT / folder) + os.sep for folder in FOLDERS)
        return sorted(
            f"{os.path.relpath(file, ROOT)}:{code.co_firstlineno}"
            for code, file in files.items()
            if file.startswith(folders)
        )


class CallsPlugin:
    """Writes a record for each test."""

    def __init__(self, out: str) -> None:
        self.out, self.notes = Path(out), CallNotes()
        sys.addaudithook(self.notes.audit)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run one test, and write what it called."""
        self.notes.codes.clear()
        self.notes.starts, start = False, time.monotonic()
        sys.setprofile(self.notes.profile)
        threading.setprofile(self.notes.profile)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            record = {
                "test": item.nodeid,
                "seconds": round(time.monotonic() - start, 3),
                "starts": self.notes.starts,
                "calls": self.notes.places(),
            }
            with self.out.open("a") as file:  # the processes of pytest-xdist append whole lines
                file.write(json.dumps(record) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Add the plugin in each process that runs tests."""
    if CALLS_VARIABLE in os.environ:
        config.pluginmanager.register(CallsPlugin(os.environ[CALLS_VARIABLE]))


def main() -> int:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("calls", "run", "show"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, options = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :] or ["-n", "2"]
    if given.command == "calls":
        return calls(given.files[0], options)
    if given.command == "run":
        return run(given.files[0], given.files[1], given.seed, given.count, options)
    return show(given.files[0], given.files[1] if len(given.files) > 1 else None)


if __name__ == "__main__":
    sys.exit(main())
