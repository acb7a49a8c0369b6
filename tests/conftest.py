"""Settings of all tests: threads, signals and tiers.

docs/testing.md says which command runs which tier.
"""

import gc
import importlib.util
import itertools
import os
import signal
from collections import defaultdict

import pytest

from tests.support.processes import Processes

# Read when torch is first imported, here and in the processes that tests start. Otherwise several processes on two cores
# would wait for each other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if importlib.util.find_spec("hypothesis"):  # the accelerator tier runs without it
    import hypothesis.internal.conjecture.engine
    from hypothesis import HealthCheck, settings

    # The first is the default, so that a test fails on every machine or on none. Hypothesis itself chooses such a profile
    # only if CI is set. `--hypothesis-profile=random` searches.
    for name in ("random", "deterministic"):
        settings.register_profile(
            name,
            derandomize=name == "deterministic",
            max_examples=25 if name == "deterministic" else 100,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile("deterministic")
    # Hypothesis' own limit is 300 s for each failure.
    hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS = 30
    # Fixtures of tests in several folders.
    SHARED_FIXTURES = ("tests.support.small_run", "tests.support.faults", "tests.support.small_machines")
else:
    SHARED_FIXTURES = ()


# A test in one of these places, or with one of these fixtures, trains whole runs, starts programs or compares many cases.
# The other tests take a minute.
THOROUGH_PLACES = (
    *("tests/benchmarks/", "tests/commands/", "tests/faults/", "tests/generation/", "tests/hf/", "tests/library/"),
    *("tests/machines/", "tests/models/borrowed/", "tests/releases/", "tests/run/", "tests/scripts/"),
    *("tests/config/test_mutations.py", "tests/data/test_chat.py", "tests/data/test_loader.py"),
    *("tests/data/test_resume.py", "tests/data/test_step_batches.py", "tests/data/test_tokenizer.py"),
    *("tests/engine/exchange/", "tests/engine/store/test_host_memory.py", "tests/engine/test_engine.py"),
    *("tests/engine/test_lifecycle.py", "tests/engine/test_memory_after_close.py"),
    *("tests/engine/test_passes.py", "tests/engine/test_rows.py", "tests/engine/test_saver.py"),
    *("tests/engine/test_watchdog.py", "tests/engine/worker/test_file_reader.py"),
    *("tests/models/test_against_transformers.py", "tests/models/test_costs.py"),
    *("tests/models/test_kept_activations.py", "tests/models/test_through_the_engine.py"),
    *("tests/observe/test_page_in_browser.py", "tests/planning/test_kept_choice.py"),
    *("tests/planning/test_step_time.py", "tests/planning/test_plan.py"),
    *("tests/test_imports.py", "tests/test_typical_mistakes.py"),
)
THOROUGH_FIXTURES = frozenset(["small_runs", "shared_runs", "processes"])
OTHER_TIERS = ("thorough", "compiles", "documented", "releases", "nightly", "accelerator")
# A process can have one kind of accelerator, so tests on the simulated one are a tier of their own.
ACCELERATOR_PLACE = "tests/accelerator/"


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts a command in the background ignores Control-C, nohup a hang-up, and processes inherit that.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if config.option.markexpr.startswith("not nightly"):
        _take_own_cores()
    # They import torch, which takes seconds. The process that hands out tests to others runs none.
    if not getattr(config.option, "numprocesses", None):
        for name in SHARED_FIXTURES:
            config.pluginmanager.import_plugin(name)


def _take_own_cores() -> None:
    """Share the cores among the processes of pytest-xdist. The default tier alone does this.

    Threads of one process take turns at Python's lock. If they change cores with each turn, engines of eight devices take
    half as much processor time again. In the other tiers, and with more cores than processes, threads run at the same time.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker and hasattr(os, "sched_setaffinity"):
        cores, number = sorted(os.sched_getaffinity(0)), int(worker.removeprefix("gw"))
        if len(cores) >= count:
            # A process that replaces another one has a higher number.
            os.sched_setaffinity(0, cores[number % count :: count])


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in left_to_the_night(items):
        item.add_marker("nightly")
    for item in items:
        if item.nodeid.startswith(ACCELERATOR_PLACE):
            item.add_marker("accelerator")
        if item.nodeid.startswith(THOROUGH_PLACES) or THOROUGH_FIXTURES & set(_fixtures(item)):
            item.add_marker("thorough")
        if not any(item.get_closest_marker(tier) for tier in OTHER_TIERS):
            item.add_marker("fast")


def pytest_collection_finish(session: pytest.Session) -> None:
    _leave_out_of_collection()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    yield
    if nextitem is None or nextitem.path != item.path:
        _leave_out_of_collection()


def _leave_out_of_collection() -> None:
    """Let garbage collection pass over what is imported by now: many tests collect, and transformers is large."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give it back, as Python's end looks for what is left."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each process whole files, so that what the tests of a file share is made once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory):
    processes = Processes(tmp_path_factory.mktemp("processes"))
    yield processes
    processes.close()


def left_to_the_night(items: list[pytest.Item]) -> list[pytest.Item]:
    """List the cases that add no pair of values to those before: nearly all defects need at most two values to meet."""
    cases = defaultdict(list)
    for item in items:
        values = sorted(item.callspec.indices.items()) if hasattr(item, "callspec") else []
        if len(values) > 2:
            cases[item.nodeid.partition("[")[0]].append((item, frozenset(itertools.combinations(values, 2))))
    left = []
    for found in cases.values():
        missing = frozenset().union(*(pairs for _, pairs in found))
        while missing:
            best = max(found, key=lambda case: len(case[1] & missing))  # the first of the best
            found.remove(best)
            missing -= best[1]
        left += [item for item, _ in found]
    return left


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])
