"""Say what this machine has, and which of the shipped configs it can train.

Every config is planned for the devices and the memory that are free now. Nothing is trained, and nothing is written.
`python train.py --config NAME.toml --dry-run` does the same for a config of your own.
"""

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from torchround.accelerators import present_kind
from torchround.commands import end_with_message, new_parser
from torchround.commands.configured_model import MISTAKES
from torchround.commands.plan_run import configured_question
from torchround.config import EngineTable, parse_command_line
from torchround.engine.errors import EngineError
from torchround.planning.memory import size_text
from torchround.planning.plan_report import report_plan
from torchround.run.hardware import available_host_bytes, find_hardware
from torchround.run.run_folder import checkpoint_bytes
from torchround.untrusted.terminal import say

NAME_WIDTH = 27  # in characters


def main(arguments: list[str]) -> int:
    new_parser(__doc__).parse_args(arguments)
    return end_with_message(look, ())


def look() -> None:
    for name, text in machine_facts():
        say(f"{name:<{NAME_WIDTH}}{text}")
    say("\nconfigs, planned for the devices and memory that are free now (train --dry-run says what helps)")
    # The clone that this package is in has configs; an installed package has none.
    for config in sorted((Path(__file__).parents[2] / "configs").glob("*.toml")):
        say(f"{config.name:<{NAME_WIDTH}}{config_text(config)}")


def machine_facts() -> Iterator[tuple[str, str]]:
    yield "system", f"{platform.system()} {platform.release()} on {platform.machine()}"
    yield "software", f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    yield "processors", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    total = size_text(psutil.virtual_memory().total)
    yield "host memory", f"{size_text(available_host_bytes())} available of {total}"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    hint = " (ulimit -l raises it, if a run warns that host memory stays pageable)"
    yield "memlock", "no limit" if locked == resource.RLIM_INFINITY else size_text(locked) + hint
    try:
        found, kind = find_hardware(EngineTable()), present_kind()
        if kind is None:
            yield "devices", f"{found.num_devices} virtual, on the processor{found.note}"
        else:
            for index in range(kind.count()):
                free, whole = map(size_text, kind.free_and_total_bytes(index))
                yield f"device {index}", f"{kind.card_name(index)}: {free} free of {whole}"
    except (EngineError, RuntimeError) as error:  # a card in use by others, or a driver that fails
        reason, *_ = str(error).split("\n")
        yield "devices", f"cannot be used: {reason}"
    yield "disk", f"{size_text(shutil.disk_usage(Path()).free)} are free in {Path().absolute()}"


def config_text(path: Path) -> str:
    try:
        options = parse_command_line(["--config", str(path)])
        question = configured_question(options, find_hardware(options.config.engine))
        answer = report_plan(question)
    except (*MISTAKES, EngineError, RuntimeError) as error:
        reason, *_ = str(error).split("\n")  # after PyTorch's reasons follows advice to programmers
        return f"cannot be planned: {reason}"
    if answer.plan is None or answer.device is None:
        return f"does not fit: {answer.problem}"  # `plan` lists the changes that would help, and tries each
    devices = f"each of {question.num_devices} devices {size_text(answer.device.total_bytes)}"
    host, disk = size_text(answer.host.total_bytes), size_text(checkpoint_bytes(question))
    return f"fits: host memory {host}, {devices}, a checkpoint {disk}"
