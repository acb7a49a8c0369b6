"""Break runs again and again for a chosen time, and check that each ends as an undisturbed run does.

    python scripts/soak.py --minutes 60 --seed 7

Each iteration trains a small model. At random it kills the run, signals it, takes its disk away, gives it slow and failing
devices, or damages its checkpoints, and starts it again until it is complete. Then it compares the losses, and all that
was saved after the last step, bit for bit with an undisturbed run. After each start it reads the newest checkpoint
through; no saved step may be lost. The seed and its number fix what happens in an iteration, except where a moment is a
time. An iteration that fails keeps its folder; `--only NUMBER` repeats it. Needs the extra `test`. Exit codes: 0 all runs
ended the same, 1 some did not.
"""

import argparse
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.processes import Child, Processes
from tests.support.small_run import SmallRuns
from torchround.checkpoint import Checkpointer, CheckpointError, verify_checkpoint
from torchround.checkpoint.folders import RUN_SUBFOLDER, checkpoint_name
from torchround.run.early_end import STOP_SIGNALS

STEPS = 12
HUNG_AFTER_S = 300.0  # a start takes a second
MODES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "async": ("--engine.update=async",),
    "bounded": ("--engine.update=bounded", "--engine.stale_layers=2", "--training.clip=layer"),
    "tied": ("--model.flavor=tied",),
    "two rounds": ("--engine.plan={ forward = [2, 2], fused = 1, backward = [1, 3], rounds = 2 }",),
    "adapters": ("--lora.rank=2", "--lora.dropout=0.1", "--engine.update=async"),
}
TROUBLES = ("killed in a save", "killed", "signalled", "slow device", "faulty device", "damaged file", "none")
DISKS = ("full", "filling", "read-only")


@dataclass(frozen=True)
class Broken:
    """A start of a run, the trouble that it met, and the exit codes that are right then."""

    trouble: str
    child: Child
    codes: tuple[int, ...]


class SoakError(Exception):
    """A run that broke a promise: it lost a step, left damage, or differs from an undisturbed run."""


