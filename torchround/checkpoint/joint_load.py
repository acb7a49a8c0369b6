"""One checkpoint, opened and read by several machines together.

Each machine offers what it has of the checkpoint: the manifest, and names of files. In a shared folder machine 0's offer
counts; on disks of their own the machines' files are put together. Then each file is looked at by one machine, and what
it found is exchanged, so that all machines come to the same answer. At last each machine reads the files that hold
tensors it wants. A file that is only on another machine's disk comes from there, byte by byte in file order.

Machines work through the files in the same order, and each sends or receives one file at a time. So the first file that
is not done always has all its machines, and no two of them wait for each other.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchround.checkpoint.conversion import Converter, Layout, ReadingPlan, TensorSink, layout_of
from torchround.checkpoint.errors import DamagedCheckpointError, ForeignCheckpointError
from torchround.checkpoint.machine_team import MachineTeam, Outcome
from torchround.checkpoint.manifest import (
    STATE_FILE,
    Manifest,
    check_file,
    checksum_of,
    parse_manifest,
    read_manifest,
    read_state,
)
from torchround.checkpoint.step_folder import (
    add_header,
    check_contents,
    checked_header,
    read_file,
    tensor_files,
)
from torchround.checkpoint.tensor_file import DTYPE_NAMES, memory_of, read_tensors
from torchround.checkpoint.uncached_io import PIECE_BYTES, UncachedPass
from torchround.planning.memory import size_text
from torchround.untrusted.regular_file import open_regular
from torchround.untrusted.terminal import Progress


@dataclass(frozen=True)
class JointCheckpoint:
    """A checkpoint of which the machines together have every file.

    `path` is its name in messages, the same on all machines; `here` is this machine's folder of it, None if it has none.
    `holders` are the machines that can read a file, by its name.
    """

    team: MachineTeam
    manifest: Manifest
    path: Path
    here: Path | None
    holders: Mapping[str, Sequence[int]]

    def verify(self, advance: Callable[[int], object] = lambda nbytes: None) -> None:
        """Check every byte, each file on one machine. Raises `DamagedCheckpointError`, the same on all."""
        names = [name for name in self.manifest.files if self._reader_of(name) == self.team.rank]

        def check() -> None:
            check_contents(self._folder(), self.manifest, names, advance)

        self._together(check if names else lambda: None, "checked its files of")

    def load(
        self, tensors: Mapping[str, Tensor], optional: Callable[[str], bool], converter: Converter
    ) -> tuple[dict[str, Any], ReadingPlan]:
        """Fill this machine's `tensors`. Returns the state, and how the tensors were read.

        Checks and errors are as for `load_checkpoint`, over the tensors of all machines, and the same on all of them.
        """
        wanted = [
            _decoded(layout)
            for layout in self.team.gather(
                _encoded(layout_of(tensors)), f"{self.path}: the tensors of each machine"
            )
        ]
        state, headers = self._headers()
        stored: Layout = {}
        for name in tensor_files(self.manifest):
            add_header(stored, self.path, name, headers[name])
        everything: Layout = {}
        for layout in wanted:
            everything |= layout
        plan = ReadingPlan(stored, converter.conversions(stored, everything))
        if differences := plan.differences(everything, optional):
            # An altered byte of a header must not look like another model, so the checksums decide first.
            self.verify()
            raise ForeignCheckpointError(self.path, differences, state)
        needed = [plan.needed(layout) for layout in wanted]
        machines = {name: _needing(needed, header) for name, header in headers.items()}
        self._read(plan.destinations(tensors), machines)
        return state, plan

    def state(self) -> dict[str, Any]:
        """Return the state, which one machine reads for all. Raises `DamagedCheckpointError`, the same on all."""
        reader = self._reader_of(STATE_FILE)

        def read() -> dict[str, Any] | None:
            return read_state(self._folder(), self.manifest) if reader == self.team.rank else None

        found: dict[str, Any] = self._together(read, "read the state of")[reader]
        return found

    def _headers(self) -> tuple[dict[str, Any], dict[str, Layout]]:
        """Return the state and each file's header. Each file is read by one machine."""

        def read() -> Outcome:
            own = [name for name in self.manifest.files if self._reader_of(name) == self.team.rank]
            headers = {
                name: _encoded(checked_header(self._folder(), name)) for name in own if name != STATE_FILE
            }
            return {
                "headers": headers,
                "state": read_state(self._folder(), self.manifest) if STATE_FILE in own else None,
            }

        found = self._together(read, "read the headers of")
        state: dict[str, Any] = found[self._reader_of(STATE_FILE)]["state"]
        return state, {name: _decoded(header) for part in found for name, header in part["headers"].items()}

    def _read(self, tensors: Mapping[str, Tensor | TensorSink], needing: Mapping[str, Sequence[int]]) -> None:
        """Fill `tensors`, file by file. `needing` are the machines that need some of a file, by its name."""
        own = [name for name in needing if self.team.rank in needing[name]]
        total_bytes = sum(self.manifest.files[name].size_bytes for name in own)
        progress = Progress(f"reading {self.path}", total_bytes, size_text)
        errors: list[DamagedCheckpointError] = []
        for name, machines in needing.items():
            holders = self.holders[name]
            away = [rank for rank in machines if rank not in holders]
            try:
                # First: other machines wait for it.
                if away and holders[0] == self.team.rank:
                    self._send(name, away)
                if self.team.rank in away:
                    self._receive(name, holders[0], tensors)
                elif self.team.rank in machines:
                    read_file(self._folder(), name, self.manifest, tensors)
            except DamagedCheckpointError as error:
                # The files after it are read all the same: other machines may wait for this one's part in them.
                errors.append(error)
            if self.team.rank in machines:
                progress.advance(self.manifest.files[name].size_bytes)

        def end() -> None:
            if errors:
                raise errors[0]

        self._together(end, "read its tensors of")

    def _send(self, name: str, machines: Sequence[int]) -> None:
        """Send a file to `machines`. After an error they get zeros, which their checksum refuses."""
        left_bytes = self.manifest.files[name].size_bytes
        piece = torch.empty(min(PIECE_BYTES, left_bytes), dtype=torch.uint8)
        with ExitStack() as stack:
            try:
                file, failure = stack.enter_context(open_regular(self._folder() / name)), None
            except OSError as error:
                file, failure = None, error
            while left_bytes:
                data = piece[: min(PIECE_BYTES, left_bytes)]
                if file is not None and failure is None:
                    failure = _fill(file, memory_of(data))
                if failure is not None:
                    data.zero_()
                for peer in machines:
                    self.team.send(peer, data, f"{name} of {self.path}")
                left_bytes -= data.numel()
        if failure is not None:
            raise DamagedCheckpointError(self.path, f"{name} cannot be read: {failure}") from failure

    def _receive(self, name: str, peer: int, tensors: Mapping[str, Tensor | TensorSink]) -> None:
        """Read a file that machine `peer` sends."""
        size_bytes = self.manifest.files[name].size_bytes
        source = _ReceivedFile(
            size_bytes, lambda into: self.team.receive(peer, into, f"{name} of {self.path}")
        )
        try:
            with closing(UncachedPass(None)) as one_pass:
                found = read_tensors(source, one_pass, tensors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(self.path, f"{name} cannot be read: {error}") from error
        finally:
            source.drain()
        check_file(self.path, name, self.manifest, found)

    def _reader_of(self, name: str) -> int:
        """Return the machine that looks at a file for all. In a shared folder the machines take turns."""
        holders = self.holders[name]
        turn = list(self.manifest.files).index(name) if self.team.shares_folder else 0
        return holders[turn % len(holders)]

    def _folder(self) -> Path:
        assert self.here is not None, f"{self.path} is not on this machine, which was to read from it"
        return self.here

    def _together(self, work: Callable[[], Any], what: str) -> list[Any]:
        """Do `work`, and return what it returned on each machine. Raises the first machine's error on all."""
        value, failure = None, None
        try:
            value = work()
        except DamagedCheckpointError as error:
            failure = str(error).removeprefix(f"checkpoint {self.here}: ")
            failure = failure.removeprefix(f"checkpoint {self.path}: ")
        outcomes = self.team.gather({"value": value, "failure": failure}, f"each {what} {self.path}")
        for rank, outcome in enumerate(outcomes):
            if outcome["failure"]:
                raise DamagedCheckpointError(self.path, self.team.says(rank, outcome["failure"]))
        return [outcome["value"] for outcome in outcomes]


def open_jointly(
    team: MachineTeam, folders: Sequence[Path], step: int | None = None
) -> JointCheckpoint | None:
    """Put together the checkpoint that is in `folders` of each machine, one after another if there are several.

    Returns None if no machine has one. Raises `DamagedCheckpointError` that names what is missing on all, and
    `ForeignCheckpointError`. Contents are not read.
    """
    offers = [_offer(folder, step, not team.shares_folder) for folder in folders]
    if team.shares_folder and team.rank > 0:
        offers = []  # machine 0 sees the folder first, and a network's file system may show others an older one
    every = team.gather(offers, f"what each machine has of {folders[0] if folders else 'a checkpoint'}")
    by_checksum: dict[str, list[tuple[int, Outcome]]] = {}
    problems = []
    for rank, found in enumerate(every):
        for offer in found:
            if offer.get("foreign"):
                raise ForeignCheckpointError(Path(offer["path"]), team.says(rank, offer["foreign"]))
            if offer.get("damage"):
                problems.append((offer["path"], team.says(rank, offer["damage"])))
            else:
                by_checksum.setdefault(offer["checksum"], []).append((rank, offer))
    # Two machines may have different ones of the same step, after a save that only one of them could complete.
    for offered in by_checksum.values():
        opened = _put_together(team, folders, offered)
        missing = [name for name in opened.manifest.files if not opened.holders[name]]
        if not missing:
            return opened
        shown = f"{missing[0]} is" if len(missing) == 1 else f"{missing[0]} and {len(missing) - 1} more are"
        problems.insert(0, (str(opened.path), f"{shown} on none of {', '.join(team.names)}"))
    if problems:
        raise DamagedCheckpointError(Path(problems[0][0]), "; ".join(reason for _, reason in problems[:3]))
    return None


def _offer(folder: Path, step: int | None, is_part: bool) -> Outcome:
    """Return what a folder has of a checkpoint: its manifest and the names of its files, or what is wrong with it."""
    try:
        manifest = read_manifest(folder, step, is_part)
    except DamagedCheckpointError as error:
        return {"path": str(folder), "damage": str(error).removeprefix(f"checkpoint {folder}: ")}
    except ForeignCheckpointError as error:
        return {"path": str(folder), "foreign": str(error).removeprefix(f"checkpoint {folder}: ")}
    written = manifest.encode().decode()
    files = [name for name in manifest.files if (folder / name).exists()]
    return {
        "path": str(folder),
        "checksum": checksum_of(written.encode()),
        "manifest": written,
        "files": files,
    }


def _put_together(
    team: MachineTeam, folders: Sequence[Path], offered: list[tuple[int, Outcome]]
) -> JointCheckpoint:
    """Return the checkpoint of one manifest from what the machines offer of it. Files may be missing."""
    first = offered[0][1]
    path = Path(first["path"])
    manifest = parse_manifest(path, first["manifest"].encode())
    if team.shares_folder:
        # Each finds out when it reads whether it sees the folder too.
        here = folders[0].with_name(path.name)
        return JointCheckpoint(
            team, manifest, path, here, {name: range(team.size) for name in manifest.files}
        )
    own = {rank: Path(offer["path"]) for rank, offer in reversed(offered)}
    held = {name: [rank for rank, offer in offered if name in offer["files"]] for name in manifest.files}
    return JointCheckpoint(team, manifest, path, own.get(team.rank), held)


def _needing(needed: Sequence[frozenset[str]], header: Layout) -> list[int]:
    return [rank for rank, names in enumerate(needed) if not names.isdisjoint(header)]


def _encoded(layout: Layout) -> dict[str, list[Any]]:
    return {name: [DTYPE_NAMES[dtype], list(shape)] for name, (dtype, shape) in layout.items()}


def _decoded(layout: Mapping[str, list[Any]]) -> Layout:
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    return {name: (dtypes[dtype_name], tuple(shape)) for name, (dtype_name, shape) in layout.items()}


def _fill(file: FileIO, memory: memoryview) -> OSError | None:
    """Fill `memory` from the file. Returns what went wrong."""
    try:
        while memory:
            if not (num_read := file.readinto(memory)):
                return OSError(f"it ends {len(memory)} bytes early")
            memory = memory[num_read:]
    except OSError as error:
        return error
    return None


class _ReceivedFile:
    """A file that comes from another machine in messages of `PIECE_BYTES`, the last one shorter."""

    def __init__(self, size_bytes: int, receive: Callable[[Tensor], None]) -> None:
        self._left_bytes = size_bytes
        self._receive = receive
        self._staging = torch.empty(min(PIECE_BYTES, size_bytes), dtype=torch.uint8)
        self._rest = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, fewer at the end."""
        parts = []
        while size and (part := self._next(size)):
            parts.append(bytes(part))
            size -= len(part)
        return b"".join(parts)

    def readinto(self, memory: memoryview, /) -> int:
        """Fill a part of `memory` and return its length, 0 at the end."""
        part = self._next(len(memory))
        memory[: len(part)] = part
        return len(part)

    def drain(self) -> None:
        """Receive what is left: the other machine sends all of it."""
        while self._next(PIECE_BYTES):
            pass

    def _next(self, size: int) -> memoryview:
        if not self._rest and self._left_bytes:
            message = self._staging[: min(PIECE_BYTES, self._left_bytes)]
            self._receive(message)
            self._left_bytes -= message.numel()
            self._rest = memory_of(message)
        part, self._rest = self._rest[:size], self._rest[size:]
        return part
