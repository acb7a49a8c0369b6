"""Lines of progress: none for quick work, one now and then for long work, and no harm from a closed console."""

import sys

import pytest

from torchround.untrusted.progress import EVERY_S, Progress


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def advanced(times: int, step_s: float) -> None:
    clock = Clock()
    progress = Progress("saving step-5", 40, "{} MiB".format, clock=clock)
    for _ in range(times):
        clock.now_s += step_s
        progress.advance(2)


def test_quick_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    advanced(times=19, step_s=EVERY_S / 20)
    assert capsys.readouterr() == ("", "")


def test_long_work_prints_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    advanced(times=20, step_s=EVERY_S / 5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"saving step-5: {done} MiB of 40 MiB ({done * 5 // 2} %)" for done in (10, 20, 30, 40)]


def test_work_of_unknown_size_is_counted_and_a_hostile_name_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress("reading \x1b[2J.jsonl", clock=clock)
    clock.now_s += EVERY_S
    progress.advance(12345)
    assert capsys.readouterr().err == "reading \\x1b[2J.jsonl: 12,345\n"


def test_a_closed_console_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise ValueError("I/O operation on closed file")

        def flush(self) -> None:
            raise AssertionError("nothing was written")

    monkeypatch.setattr(sys, "stderr", Closed())
    advanced(times=3, step_s=EVERY_S)
