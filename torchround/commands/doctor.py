"""Say what this machine has, and which of the shipped configs it can train.

    torchround doctor
    torchround doctor --config NAME.toml --folder /fast/disk

Rates of the disk and of the links to the devices are measured, in a second or two each. Every config is planned for the
devices and the memory that are free now. Nothing is trained, and nothing is left behind.
"""

import argparse
import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchround.commands.plan_run import configured_question, known_vocab_size
from torchround.config import ConfigError, EngineTable, parse_command_line
from torchround.config.load import find_config
from torchround.data import TokenizerError
from torchround.engine.errors import EngineError
from torchround.hf import HFError
from torchround.models import ModelConfigError
from torchround.planning.cards import UnknownPeakError
from torchround.planning.memory import size_text
from torchround.planning.partition import PlanError
from torchround.planning.plan_report import report_plan
from torchround.run import hardware
from torchround.run.hardware import find_hardware
from torchround.run.machine import Fact, device_facts, disk_text, system_facts
from torchround.run.start_checks import checkpoint_bytes
from torchround.untrusted.terminal import say, terminal_safe

NAME_WIDTH, WIDTH = 27, 100  # in characters; the width if the output is not a terminal
# A card that cannot be used makes PyTorch raise RuntimeError.
UNPLANNABLE = (
    *(ConfigError, ModelConfigError, EngineError, TokenizerError, HFError, PlanError),
    *(UnknownPeakError, RuntimeError),
)


def main(arguments: list[str]) -> int:
    """Print the facts. Returns the exit code: 2 for a mistake in the arguments, otherwise 0, whatever fits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="NAME.toml",
        help="plan this config instead of the shipped ones; may be given several times",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="folder whose disk is measured (default: this one)"
    )
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        print(terminal_safe(f"doctor: --folder {options.folder}: there is no such folder"), file=sys.stderr)
        return 2
    try:
        configs = [find_config(name) for name in options.config or ()]
    except ConfigError as error:
        print(terminal_safe(f"doctor: {error}"), file=sys.stderr)
        return 2
    shipped = configs or shipped_configs()
    with without_warnings(hardware.__name__):  # why no accelerator was found is a fact here, and is said once
        for fact in machine(options.folder):
            show(fact)
        say("\nconfigs, planned for these devices and the memory that is free now")
        if not shipped:
            say("  none: the shipped ones are in the clone's configs/, which is not here")
        for config in shipped:
            for fact in config_facts(config):
                show(fact)
    return 0


@contextmanager
def without_warnings(name: str) -> Iterator[None]:
    """Keep a module's warnings back for a while."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def machine(folder: Path) -> Iterator[Fact]:
    """Yield what this machine has, the disk of `folder` included."""
    yield from system_facts()
    try:
        yield from device_facts(find_hardware(EngineTable()))
    except (EngineError, RuntimeError) as error:  # a card in use by others, or a driver that fails
        yield "devices", f"cannot be used: {_reason(error)}"
    yield "disk", disk_text(folder)


def shipped_configs() -> list[Path]:
    """Return the configs of the clone that this package is in; none if it was installed without one."""
    return sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def config_facts(path: Path) -> Iterator[Fact]:
    """Yield whether a config fits this machine, what it takes or lacks, and the machine that its first line names."""
    try:
        options = parse_command_line(["--config", str(path)])
        question = configured_question(
            options, known_vocab_size(options), find_hardware(options.config.engine)
        )
        answer = report_plan(question)
    except UNPLANNABLE as error:
        yield path.name, f"cannot be planned: {_reason(error)}"
        return
    if answer.plan is not None and answer.device is not None:
        devices = f"each of {question.num_devices} devices {size_text(answer.device.total_bytes)}"
        host, disk = size_text(answer.host.total_bytes), size_text(checkpoint_bytes(question))
        yield path.name, f"fits: host memory {host}, {devices}, a checkpoint {disk}"
    else:
        # `plan` lists the changes that would help, and tries each.
        yield path.name, f"does not fit: {answer.problem}"
    first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    if first.startswith("# "):
        yield "", f"written for: {first.removeprefix('# ').partition('. ')[0]}"


def _reason(error: Exception) -> str:
    """Return the message; of PyTorch's errors the first line, because advice to programmers follows it."""
    text = str(error)
    return text.partition("\n")[0] if isinstance(error, RuntimeError) else text


def show(fact: Fact) -> None:
    """Print a fact: its name, and its text beside it in as many lines as it takes."""
    name, text = fact
    width = max(60, shutil.get_terminal_size((WIDTH, 0)).columns)
    indent = " " * NAME_WIDTH
    for line in textwrap.wrap(
        f"{name:<{NAME_WIDTH}}{text}", width, subsequent_indent=indent, drop_whitespace=True
    ):
        say(line)