class Soak:
    """Iterations in `folder`. `tamper` is called with each complete run before it is compared."""

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        seed: int,
        tamper: Callable[[Path], object] = lambda run: None,
    ) -> None:
        self.met: Counter[str] = Counter()
        self._processes = processes
        self._folder = folder
        self._seed = seed
        self._tamper = tamper
        self._undisturbed: dict[str, Path] = {}

    def iterate(self, number: int) -> str:
        """Run one iteration, from the first start to the comparison. Returns what happened. Raises `SoakError`."""
        moment = random.Random(f"{self._seed}/{number}")
        mode = moment.choice(list(MODES))
        runs = self._runs(f"iteration-{number}")
        arguments = [
            "--run.name=run",
            "--checkpoint.interval_steps=2",
            "--checkpoint.keep_latest_k=0",
            *MODES[mode],
        ]
        arguments.append(f"--training.steps={STEPS}")
        met: list[str] = []
        if moment.random() < 0.25:
            met.append(self._starve(runs, moment, arguments))
        met += self._until_complete(runs, moment, arguments)
        self._tamper(runs.path("run"))
        self._compare(runs, mode)
        shutil.rmtree(runs.folder)
        return f"{mode}: {', '.join(met)}: the same"

    def _until_complete(self, runs: SmallRuns, moment: random.Random, arguments: list[str]) -> Iterator[str]:
        """Start the run again and again, on any number of devices, and leave the last start alone. Yields troubles."""
        checkpoints, damaged = runs.path("run") / RUN_SUBFOLDER, set[int]()
        reached = newest(checkpoints, damaged)
        for trouble in [*moment.choices(TROUBLES, k=moment.randint(1, 6)), "none"]:
            if trouble == "damaged file" and len(Checkpointer(checkpoints).checkpoints()) > 1:
                damage(checkpoints / checkpoint_name(reached), moment)
                damaged.add(reached)
                reached = newest(checkpoints, damaged)
            started = self._start(trouble, runs.folder, moment, arguments)
            text = started.child.text()
            self.met[started.trouble] += 1
            require(
                started.child.wait() in started.codes,
                f"{started.trouble}: exit code {started.child.wait()}",
                text,
            )
            require("Traceback" not in text or trouble == "faulty device", started.trouble, text)
            resumed = re.search(r"^resuming after step (\d+) ", text, re.MULTILINE)
            require(resumed is None or int(resumed[1]) == reached, f"step {reached} was saved before", text)
            before, reached = reached, newest(checkpoints, damaged)
            announced = [step for step in range(STEPS + 1) if f"/{checkpoint_name(step)} (" in text]
            require(reached >= max([before, *announced]), f"step {reached} is the newest that is left", text)
            yield started.trouble
        require(reached == STEPS, f"the run ends at step {reached}", text)

    def _start(self, trouble: str, folder: Path, moment: random.Random, arguments: list[str]) -> Broken:
        """Start the run with a trouble, and wait for its end."""
        num_devices = moment.randint(1, 4)
        arguments = [*arguments, f"--engine.num_devices={num_devices}"]
        if trouble == "killed in a save":
            operation, delay_s = moment.randint(1, 80), moment.choice((0.0, moment.uniform(0, 0.01)))
            child = self._ended("is_killed_at", operation, delay_s, arguments, folder=folder)
            return Broken(f"killed at file operation {operation}", child, (-signal.SIGKILL, 0))
        if trouble.endswith("device"):
            device, operation = f"cpu:{moment.randrange(num_devices)}", moment.randint(1, 400)
            kind = trouble.split()[0]
            child = self._ended("has_a_bad_device", device, kind, operation, arguments, folder=folder)
            return Broken(f"{kind} {device}", child, (0,) if kind == "slow" else (0, 1))
        if trouble in ("killed", "signalled"):
            number = signal.SIGKILL if trouble == "killed" else moment.choice(STOP_SIGNALS)
            wait_s = moment.uniform(0, 0.3)

            def send(child: Child) -> None:
                if trouble == "signalled":  # before the first step there is no handler
                    child.wait_until(lambda text: "  step " in text or "is complete" in text)
                time.sleep(wait_s)
                child.send(number)

            child = self._ended("trains", arguments, folder=folder, meanwhile=send)
            codes = [0, -number] if trouble == "killed" else [0, 128 + number]
            if "is complete" in child.text():  # the handler is gone again after this line
                codes.append(-number)
            return Broken(signal.Signals(number).name, child, tuple(codes))
        return Broken(trouble, self._ended("trains", arguments, folder=folder), (0,))

    def _starve(self, runs: SmallRuns, moment: random.Random, arguments: list[str]) -> str:
        """Make a whole run on a disk of its own that cannot be written for some steps."""
        trouble, begin = moment.choice(DISKS), moment.choice((4, 6))
        end = begin + moment.choice((2, 4))
        child = self._ended("trains_while_the_disk_is", trouble, begin, end, arguments, folder=runs.folder)
        require(child.wait() == 0 and "verified step" in child.text(), f"disk {trouble}", child.text())
        shutil.rmtree(runs.folder / "outputs")
        (runs.folder / "kept").rename(runs.folder / "outputs")
        self.met[f"disk {trouble}"] += 1
        return f"disk {trouble} from step {begin} to {end}"

    def _compare(self, runs: SmallRuns, mode: str) -> None:
        """Compare the losses of every step, and every saved tensor and state. Raises `SoakError` if any differs."""
        if mode not in self._undisturbed:
            alone = self._runs(f"undisturbed-{mode.replace(' ', '-')}")
            child = self._ended(
                "trains", ["--run.name=run", f"--training.steps={STEPS}", *MODES[mode]], folder=alone.folder
            )
            require(child.wait() == 0, "an undisturbed run fails", child.text())
            self._undisturbed[mode] = alone.path("run")
        shutil.copytree(self._undisturbed[mode], runs.path("undisturbed"))
        try:
            verify_checkpoint(runs.path("run") / RUN_SUBFOLDER / checkpoint_name(STEPS))
            runs.assert_same("run", "undisturbed", step=STEPS)
        # Missing or broken metrics raise other errors than a comparison that fails.
        except (AssertionError, CheckpointError, OSError, KeyError, ValueError) as error:
            raise SoakError(f"it differs from an undisturbed run: {type(error).__name__}: {error}") from error

    def _runs(self, name: str) -> SmallRuns:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return SmallRuns(folder)

    def _ended(
        self,
        scenario: str,
        *arguments: Any,
        folder: Path,
        meanwhile: Callable[[Child], object] = lambda child: None,
    ) -> Child:
        """Start a child and wait until it ends by itself or by `meanwhile`. Ends one that hangs, and raises `SoakError`."""
        child = self._processes.start(f"tests.support.scenarios:{scenario}", *arguments, folder=folder)
        hung = threading.Timer(HUNG_AFTER_S, child.send, [signal.SIGABRT])
        hung.start()
        meanwhile(child)
        code = child.wait()
        hung.cancel()
        require(code != -signal.SIGABRT, f"it did not end in {HUNG_AFTER_S:.0f} s", child.text())
        return child


