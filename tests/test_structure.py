"""The shape of the repository: its top level, the directions of imports, and nothing that happens at import.

Each rule yields the offences of one file, so that a failure lists all of them. `test_the_house.py` holds how files read.
"""

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.source_files import ROOT, Source, everything_run, library, offences, sources

TOP_LEVEL = {
    *("torchround", "models", "configs", "tests", "scripts", "benchmarks", "docs"),
    *("train.py", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"),
    *("Dockerfile", "Dockerfile.cpu"),
}

# What each room may import besides itself; `commands`, which is not named here, may import every room.
BELOW_ENGINE = {"config", "layer", "pipeline", "untrusted"}
BELOW_RUN = BELOW_ENGINE | {"accelerators", "optim", "data", "checkpoint", "hf", "observe", "engine", "machines"}
MAY_IMPORT: dict[str, set[str]] = {
    "untrusted": set(),  # defence against hostile input, which every room may use
    "accelerators": set(),  # what differs by kind of device, which layers and the engine ask
    "micro_batch": set(),  # which `layer` hands on as its own
    "layer": {"accelerators", "micro_batch", "untrusted"},
    "kept_operations": set(),  # which of PyTorch's operations are worth keeping
    "keeping": {"kept_operations"},  # kept activations, between the layers' code and the engine
    "models": {"accelerators", "keeping", "layer", "untrusted"},
    "config": {"untrusted"},
    "pipeline": {"config", "untrusted"},
    "machines": {"config", "untrusted"},
    "optim": BELOW_ENGINE | {"accelerators"},
    "data": BELOW_ENGINE,
    "checkpoint": BELOW_ENGINE | {"machines"},
    "hf": BELOW_ENGINE | {"checkpoint"},
    "observe": BELOW_ENGINE,
    "engine": BELOW_ENGINE | {"accelerators", "keeping", "optim", "observe", "machines"},
    "generation": BELOW_ENGINE | {"engine"},
    "run": BELOW_RUN | {"generation"},
    "trainer": BELOW_RUN | {"run", "generation"},
    "library": BELOW_RUN | {"run"},  # ordinary modules as layers, for programs without a config
}
# Who may know the model families: what a user starts, and the names that the package offers. Every other room knows
# the layer protocol alone.
KNOW_MODELS = {"commands", "__init__"}
IMPURE = {
    *("torch", "threading", "multiprocessing", "concurrent", "asyncio", "subprocess"),
    *("io", "os", "pathlib", "shutil", "tempfile", "glob"),
}


# Where files are.


def test_the_top_level_is_exact() -> None:
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    found = [path.name for path in ROOT.iterdir() if not path.name.startswith(".")]
    assert {entry for entry in found if not any(fnmatch.fnmatch(entry, skip) for skip in ignored)} == TOP_LEVEL


def test_tests_mirror_the_tree_and_are_no_packages() -> None:
    def rule(source: Source) -> Iterator[str]:
        folder = Path(source.name).parent.relative_to("tests")
        if source.stem == "__init__":
            yield "tests are no packages"
        mirrored = any((ROOT / part / folder).is_dir() for part in (".", "torchround"))
        # `faults` breaks whole runs, `support` holds what tests share, the others are about a device for tests.
        if not mirrored and folder.name not in ("faults", "support", "accelerator", "simulated_accelerator"):
            yield f"there is no {folder} to mirror"

    assert offences(sources("tests"), rule) == []


# Which module imports which.


def imported_modules(source: Source) -> Iterator[str]:
    """Yield every module that a file imports, anywhere in the file; `from a import b` gives `a` and `a.b`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{source.name}:{node.lineno}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(source: Source) -> set[str]:
    parts = (module.split(".") for module in imported_modules(source))
    return {part[1] for part in parts if part[0] == "torchround" and len(part) > 1} - {source.room}


def test_rooms_import_only_what_is_below_them() -> None:
    def rule(source: Source) -> Iterator[str]:
        allowed = MAY_IMPORT.get(source.room)
        yield from sorted(rooms_imported(source) - allowed) if allowed is not None else ()

    assert offences(library(), rule) == []


def test_no_two_rooms_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for source in library():
        graph.setdefault(source.room, set()).update(rooms_imported(source))
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("config") < order.index("engine") < order.index("trainer")


def import_graph(checked: list[Source]) -> dict[str, set[str]]:
    """Map each module to the modules of `checked` that it imports while it is itself imported.

    Imports inside functions and below `if TYPE_CHECKING` are left out: they run later, or never.
    """
    modules = {source.module for source in checked}
    graph = {}
    for source in checked:
        outer = ast.Module([node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        text = ast.unparse(outer)
        graph[source.module] = set(imported_modules(Source(source.name, text))) & modules - {source.module}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph(library())
    assert sum(map(len, graph.values())) > 300, "the graph has lost its edges"
    list(TopologicalSorter(graph).static_order())


def test_a_planted_circle_is_found() -> None:
    circle = [
        Source("torchround/a.py", "from torchround import b"),
        Source("torchround/b.py", "import torchround.c"),
        Source("torchround/c.py", "from torchround.a import x"),
    ]
    with pytest.raises(CycleError):
        list(TopologicalSorter(import_graph(circle)).static_order())


def test_the_library_knows_neither_the_models_nor_the_programs() -> None:
    def rule(source: Source) -> Iterator[str]:
        yield from {"train", "scripts", "tests"} & {module.split(".")[0] for module in imported_modules(source)}
        if source.room not in ("models", *KNOW_MODELS):
            yield from (module for module in imported_modules(source) if module == "torchround.models")

    assert offences(library(), rule) == []


def test_models_import_only_torch_the_layer_protocol_the_defence_and_what_is_shared() -> None:
    def rule(source: Source) -> Iterator[str]:
        family = source.name.split("/")[2]
        for module in imported_modules(source):
            first, *rest = module.split(".")
            if (first, rest[:1]) == ("torchround", ["models"]):
                legal = family == "__init__.py" or rest[1:2] in ([], ["common"], ["kernels"], [family])
            elif first == "torchround":
                legal = rest[:1] in (["accelerators"], ["keeping"], ["layer"], ["untrusted"])
            else:
                # Nothing needs Triton to run, so no other file than a kernel's own may import it.
                is_kernel = family == "kernels" and source.stem.endswith("_triton")
                # Borrowed models are built by transformers, which is an extra.
                own = {"torch"} | ({"triton"} if is_kernel else set())
                own |= {"transformers"} if family == "borrowed" else set()
                legal = first in own or first in sys.stdlib_module_names
            if not legal:
                yield module

    assert offences(sources("torchround/models"), rule) == []


def test_an_installation_holds_every_package_of_the_models_and_none_called_models() -> None:
    """setuptools finds them through the link `torchround/models`."""
    setuptools = pytest.importorskip("setuptools")
    assert 'include = ["torchround*"]' in (ROOT / "pyproject.toml").read_text()
    found = setuptools.find_packages(str(ROOT), include=["torchround*"])
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "models").rglob("__init__.py")]
    assert len(folders) > 5
    assert {f"torchround.{'.'.join(folder.parts)}" for folder in folders} <= {*found}
    assert {name.split(".")[0] for name in found} == {"torchround"}


def test_the_planner_has_no_torch_no_threads_and_no_files() -> None:
    def rule(source: Source) -> Iterator[str]:
        yield from IMPURE & {module.split(".")[0] for module in imported_modules(source)}
        calls = (node.func for node in ast.walk(source.tree) if isinstance(node, ast.Call))
        yield from {call.id for call in calls if isinstance(call, ast.Name)} & {"open", "print", "input"}

    assert offences(sources("torchround/pipeline"), rule) == []


def test_the_planner_runs_where_there_is_no_torch() -> None:
    imports = "\n".join(f"import {source.module}" for source in sources("torchround/pipeline"))
    run_python(f"sys.modules['torch'] = None\n{imports}", ROOT)


# What happens at import.

IMPORT_EVERYTHING = """
import os, random, signal, threading, logging
import numpy, torch, torchdata.nodes, pydantic, rich, tiktoken
def state():
    return {
        "threads": threading.active_count(),
        "environment": dict(os.environ),
        "cuda": torch.cuda.is_initialized(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "random": (random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "files": sorted(os.listdir()),
        "hooks": (sys.excepthook, threading.excepthook),
        "handlers": list(logging.getLogger().handlers),
    }
before = state()
IMPORTS
after = state()
changed = [key for key in before if before[key] != after[key]]
assert not changed, changed
assert "wandb" not in sys.modules, "wandb is imported only when it is switched on"
assert "triton" not in sys.modules, "Triton is imported only by the first kernel that runs"
"""


def test_nothing_happens_at_import(tmp_path: Path) -> None:
    # Triton need not be installed: the files of its kernels are imported by their first call.
    imported = [source for source in library() if not source.stem.endswith(("__main__", "_triton"))]
    imports = "\n".join(f"import {source.module}" for source in imported)
    run_python(IMPORT_EVERYTHING.replace("IMPORTS", imports), tmp_path)


def run_python(code: str, folder: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_module_only_defines() -> None:
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)

    def rule(source: Source) -> Iterator[str]:
        for node in source.tree.body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            branch = isinstance(node, ast.If) and _is_known_condition(ast.unparse(node.test))
            # Programs make the clone importable, which is not installed.
            is_program = source.name.startswith("scripts/")
            finds_clone = is_program and "sys.path." in ast.unparse(node)
            if not (isinstance(node, definitions) or docstring or branch or finds_clone):
                yield f"line {node.lineno} runs at import"

    assert offences(everything_run(), rule) == []


def _is_known_condition(text: str) -> bool:
    return text in ("TYPE_CHECKING", "__name__ == '__main__'") or text.startswith("sys.version_info ")


STATEFUL_CALLS = {
    *("list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "count"),
    *("Lock", "RLock", "Condition", "Event", "Semaphore", "local", "ContextVar", "Queue"),
    *("WeakKeyDictionary", "WeakValueDictionary", "empty", "zeros", "ones", "Generator"),
}
MUTATING_METHODS = {
    *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"),
    *("update", "setdefault", "popitem", "add", "discard"),
}


def test_there_is_no_module_level_state() -> None:
    changed = {target for source in everything_run() for target in _changed_names(source)}

    def rule(source: Source) -> Iterator[str]:
        nodes = list(ast.walk(source.tree))
        yield from (f"line {node.lineno}: global" for node in nodes if isinstance(node, ast.Global))
        for node in source.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if _is_state(node.value) or (_is_container(node.value) and ast.unparse(target) in changed):
                    yield f"line {node.lineno}: {ast.unparse(target)} can change"

    assert offences(everything_run(), rule) == []


def _is_state(value: ast.expr) -> bool:
    """Return whether a value is made to be changed: a lock, a queue, an empty container."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in STATEFUL_CALLS
    return ast.unparse(value) in ("[]", "{}")


def _is_container(value: ast.expr) -> bool:
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _changed_names(source: Source) -> Iterator[str]:
    """Yield the constants that a file assigns into, deletes from, or calls a mutating method of."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield _constant(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield _constant(node.func.value) if node.func.attr in MUTATING_METHODS else ""


def _constant(node: ast.expr) -> str:
    text = ast.unparse(node).split(".")[-1]
    return text if text.isupper() else ""
