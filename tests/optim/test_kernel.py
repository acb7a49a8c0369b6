"""The compiled update: the plain pass's bits for any length, cut and thread count; and a run without it.

One C++ compilation per pair of dtypes, kept in Inductor's cache folder like a user's own.
"""

import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchround.engine.optimizer_worker import use_threads_here
from torchround.optim import UpdateProgress, adamw_update_
from torchround.optim.kernel import AdamWKernel, KernelError, UpdateDtypes, get_kernels, kernel_library

pytestmark = pytest.mark.compiles

HYPER = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# What engines ask for: gradients in the device weight's dtype, or in fp32 if they are added up on the host. Every
# other pair is compared with the plain pass when a run gets it (`kernel._check_bits`).
PAIRS: list[UpdateDtypes] = [(F32, F32), (BF16, BF16), (F16, F16), (F32, BF16)]

Buffers = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def kernels() -> dict[UpdateDtypes, AdamWKernel]:
    found = get_kernels(PAIRS, lambda: None)
    assert found.keys() == set(PAIRS)
    return found


def random_buffers(numel: int, dtypes: UpdateDtypes, seed: int = 0) -> Buffers:
    """(weight, exp_avg, exp_avg_sq, gradient, device_weight); second moments down to denormal numbers and zero."""
    generator = torch.Generator().manual_seed(seed)
    weight, exp_avg, gradient = (torch.randn(numel, generator=generator) for _ in range(3))
    exponent = torch.randint(-46, 3, (numel,), generator=generator)
    exp_avg_sq = torch.rand(numel, generator=generator) * 10.0**exponent
    device_weight = torch.full((numel,), 7.0, dtype=dtypes[1])
    return weight, exp_avg.mul_(0.1), exp_avg_sq, gradient.to(dtypes[0]), device_weight


def copy_of(buffers: Buffers) -> Buffers:
    return tuple(tensor.clone() for tensor in buffers)  # type: ignore[return-value]


def update(
    buffers: Buffers,
    kernel: AdamWKernel | None,
    progress: UpdateProgress | None = None,
    predicts: bool = False,
) -> None:
    adamw_update_(
        *buffers,
        **HYPER,
        bias_correction_step=3,
        gradient_scale=0.7,
        progress=progress,
        kernel=kernel,
        predicts=predicts,
    )


def assert_same_bits(left: Buffers, right: Buffers) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def thread_runs(work, threads: int) -> None:
    """Run `work` in a thread of its own with `threads` OpenMP threads, as the optimizer worker does."""

    def target() -> None:
        use_threads_here(threads)
        work()

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_the_kernel_gives_the_plain_passs_bits_for_every_short_length(
    kernels: dict[UpdateDtypes, AdamWKernel], dtypes: UpdateDtypes
) -> None:
    for numel in (*range(1, 70), 511, 512, 513):
        plain = random_buffers(numel, dtypes, seed=numel)
        compiled = copy_of(plain)
        update(plain, None)
        update(compiled, kernels[dtypes])
        assert_same_bits(compiled, plain)


def test_a_kernel_that_predicts_gives_the_plain_passs_bits() -> None:
    pairs: list[UpdateDtypes] = [(F32, F32), (F32, BF16)]
    kernels = get_kernels(pairs, lambda: None, predicts=True)
    assert kernels.keys() == set(pairs)
    for dtypes, numel in itertools.product(pairs, (*range(1, 70), 511, 512, 513, 300_001)):
        plain = random_buffers(numel, dtypes, seed=numel)
        compiled = copy_of(plain)
        update(plain, None, predicts=True)
        update(compiled, kernels[dtypes], predicts=True)
        assert_same_bits(compiled, plain)
        # The last rounding hides many predictions in 16 bits, but none of this many.
        assert numel < 500 or not torch.equal(plain[4], plain[0].to(dtypes[1]))


