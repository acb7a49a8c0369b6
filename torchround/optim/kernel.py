"""The update of a segment as compiled machine code: getting it from the cache or a compiler, and calling it.

`kernel.cpp` is the pass over every state format and dtype; a rule adds the arithmetic of one element
(`UpdateRule.kernel_source`). A compiler makes a shared library for each kind of update in about a second, as a child
process of low priority. The library is called through ctypes, which releases the interpreter lock: the threads that
drive devices do not wait for updates.

A missing kernel never stops a run: one line says why, and the uncompiled pass gives the same bits.
"""

import ctypes
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from torch import Tensor

from torchround.optim.kernel_check import check_bits
from torchround.optim.kernel_kind import SOURCE, KernelError, KernelKind, compiler_flags
from torchround.optim.range_threads import Range, RangeThreads
from torchround.optim.update_pass import UpdateBuffers, UpdateKernel

logger = logging.getLogger(__name__)

# Elements that a thread takes at once: 1.7 MB of exact state in bf16. A multiple of the source's span.
CHUNK_ELEMENTS = 64 * 1024

COMPILE_LIMIT_S = 600.0
POLL_S = 0.05
PLAIN_COST = "the optimizer uses its uncompiled update, which is several times slower"


class CompiledUpdate:
    """A compiled in-place update of one kind; an `UpdateKernel`.

    It takes any length and any number of threads and gives the bits of `update_`. A call either raises `KernelError`
    before it has touched anything, or does all of its work.
    """

    def __init__(self, library: Path, threads: RangeThreads) -> None:
        try:
            self._update = ctypes.CDLL(str(library)).update
        except (OSError, AttributeError) as error:
            raise KernelError(f"{library} cannot be loaded: {error}") from error
        self._update.restype = None
        self._threads = threads

    def __call__(self, buffers: UpdateBuffers, numbers: tuple[Tensor, ...]) -> None:
        tensors = _tensors(buffers)
        given = [tensor for tensor in tensors if tensor is not None]
        if not all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in given):
            raise KernelError("the compiled update takes contiguous buffers in host memory only")
        addresses = (ctypes.c_void_p * len(tensors))(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors)
        )
        factors = (ctypes.c_float * len(numbers))(*map(float, numbers))

        def work(whole: Range) -> None:
            chunk = ctypes.c_int64(CHUNK_ELEMENTS)
            self._update(addresses, factors, ctypes.byref(whole.next), ctypes.c_int64(whole.stop), chunk)

        self._threads.run(buffers.numel, CHUNK_ELEMENTS, work)


def _tensors(buffers: UpdateBuffers) -> list[Tensor | None]:
    """Return the tensors in the order of the source's `Buffers`."""
    tensors = [buffers.weight, buffers.residual, buffers.current, buffers.written]
    tensors += [buffers.gradient, buffers.direction]
    for value in buffers.rule.values:
        parts = [buffers.parts[part.name] for part in buffers.format.parts(value)]
        tensors += [*parts, None][:2]
    return tensors


def get_kernels(
    wanted: Collection[KernelKind], meanwhile: Callable[[], None], threads: RangeThreads | None = None
) -> dict[KernelKind, UpdateKernel]:
    """Return a kernel for each kind, or, after one warning, no kernel at all if one cannot be had.

    Compiles the kernels that the cache lacks, all at once, at low priority: about a second of a core each. Calls
    `meanwhile` many times a second; an exception from it ends the compilers and is raised from here.
    """
    threads = threads or RangeThreads(1)
    try:
        folder = private_folder()
        libraries = {kind: folder / kind.library() for kind in wanted}
        _compile({kind: path for kind, path in libraries.items() if not path.exists()}, meanwhile)
        kernels: dict[KernelKind, UpdateKernel] = {}
        for kind, path in libraries.items():
            kernels[kind] = CompiledUpdate(path, threads)
            check_bits(kind, kernels[kind])
        return kernels
    except (KernelError, OSError) as error:
        logger.warning("%s; %s", error, PLAIN_COST)
        return {}


def _compile(libraries: dict[KernelKind, Path], meanwhile: Callable[[], None]) -> None:
    """Compile each kind into its library. Raises `KernelError` with the first error of the first compiler that fails."""
    if not libraries:
        return
    if shutil.which(cxx_compiler()) is None:
        raise KernelError(
            f"there is no C++ compiler {cxx_compiler()!r} to compile the optimizer with (CXX names another)"
        )
    deadline_s = time.monotonic() + COMPILE_LIMIT_S
    with ExitStack() as stack:
        compilers = {}
        for kind, library in libraries.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=library.parent)))
            (folder / "kind.h").write_text(kind.header())
            output = stack.enter_context(tempfile.TemporaryFile())
            made = folder / "update.so"
            compilers[library] = _start(folder, made, output), made, output
            stack.callback(_end, compilers[library][0])
        while any(process.poll() is None for process, _, _ in compilers.values()):
            meanwhile()
            if time.monotonic() > deadline_s:
                raise KernelError(f"compiling the optimizer took more than {COMPILE_LIMIT_S:g} s")
            time.sleep(POLL_S)
        for library, (process, made, output) in compilers.items():
            if process.returncode or not made.exists():
                output.seek(0)
                lines = [line.strip() for line in output.read().decode(errors="replace").split("\n")]
                reasons = [line for line in lines if "error" in line] or [
                    *filter(None, lines),
                    "no reason given",
                ]
                raise KernelError(f"compiling the optimizer failed ({reasons[0][:300]})")
            os.replace(made, library)


def _start(folder: Path, made: Path, output: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start a compiler of low priority, in a session of its own: Ctrl-C stops the run, which then stops this."""
    command = [cxx_compiler(), *compiler_flags(), "-I", str(folder), "-o", str(made), str(SOURCE)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    # The group's, because the compiler starts further processes.
    with suppress(OSError):  # it has ended already
        os.setpriority(os.PRIO_PGRP, process.pid, 10)
    return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
    process.wait()


def cxx_compiler() -> str:
    """Return the name of the C++ compiler, which is Inductor's too."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def private_folder() -> Path:
    """Make the user's folder of libraries, and return it. Raises `KernelError` if another user could put code there."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.path.expanduser(named)).resolve() / "torchround"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:  # a user in a container may have no home
        folder = Path(tempfile.gettempdir()) / f"torchround-{os.getuid()}"
        folder.mkdir(exist_ok=True, mode=0o700)
    _refuse_shared(folder)
    return folder


def keep_inductor_private() -> None:
    """Let Inductor, which loads code too, use no folder in /tmp that another user has made under its name."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return  # the user's choice
    folder = Path(default_cache_dir())
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
        _refuse_shared(folder)
    except (KernelError, OSError) as error:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchround-")
        logger.warning("%s; compiled code is not kept for the next run", error)


def _refuse_shared(folder: Path) -> None:
    """Raise `KernelError` if the folder is another user's, or another user could put a file into it."""
    status = folder.lstat()
    # A group with the number of its user is usually that user's alone.
    others = stat.S_IWOTH if status.st_gid == status.st_uid else stat.S_IWOTH | stat.S_IWGRP
    if stat.S_ISLNK(status.st_mode) or status.st_mode & others or status.st_uid not in (0, os.getuid()):
        raise KernelError(
            f"{folder}: another user may write there, or it is a link (TORCHINDUCTOR_CACHE_DIR names another folder)"
        )
