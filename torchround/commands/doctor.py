"""Say what this machine has, and which of the shipped configs it can train.

    torchround doctor
    torchround doctor --config NAME.toml --folder /fast/disk

The rates of the links to the devices are measured. Every config is planned for the devices and the memory that are free
now. Nothing is trained, and nothing is written.
"""

import logging
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from torchround.accelerators import AcceleratorKind, present_kind
from torchround.commands import new_parser
from torchround.commands.configured_model import MISTAKES
from torchround.commands.plan_run import configured_question, known_vocab_size
from torchround.config import ConfigError, EngineTable, parse_command_line
from torchround.config.load import find_config
from torchround.engine.device import Device, Stream
from torchround.engine.errors import EngineError
from torchround.engine.store.host_memory import HostAllocator
from torchround.planning.memory import size_text
from torchround.planning.plan_report import report_plan
from torchround.run import hardware
from torchround.run.hardware import available_host_bytes, find_hardware
from torchround.run.run_folder import checkpoint_bytes
from torchround.untrusted.terminal import say, terminal_safe

NAME_WIDTH = 27  # in characters
LINK_BYTES = 2**28  # of one copy: long compared with its start


def main(arguments: list[str]) -> int:
    """Print the facts. Returns the exit code: 2 for a mistake in the arguments, otherwise 0, whatever fits."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--config", action="append", metavar="NAME.toml", help="plan this instead of the shipped configs")
    add("--folder", type=Path, default=Path(), help="folder for runs, whose disk is looked at (default: .)")
    options = parser.parse_args(arguments)
    try:
        if not options.folder.is_dir():
            raise ConfigError([f"--folder {options.folder}: there is no such folder"])
        configs = [find_config(name) for name in options.config or ()]
    except ConfigError as error:
        print(terminal_safe(f"doctor: {error}"), file=sys.stderr)
        return 2
    # The clone that this package is in has configs; an installed package has none.
    configs = configs or sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
    log = logging.getLogger(hardware.__name__)
    log.disabled = True  # why a card is not found is a fact here
    try:
        for name, text in machine_facts(options.folder):
            say(f"{name:<{NAME_WIDTH}}{text}")
        say("\nconfigs, planned for these devices and the memory that is free now")
        for config in configs:
            say(f"{config.name:<{NAME_WIDTH}}{config_text(config)}")
    finally:
        log.disabled = False
    return 0


def machine_facts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what this machine has, the disk of `folder` included. What cannot be measured says so."""
    yield "system", f"{platform.system()} {platform.release()} on {platform.machine()}"
    yield "software", f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    yield "processors", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    total = size_text(psutil.virtual_memory().total)
    yield "host memory", f"{size_text(available_host_bytes())} available of {total}"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield "memlock", f"{'no limit' if locked == resource.RLIM_INFINITY else size_text(locked)} (ulimit -l)"
    try:
        found, kind = find_hardware(EngineTable()), present_kind()
        if kind is None:
            yield "devices", f"{found.num_devices} virtual, on the processor{found.note}"
        else:
            for index in range(kind.count()):
                free, whole = map(size_text, kind.free_and_total_bytes(index))
                yield f"device {index}", f"{kind.card_name(index)}: {free} free of {whole}"
            yield "compiled layers", compiler_text(kind)
            # One worker for each card: workers that share a card share its link.
            for index, device in enumerate(found.make_devices()[: kind.count()]):
                yield f"link {index}", link_text(device)
    except (EngineError, RuntimeError) as error:  # a card in use by others, or a driver that fails
        reason, *_ = str(error).split("\n")
        yield "devices", f"cannot be used: {reason}"
    yield "disk", f"{size_text(shutil.disk_usage(folder).free)} are free in {folder.absolute()}"


def compiler_text(kind: AcceleratorKind) -> str:
    """Compile and run one kernel, and say whether that works."""
    if (missing := kind.missing_compiler()) is not None:
        return missing
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=kind.name))
    except Exception as error:  # noqa: BLE001  (compilers raise errors of any type)
        reason = str(error).strip().partition("\n")[0]
        return f"a kernel could not be compiled ({type(error).__name__}: {reason}); layers run uncompiled"
    return "Inductor compiled a kernel, which ran"


def link_text(device: Device) -> str:
    """Copy between host and device, one direction at a time, and say the rates."""
    device.enter_thread()
    allocator = HostAllocator(device.pins_host_memory)
    try:
        host = allocator.allocate(LINK_BYTES, for_devices=True)
        memory = "page-locked" if allocator.locked_buffers() > 0 else "NOT page-locked"
        there = device.allocate(LINK_BYTES)
        rates = []
        up, down = (Stream.WEIGHT_UPLOAD, there, host), (Stream.GRADIENT_DOWNLOAD, host, there)
        for stream, to, source in (up, down):
            device.copy(stream, to, source)  # the first copy is slower
            begin = device.mark(stream)
            device.copy(stream, to, source)
            rates.append(LINK_BYTES / device.mark(stream).seconds_since(begin) / 1e9)
    except (EngineError, RuntimeError) as error:
        return f"not measured: {error}"
    finally:
        device.finish()
        device.free()
        allocator.close()
    return f"{rates[0]:.2f} GB/s up, {rates[1]:.2f} GB/s down, from and to {memory} host memory"


def config_text(path: Path) -> str:
    """Say whether a config fits this machine, and what it takes or lacks."""
    try:
        options = parse_command_line(["--config", str(path)])
        found = find_hardware(options.config.engine)
        question = configured_question(options, known_vocab_size(options), found)
        answer = report_plan(question)
    except (*MISTAKES, EngineError, RuntimeError) as error:
        reason, *_ = str(error).split("\n")  # after PyTorch's reasons follows advice to programmers
        return f"cannot be planned: {reason}"
    if answer.plan is None or answer.device is None:
        return f"does not fit: {answer.problem}"  # `plan` lists the changes that would help, and tries each
    devices = f"each of {question.num_devices} devices {size_text(answer.device.total_bytes)}"
    host, disk = size_text(answer.host.total_bytes), size_text(checkpoint_bytes(question))
    return f"fits: host memory {host}, {devices}, a checkpoint {disk}"