@settings(max_examples=20, deadline=None)
@given(
    numel=st.integers(1, 300_000),
    cuts=st.lists(st.integers(0, 300_000), max_size=6),
    dtypes=st.sampled_from(PAIRS),
    threads=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_its_bits_do_not_depend_on_length_cuts_or_threads(
    kernels: dict[UpdateDtypes, AdamWKernel],
    numel: int,
    cuts: list[int],
    dtypes: UpdateDtypes,
    threads: int,
    seed: int,
) -> None:
    plain = random_buffers(numel, dtypes, seed)
    compiled = copy_of(plain)
    update(plain, None)
    bounds = sorted({0, numel, *(cut for cut in cuts if cut < numel)})

    def pieces() -> None:
        for start, stop in itertools.pairwise(bounds):
            update(tuple(tensor[start:stop] for tensor in compiled), kernels[dtypes])  # type: ignore[arg-type]

    thread_runs(pieces, threads)
    assert_same_bits(compiled, plain)


def test_the_number_of_threads_is_that_of_the_calling_thread_alone() -> None:
    before, seen = torch.get_num_threads(), []
    thread_runs(lambda: seen.append(torch.get_num_threads()), threads=3)
    assert seen == [3]
    assert torch.get_num_threads() == before
    thread_runs(lambda: seen.append(torch.get_num_threads()), threads=1)
    assert seen == [3, 1]


def test_a_hundred_compiled_steps_are_as_near_to_float64_as_torch_adamw(
    kernels: dict[UpdateDtypes, AdamWKernel],
) -> None:
    numel = 20_001
    start = torch.randn(numel, generator=torch.Generator().manual_seed(5))
    parameter = torch.nn.Parameter(start.clone())
    exact = torch.nn.Parameter(start.double())
    references = [torch.optim.AdamW([p], **HYPER, foreach=False) for p in (parameter, exact)]
    weight, exp_avg, exp_avg_sq = start.clone(), torch.zeros(numel), torch.zeros(numel)
    device_weight = torch.zeros(numel, dtype=BF16)
    for step in range(1, 101):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(step)).mul_(0.1).bfloat16()
        parameter.grad, exact.grad = gradient.float(), gradient.double()
        for reference in references:
            reference.step()
        adamw_update_(
            *(weight, exp_avg, exp_avg_sq, gradient, device_weight),
            **HYPER,
            bias_correction_step=step,
            kernel=kernels[BF16, BF16],
        )
    our_distance = (weight - exact.detach()).norm().item()
    their_distance = (parameter.detach() - exact.detach()).norm().item()
    assert 0 < our_distance <= 1.2 * their_distance
    assert torch.equal(device_weight, weight.bfloat16())


def test_the_device_weight_may_be_the_fp32_weight_itself(kernels: dict[UpdateDtypes, AdamWKernel]) -> None:
    plain = random_buffers(1000, (F32, F32))
    compiled = copy_of(plain)
    update((*plain[:4], plain[0]), None)
    update((*compiled[:4], compiled[0]), kernels[F32, F32])
    assert torch.equal(compiled[0], plain[0])


def test_other_threads_run_python_during_an_update(kernels: dict[UpdateDtypes, AdamWKernel]) -> None:
    """A call of about 10 ms or more, in which a thread that sleeps 0.1 ms at a time must get on."""
    buffers = random_buffers(8 * 2**20, (BF16, BF16))
    buffers[2].fill_(1e-4)
    ticks, ended = [0], threading.Event()

    def count() -> None:
        while not ended.is_set():
            ticks[0] += 1
            time.sleep(1e-4)

    counter = threading.Thread(target=count)
    counter.start()
    during = 0
    for _ in range(10):
        before = ticks[0]
        update(buffers, kernels[BF16, BF16])
        during += ticks[0] - before
    ended.set()
    counter.join()
    assert during > 30  # with the lock held it would be at most one a call