def damage(checkpoint: Path, moment: random.Random) -> None:
    """Flip a byte of one of the checkpoint's files, or cut off its end."""
    path = moment.choice(sorted(checkpoint.iterdir()))
    content = bytearray(path.read_bytes())
    place = moment.randrange(len(content))
    if moment.random() < 0.3:
        del content[place:]
    else:
        content[place] ^= moment.randint(1, 255)
    path.write_bytes(content)


def newest(checkpoints: Path, damaged: set[int]) -> int:
    """Find the newest step whose checkpoint verifies, or 0 without a checkpoint.

    Raises `SoakError` for an unsound checkpoint that this script has not `damaged` itself.
    """
    for step, path in reversed(Checkpointer(checkpoints).checkpoints().items()):
        try:
            return verify_checkpoint(path)
        except CheckpointError as error:
            if step not in damaged:
                raise SoakError(f"a start left a damaged checkpoint: {error}") from error
    return 0


def require(is_so: bool, what: str, text: str) -> None:
    """Raise `SoakError` with the run's output if `is_so` is False."""
    if not is_so:
        raise SoakError(f"{what}\n{text}")


def main(arguments: list[str], tamper: Callable[[Path], object] = lambda run: None) -> int:
    """Run the iterations and print each. Returns the exit code."""
    options = parse(arguments)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.folder))
    print(f"seed {options.seed}, in {folder}", flush=True)
    start_s, failed, done = time.monotonic(), [], 0
    (folder / "processes").mkdir()
    with closing(Processes(folder / "processes")) as processes:
        soak = Soak(processes, folder, options.seed, tamper)
        for number in numbers(options, start_s):
            done += 1
            begin_s = time.monotonic()
            try:
                outcome = soak.iterate(number)
            except SoakError as error:
                failed.append(number)
                kept, again = folder / f"iteration-{number}", f"--seed {options.seed} --only {number}"
                outcome = f"FAILED, kept in {kept}; again: {again}\n{error}"
            print(f"iteration {number} ({time.monotonic() - begin_s:.1f} s): {outcome}", flush=True)
    met = ", ".join(f"{count} x {trouble}" for trouble, count in summary(soak.met).items())
    print(f"{done} iterations in {(time.monotonic() - start_s) / 60:.1f} minutes, seed {options.seed}: {met}")
    print(f"{len(failed)} failed{': ' + ', '.join(map(str, failed)) if failed else ''}")
    if not failed:
        shutil.rmtree(folder)
    return int(bool(failed))


def numbers(options: argparse.Namespace, start_s: float) -> Iterator[int]:
    """Yield the numbers of the iterations to run."""
    if options.only is not None:
        yield options.only
        return
    number = 0
    while number == 0 or time.monotonic() - start_s < 60 * options.minutes:
        if number == options.iterations:
            return
        yield number
        number += 1


def summary(met: Counter[str]) -> dict[str, int]:
    """Count troubles by kind, over all places and devices."""
    kinds: Counter[str] = Counter()
    for trouble, count in met.items():
        kinds[re.sub(r" (at file operation \d+|cpu:\d)$", "", trouble)] += count
    return dict(sorted(kinds.items()))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time in which iterations begin; at least one does"
    )
    parser.add_argument("--iterations", type=int, help="most iterations to run")
    parser.add_argument("--seed", type=int, default=0, help="fixes what happens in each iteration")
    parser.add_argument("--only", type=int, help="this iteration alone")
    parser.add_argument("--folder", type=Path, help="on the disk to be used (default: the temporary folder)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
