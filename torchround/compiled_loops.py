"""C++ loops for the host: compiled once for a user, kept in a folder, and run by several threads.

The optimizer's update (`optim/kernel.py`) and the packing of frozen weights (`packed_formats.py`) are such loops. Each user
checks that a library gives the bits of plain operations before it is used.
"""

import ctypes
import hashlib
import os
import platform
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import torch

# Each rounding where the source has it: no fused multiply-add, no reordering. The last two flags change no result.
FLAGS = (
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# What the sources call each type.
DTYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
POLL_S = 0.05


class KernelError(RuntimeError):
    """The kernel cannot be compiled, loaded or called; the message says why in one line."""


def library_name(stem: str, source: Path, header: str) -> str:
    """Return the name of a library's file.

    It has a key made of everything that decides the code: the sources, the flags, and the processor, whose own
    instructions are used.
    """
    parts = (source.read_text(), header, *compiler_flags(), platform.platform(), _processor())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"{stem}-{key}.so"


def compiler_flags() -> tuple[str, ...]:
    """Return the compiler's options, among them the one that asks for this processor's own instructions.

    With AVX-512, compilers would prefer 256-bit vectors on many processors. The compact pass is 1.75 times as fast with
    512 bits (AMD Zen 5). Processors without AVX-512 are not affected.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return (*FLAGS, *(("-march=native", "-mprefer-vector-width=512") if is_x86 else ("-mcpu=native",)))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = ("model", "flags", "Features", "CPU")
    return "\n".join(sorted({line for line in lines if line.startswith(facts)}))


# Takes pieces of a buffer until none is left. The counter says where the first piece begins that no thread has taken.
RangeWork = Callable[[ctypes.c_int64], None]


class RangeThreads:
    """`count` threads that share the elements of a buffer, the calling one among them. `close` ends the others."""

    def __init__(self, count: int) -> None:
        self._others = count - 1
        self._pool = ThreadPoolExecutor(max(self._others, 1), thread_name_prefix="torchround update")

    def run(self, length: int, unit: int, work: RangeWork) -> None:
        """Let the threads do the work on `[0, length)`, one at most for each `unit` elements; return when it is done."""
        following, futures = ctypes.c_int64(), list[Future[None]]()
        try:
            # A limit on the number of processes may refuse a thread. The others then do its work.
            with suppress(RuntimeError):
                for _ in range(min(self._others, length // unit - 1)):
                    futures.append(self._pool.submit(work, following))
            work(following)
        finally:
            wait(futures)  # they write to the caller's buffers
        for future in futures:
            future.result()

    def close(self) -> None:
        self._pool.shutdown()


def compile_libraries(source: Path, headers: Mapping[Path, str], meanwhile: Callable[[], None]) -> None:
    """Compile the source with each `kind.h` into its library, at low priority, while `meanwhile` is called often.

    Raises `KernelError` with the first error of the first compiler that fails.
    """
    if not headers:
        return
    compiler = ["nice", cxx_compiler(), *compiler_flags()]
    compilers: list[tuple[subprocess.Popen[bytes], Path, Path]] = []
    with tempfile.TemporaryDirectory(dir=next(iter(headers)).parent) as name:
        try:
            for library, header in headers.items():
                folder = Path(name, library.stem)
                folder.mkdir()
                (folder / "kind.h").write_text(header)
                # In a session of its own: Ctrl-C stops the run, which then stops this.
                command = [*compiler, f"-I{folder}", f"-o{folder}/made.so", str(source)]
                with open(folder / "output", "wb") as output:
                    process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
                compilers.append((process, folder, library))
            while any(process.poll() is None for process, _, _ in compilers):
                meanwhile()
                time.sleep(POLL_S)
            for process, folder, library in compilers:
                if process.returncode:
                    lines = (folder / "output").read_text(errors="replace").splitlines()
                    # The compiler's first line may only say which file it compiles.
                    first = next((line for line in lines if "error" in line), " ".join(lines))
                    raise KernelError(f"compiling {source} failed ({first.strip()[:300]})")
                _publish(folder / "made.so", library)
        finally:
            for process, _, _ in compilers:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
                process.wait()


def _publish(made: Path, library: Path) -> None:
    """Give a library its name, unless it has one: another machine of the same home may have mapped the file."""
    try:
        with suppress(FileExistsError):
            os.link(made, library)
    except OSError:  # a file system without links
        os.replace(made, library)


def cxx_compiler() -> str:
    """Return the name of the C++ compiler, which is Inductor's too."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def cache_folder() -> Path:
    """Make the user's folder of libraries, and return it; a new one if another user could have put code there."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.path.expanduser(named)) / "torchround"
    with suppress(OSError):  # a user in a container may have no home
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return folder
    return Path(tempfile.mkdtemp(prefix="torchround-"))
