"""The update of a segment as compiled machine code: getting it from the cache or a compiler, and calling it.

`kernel.cpp` is the pass over every state format and dtype; a rule adds the arithmetic of one element
(`UpdateRule.kernel_source`). A compiler makes a shared library for each kind of update in about a second, as a child
process of low priority. The library is called through ctypes, which releases the interpreter lock: the threads that
drive devices do not wait for updates.

A missing kernel never stops a run: one line says why, and the uncompiled pass gives the same bits.
"""

import ctypes
import hashlib
import logging
import os
import platform
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from torchround.optim.formats import EXACT, StateFormat
from torchround.optim.optimizer import UpdateRule
from torchround.optim.split_weights import split
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
        return library_name(f"update-{self.format.name}", SOURCE, self.header())


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

        def work(following: ctypes.c_int64) -> None:
            stop, chunk = ctypes.c_int64(buffers.numel), ctypes.c_int64(CHUNK_ELEMENTS)
            self._update(addresses, factors, ctypes.byref(following), stop, chunk)

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
        folder = cache_folder()
        libraries = {kind: folder / kind.library() for kind in wanted}
        missing = {path: kind.header() for kind, path in libraries.items() if not path.exists()}
        compile_libraries(SOURCE, missing, meanwhile)
        kernels: dict[KernelKind, UpdateKernel] = {}
        for kind, path in libraries.items():
            kernels[kind] = CompiledUpdate(path, threads)
            check_bits(kind, kernels[kind])
        return kernels
    except (KernelError, OSError) as error:
        logger.warning("%s; %s", error, PLAIN_COST)
        return {}


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


def check_bits(kind: KernelKind, kernel: UpdateKernel) -> None:
    """Raise `KernelError` unless the kernel gives the uncompiled update's bits, in two updates of random weights.

    Weights, gradients and so the state are of all sizes down to denormals. As engines ask for it, device weights are written
    beside what is read, and over it.
    """
    generator = torch.Generator().manual_seed(0)
    shape = 3, CHECKED_ELEMENTS
    exponents = torch.randint(-46, 3, shape, generator=generator)
    start, gradient, direction = torch.randn(shape, generator=generator) * 10.0**exponents
    state = [part for value in kind.rule.values for part in kind.format.parts(value)]
    for in_place in (False, True):
        results = []
        for used in (None, kernel):
            upper, residual = split(start) if kind.splits else (None, None)
            weight = None if kind.splits else start.clone()
            over = (upper if kind.splits else weight) if in_place else None
            if over is None or over.dtype != kind.written or kind.predicts:
                over = torch.zeros(CHECKED_ELEMENTS, dtype=kind.written)
            buffers = UpdateBuffers(
                *(kind.rule, kind.format, weight, residual, upper, over),
                parts={
                    part.name: torch.zeros(part.numel(CHECKED_ELEMENTS), dtype=part.dtype) for part in state
                },
                gradient=gradient.to(kind.gradient),
                direction=None if kind.direction is None else direction.to(kind.direction),
            )
            kept: list[Tensor] = []
            for number in (1, 2):
                update_(
                    buffers, lr=1e-2, update=number, gradient_scale=0.7, kernel=used, predicts=kind.predicts
                )
                written = (buffers.weight, buffers.residual, buffers.written, *buffers.parts.values())
                # As bytes: two NaNs of the same bits are equal, and the two zeros are not.
                kept += [tensor.view(torch.uint8).clone() for tensor in written if tensor is not None]
            results.append(kept)
        if not all(map(torch.equal, *results)):
            raise KernelError("the compiled optimizer does not give the uncompiled one's bits here")


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
