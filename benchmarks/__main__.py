"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME [options]` runs one."""

import importlib
import sys
from collections.abc import Sequence

from benchmarks.frame import Benchmark
from torchround.commands import run_command

# Name of the command: module and constant. A module is imported only when it is asked for, because several need
# packages that the others do without.
BENCHMARKS: dict[str, tuple[str, str]] = {
    "plain-loop": ("step", "PLAIN_LOOP"),
    "schedule": ("schedule", "SCHEDULE"),
    "kept-activations": ("kept_schedule", "KEPT_SCHEDULE"),
    "kept-stage": ("kept_stage", "KEPT_STAGE"),
    "kernels": ("kernels", "KERNELS"),
    "planner": ("planner", "PLANNER"),
    "optimizer-speed": ("optimizer", "SPEED"),
    "loader": ("data", "LOADER"),
    "data-wait": ("data", "WAIT"),
    "machines": ("machines", "MACHINES"),
    "gpu": ("gpu", "GPU"),
}


def find(name: str) -> Benchmark:
    """Import the benchmark of this name."""
    module, constant = BENCHMARKS[name]
    found = getattr(importlib.import_module(f"benchmarks.{module}"), constant)
    assert isinstance(found, Benchmark), f"benchmarks.{module}.{constant} is not a benchmark"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the first argument names, or list all; 2 if there is no such benchmark."""
    name, *options = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [options]\n")
        for known in BENCHMARKS:
            print(f"  {known:18} {find(known).purpose.strip().splitlines()[0]}")
        return 0
    if name not in BENCHMARKS:
        print(f"no benchmark {name}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return find(name).run(name, options)


if __name__ == "__main__":
    run_command(main)