def test_an_update_under_way_is_finished_by_the_plain_pass(kernels: dict[UpdateDtypes, AdamWKernel]) -> None:
    """A retry must leave elements alone that hold new values already; `progress` counts them."""
    finished = random_buffers(5000, (BF16, BF16))
    buffers = copy_of(finished)
    update(finished, None)
    update(tuple(tensor[:2000] for tensor in buffers), kernels[BF16, BF16])  # type: ignore[arg-type]
    update(buffers, kernels[BF16, BF16], UpdateProgress(done=2000))
    assert_same_bits(buffers, finished)


def test_a_kernel_that_refuses_its_arguments_has_touched_nothing(
    kernels: dict[UpdateDtypes, AdamWKernel],
) -> None:
    every_second = tuple(tensor[::2] for tensor in random_buffers(1000, (BF16, BF16)))
    before, progress = copy_of(every_second), UpdateProgress()  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="contiguous"):
        update(every_second, kernels[BF16, BF16], progress)  # type: ignore[arg-type]
    assert_same_bits(every_second, before)  # type: ignore[arg-type]
    assert progress.done == 0


def test_a_second_run_finds_the_library_without_a_compiler(
    kernels: dict[UpdateDtypes, AdamWKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("PATH", "")
    assert get_kernels([(BF16, BF16)], lambda: None).keys() == {(BF16, BF16)}


def test_the_library_is_named_by_what_decides_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    library = kernel_library(BF16, BF16)
    assert library != kernel_library(F32, BF16)
    assert library != kernel_library(BF16, BF16, predicts=True)
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    assert library != kernel_library(BF16, BF16)


# Without a kernel.

UPDATE_WITHOUT_COMPILER = """
import torch
from torchround.optim.kernel import get_kernels
print(get_kernels([(torch.bfloat16, torch.bfloat16)], lambda: None))
"""


@pytest.mark.parametrize(
    ("compiler", "words"),
    [("/nonexistent", "there is no C++ compiler '/nonexistent'"), ("false", "failed (")],
)
def test_without_a_working_compiler_one_line_says_so_and_nothing_is_raised(
    tmp_path: Path, compiler: str, words: str
) -> None:
    command = (sys.executable, "-c", UPDATE_WITHOUT_COMPILER)
    path = "" if compiler == "/nonexistent" else os.environ["PATH"]
    environment = {
        **os.environ,
        "CXX": compiler,
        "PATH": path,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert finished.stdout == "{}\n"
    [line] = finished.stderr.splitlines()
    assert words in line and line.endswith(
        "the optimizer uses its uncompiled update, which is several times slower"
    )


def test_a_library_that_cannot_be_loaded_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library = kernel_library(BF16, BF16)
    library.parent.mkdir()
    library.write_bytes(b"no library")
    with caplog.at_level(logging.WARNING):
        assert get_kernels([(BF16, BF16)], lambda: None) == {}
    [record] = caplog.records
    assert "cannot be loaded" in record.getMessage()


class RunStopped(Exception):
    pass


def test_a_kernel_with_other_bits_is_not_used(
    kernels: dict[UpdateDtypes, AdamWKernel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = AdamWKernel.__call__

    def one_bit_off(self, weight, exp_avg, exp_avg_sq, gradient, device_weight, factors):  # type: ignore[no-untyped-def]
        original(self, weight, exp_avg, exp_avg_sq, gradient, device_weight, factors)
        weight[-1:].view(torch.int32).bitwise_xor_(1)

    monkeypatch.setattr(AdamWKernel, "__call__", one_bit_off)
    with caplog.at_level(logging.WARNING):
        assert get_kernels([(BF16, BF16)], lambda: None) == {}
    [record] = caplog.records
    assert "does not give the uncompiled one's bits" in record.getMessage()


def test_a_run_that_stops_meanwhile_takes_its_compilers_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remember(*arguments, **options):  # type: ignore[no-untyped-def]
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)

    def stop() -> None:
        raise RunStopped

    with pytest.raises(RunStopped):
        get_kernels([(BF16, BF16)], stop)
    assert [process.returncode for process in started] == [-9]
    assert not list((tmp_path / "torchround").iterdir())
