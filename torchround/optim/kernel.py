"""The update of a segment as compiled machine code: getting it from the cache or a compiler, and calling it.

`kernel.cpp` is the pass over every state format and dtype; a rule adds the arithmetic of one element
(`UpdateRule.kernel_source`). A compiler makes a shared library for each kind of update in about a second, as a child
process of low priority. The library is called through ctypes, which releases the interpreter lock: the threads that
drive devices do not wait for updates.

A missing kernel never stops a run: one line says why, and the uncompiled pass gives the same bits.
"""

import copy
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from torchround.optim.formats import EXACT, StateFormat
from torchround.optim.optimizer import UpdateRule
from torchround.optim.range_threads import Range, RangeThreads
from torchround.optim.update_pass import UpdateBuffers, UpdateKernel, update_

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernel.cpp")
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
DTYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}

# Elements that a thread takes at once: 1.7 MB of exact state in bf16. A multiple of the source's span.
CHUNK_ELEMENTS = 64 * 1024

COMPILE_LIMIT_S = 600.0
POLL_S = 0.05
PLAIN_COST = "the optimizer uses its uncompiled update, which is several times slower"
CHECKED_ELEMENTS = 10_007


class KernelError(RuntimeError):
    """The kernel cannot be compiled, loaded or called; the message says why in one line."""


@dataclass(frozen=True)
class KernelKind:
    """The properties of an update that decide its code. `rule` is one of the rules with this code."""

    source: str
    are_signed: tuple[bool, ...]
    num_numbers: int
    format: StateFormat
    splits: bool
    gradient: torch.dtype
    direction: torch.dtype | None
    written: torch.dtype
    predicts: bool
    rule: UpdateRule = field(compare=False)

    @classmethod
    def of(cls, buffers: UpdateBuffers, predicts: bool) -> "KernelKind | None":
        """Return the kind of an update of these buffers; None if there can be no kernel for it."""
        rule, gradient = buffers.rule, buffers.gradient
        direction = buffers.direction.dtype if buffers.direction is not None else None
        dtypes = (buffers.written.dtype, direction or torch.float32)
        if rule.kernel_source is None or gradient is None or not DTYPES.keys() >= {gradient.dtype, *dtypes}:
            return None
        return cls(
            rule.kernel_source,
            tuple(value.is_signed for value in rule.values),
            len(rule.numbers(1e-3, 1, 1.0)),
            buffers.format,
            buffers.weight is None,
            gradient.dtype,
            direction if rule.uses_direction else None,
            buffers.written.dtype,
            predicts,
            rule,
        )

    def header(self) -> str:
        """Return `kind.h`, which `kernel.cpp` includes."""
        signed = ", ".join(str(is_signed).lower() for is_signed in (*self.are_signed, True))
        return f"""
constexpr int NUM_VALUES = {len(self.are_signed)}, NUM_NUMBERS = {self.num_numbers};
constexpr bool IS_SIGNED[] = {{{signed}}};
constexpr bool IS_COMPACT = {str(self.format is not EXACT).lower()};
constexpr bool USES_DIRECTION = {str(self.direction is not None).lower()};
constexpr bool PREDICTS = {str(self.predicts).lower()};
using Format = {"Exact" if self.format is EXACT else "Compact"};
using Weights = {"Split" if self.splits else "Whole"};
using Gradient = {DTYPES[self.gradient]};
using Direction = {DTYPES[self.direction or torch.float32]};
using DeviceWeight = {DTYPES[self.written]};
{self.source}
"""

    def library(self) -> str:
        """Return the name of the library's file.

        It has a key made of everything that decides the code: the sources, the flags, and the processor, whose own
        instructions are used.
        """
        parts = (SOURCE.read_text(), self.header(), *compiler_flags(), platform.platform(), _processor())
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return f"update-{self.format.name}-{key}.so"


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
            f"there is no C++ compiler {cxx_compiler()!r} for the optimizer (CXX names another)"
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
                # The compiler's first line may only say which file it compiles.
                lines = [line for line in lines if "error" in line] or [line for line in lines if line]
                reason = lines[0][:300] if lines else "no reason given"
                raise KernelError(f"compiling the optimizer failed ({reason})")
            _publish(made, library)


def _publish(made: Path, library: Path) -> None:
    """Give a library its name, unless it has one: another machine of the same home may have mapped the file."""
    try:
        with suppress(FileExistsError):
            os.link(made, library)
    except OSError:  # a file system without links
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


def check_bits(kind: KernelKind, kernel: UpdateKernel) -> None:
    """Raise `KernelError` unless the kernel gives the uncompiled update's bits."""
    example = example_buffers(kind, CHECKED_ELEMENTS)
    for plain in (example, written_in_place(example, kind.predicts)):
        compiled = copy_of(plain)
        for buffers, with_kernel in ((plain, None), (compiled, kernel)):
            update_(
                buffers, lr=1e-2, update=3, gradient_scale=0.7, kernel=with_kernel, predicts=kind.predicts
            )
        if not have_same_bits(plain, compiled):
            raise KernelError("the compiled optimizer does not give the uncompiled one's bits here")


def example_buffers(kind: KernelKind, numel: int, seed: int = 0) -> UpdateBuffers:
    """Return buffers of this kind with random numbers; state down to denormal numbers and zero."""
    generator = torch.Generator().manual_seed(seed)
    weight, gradient, direction = (torch.randn(numel, generator=generator) for _ in range(3))
    parts = {}
    for value in kind.rule.values:
        exponents = torch.randint(-46, 3, (numel,), generator=generator)
        numbers = torch.randn(numel, generator=generator) * 10.0**exponents
        kept = kind.format.encode(value, numbers if value.is_signed else numbers.abs())
        for part, tensor in zip(kind.format.parts(value), kept, strict=True):
            parts[part.name] = tensor.contiguous()
    residual = torch.randint(-(2**15), 2**15, (numel,), generator=generator).to(torch.int16)
    return UpdateBuffers(
        kind.rule,
        kind.format,
        None if kind.splits else weight,
        residual if kind.splits else None,
        weight.bfloat16() if kind.splits else None,
        torch.full((numel,), 7.0, dtype=kind.written),
        parts,
        gradient.to(kind.gradient),
        direction.to(kind.direction) if kind.direction is not None else None,
    )


def written_in_place(buffers: UpdateBuffers, predicts: bool) -> UpdateBuffers:
    """Return a copy whose device weights are written over what is read, if the dtypes allow that."""
    copied = copy_of(buffers)
    if copied.weight is None:
        assert copied.current is not None, "split weights have both halves"
        return replace(copied, written=copied.current)
    if copied.written.dtype == torch.float32 and not predicts:
        return replace(copied, written=copied.weight)
    return copied


def copy_of(buffers: UpdateBuffers) -> UpdateBuffers:
    """Return buffers of the same content. Two that are one stay one."""
    return replace(copy.deepcopy(buffers), rule=buffers.rule, format=buffers.format)


def have_same_bits(left: UpdateBuffers, right: UpdateBuffers) -> bool:
    """Return whether everything that an update writes is equal, bit for bit."""
    written = [(each.weight, each.residual, each.written, *each.parts.values()) for each in (left, right)]
    pairs = zip(*written, strict=True)
    # As bytes: two NaNs of the same bits are equal, and the two zeros are not.
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in pairs
        if a is not None and b is not None
    )


def cxx_compiler() -> str:
    """Return the name of the C++ compiler, which is Inductor's too."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def private_folder() -> Path:
    """Make the user's folder of libraries, and return it. Raises `KernelError` if another user could put code there."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.path.expanduser(named)).resolve() / "torchround"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = folder.resolve()  # the user may have made it a link to another disk
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
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise KernelError(f"{folder}: another user may replace it, because all may write in {parent}")
