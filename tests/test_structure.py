"""The shape of the repository: top level, import directions, nothing at import, sizes, and rules a reader relies on.

Each rule is a function from a file to its offences, so that a failure lists all of them.
"""

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    *("torchround", "configs", "tests", "scripts", "benchmarks", "docs"),
    *("train.py", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"),
}

# What each room may import besides itself; `trainer` and what is not named here may import every room.
BELOW_ENGINE = {"config", "layer", "pipeline", "untrusted"}
MAY_IMPORT: dict[str, set[str]] = {
    "untrusted": set(),  # defence against hostile input, which every room may use
    "layer": {"untrusted"},
    "models": {"layer", "untrusted"},
    "config": {"untrusted"},
    "pipeline": {"config", "untrusted"},
    "optim": BELOW_ENGINE,
    "data": BELOW_ENGINE,
    "checkpoint": BELOW_ENGINE,
    "hf": BELOW_ENGINE | {"checkpoint"},
    "observe": BELOW_ENGINE,
    "engine": BELOW_ENGINE | {"optim", "observe"},
}
# Who may know the model families: what a user starts. Everything else knows the layer protocol alone.
KNOW_MODELS = {"commands"}
IMPURE = {
    *("torch", "threading", "multiprocessing", "concurrent", "asyncio", "subprocess"),
    *("io", "os", "pathlib", "shutil", "tempfile", "glob"),
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files(*parts: str) -> list[Path]:
    found = [path for part in parts for path in [ROOT / part, *(ROOT / part).rglob("*.py")]]
    return sorted(path for path in found if path.is_file())


def library() -> list[Path]:
    return files("torchround")


def sources() -> list[Path]:
    return files("torchround", "scripts", "benchmarks", "train.py")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))


def offences(paths: list[Path], rule: Callable[[Path], Iterator[str]]) -> list[str]:
    assert paths, "a rule over no files holds for nothing"
    return [f"{name(path)}: {offence}" for path in paths for offence in rule(path)]


# Where things are.


def test_the_top_level_is_exact() -> None:
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    found = [path.name for path in ROOT.iterdir() if not path.name.startswith(".")]
    assert {
        entry for entry in found if not any(fnmatch.fnmatch(entry, skip) for skip in ignored)
    } == TOP_LEVEL


def test_tests_mirror_the_tree_and_are_no_packages() -> None:
    def rule(path: Path) -> Iterator[str]:
        folder = path.parent.relative_to(ROOT / "tests")
        if path.name == "__init__.py":
            yield "tests are no packages"
        mirrored = any((ROOT / part / folder).is_dir() for part in (".", "torchround"))
        # `faults` breaks whole runs and `support` holds what tests share, so neither mirrors a room.
        if not mirrored and folder.name not in ("faults", "support"):
            yield f"there is no {folder} to mirror"

    assert offences(files("tests"), rule) == []


# Who imports whom.


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; `from a import b` gives `a` and `a.b`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name(path)}:{node.lineno}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path) -> set[str]:
    parts = (module.split(".") for module in imported_modules(path))
    return {part[1] for part in parts if part[0] == "torchround" and len(part) > 1} - {room(path)}


def room(path: Path) -> str:
    return path.relative_to(ROOT / "torchround").parts[0].removesuffix(".py")


def test_rooms_import_only_what_is_below_them() -> None:
    def rule(path: Path) -> Iterator[str]:
        allowed = MAY_IMPORT.get(room(path))
        yield from sorted(rooms_imported(path) - allowed) if allowed is not None else ()

    assert offences(files("torchround"), rule) == []


def test_no_two_rooms_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for path in files("torchround"):
        graph.setdefault(room(path), set()).update(rooms_imported(path))
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("config") < order.index("engine") < order.index("trainer")


def test_the_library_knows_neither_the_models_nor_the_programs() -> None:
    def rule(path: Path) -> Iterator[str]:
        yield from {"train", "scripts", "benchmarks", "tests"} & {
            module.split(".")[0] for module in imported_modules(path)
        }
        if room(path) not in ("models", *KNOW_MODELS):
            yield from (module for module in imported_modules(path) if module == "torchround.models")

    assert offences(library(), rule) == []


def test_models_import_only_torch_the_layer_protocol_the_defence_and_what_is_shared() -> None:
    def rule(path: Path) -> Iterator[str]:
        family = path.relative_to(ROOT / "torchround/models").parts[0]
        for module in imported_modules(path):
            first, *rest = module.split(".")
            if rest[:1] == ["models"]:
                legal = family == "__init__.py" or rest[1:2] in ([], ["common"], [family])
            elif first == "torchround":
                legal = rest[:1] in (["layer"], ["untrusted"])
            else:
                legal = first == "torch" or first in sys.stdlib_module_names
            if not legal:
                yield module

    assert offences(files("torchround/models"), rule) == []


def test_the_planner_has_no_torch_no_threads_and_no_files() -> None:
    def rule(path: Path) -> Iterator[str]:
        yield from IMPURE & {module.split(".")[0] for module in imported_modules(path)}
        calls = (node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
        yield from {call.id for call in calls if isinstance(call, ast.Name)} & {"open", "print", "input"}

    assert offences(files("torchround/pipeline"), rule) == []


def test_the_planner_runs_where_there_is_no_torch() -> None:
    imports = "\n".join(f"import {module_name(path)}" for path in files("torchround/pipeline"))
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
"""


def test_nothing_happens_at_import(tmp_path: Path) -> None:
    modules = [module_name(path) for path in library() if path.name != "__main__.py"]
    imports = "\n".join(f"import {module}" for module in modules)
    run_python(IMPORT_EVERYTHING.replace("IMPORTS", imports), tmp_path)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def run_python(code: str, folder: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_module_only_defines() -> None:
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)

    def rule(path: Path) -> Iterator[str]:
        for node in tree(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            branch = isinstance(node, ast.If) and _is_known_condition(ast.unparse(node.test))
            # Scripts make the clone importable, which is not installed.
            finds_clone = name(path).startswith(("scripts/", "benchmarks/")) and "sys.path." in ast.unparse(
                node
            )
            if not (isinstance(node, definitions) or docstring or branch or finds_clone):
                yield f"line {node.lineno} runs at import"

    assert offences(sources(), rule) == []


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
    changed = {target for path in sources() for target in _changed_names(path)}

    def rule(path: Path) -> Iterator[str]:
        yield from (f"line {n.lineno}: global" for n in ast.walk(tree(path)) if isinstance(n, ast.Global))
        for node in tree(path).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if _is_state(node.value) or (_is_container(node.value) and ast.unparse(target) in changed):
                    yield f"line {node.lineno}: {ast.unparse(target)} can change"

    assert offences(sources(), rule) == []


def _is_state(value: ast.expr) -> bool:
    """Made to be changed: a lock, a queue, an empty container."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in STATEFUL_CALLS
    return ast.unparse(value) in ("[]", "{}")


def _is_container(value: ast.expr) -> bool:
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _changed_names(path: Path) -> Iterator[str]:
    """Constants that a file assigns into, deletes from, or calls a mutating method of."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield _constant(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield _constant(node.func.value) if node.func.attr in MUTATING_METHODS else ""


def _constant(node: ast.expr) -> str:
    text = ast.unparse(node).split(".")[-1]
    return text if text.isupper() else ""


# How files read.


def test_a_file_opens_with_what_it_is_for_and_stays_short() -> None:
    def rule(path: Path) -> Iterator[str]:
        text = path.read_text(encoding="utf-8")
        limit = 350 if name(path).startswith("torchround/models/") else 400
        if len(text.splitlines()) >= limit:
            yield f"{len(text.splitlines())} lines, {limit} is the limit"
        if text and not ast.get_docstring(tree(path)):
            yield "no docstring"

    assert offences([*sources(), *files("tests")], rule) == []


def test_no_function_is_longer_than_a_screen() -> None:
    def rule(path: Path) -> Iterator[str]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60:
                yield f"line {node.lineno}: {node.name} has over 60 lines"

    assert offences([*sources(), *files("tests")], rule) == []


def test_an_invariant_says_what_was_expected() -> None:
    def rule(path: Path) -> Iterator[str]:
        nodes = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Assert))
        yield from (f"line {node.lineno}: assert without a message" for node in nodes if not node.msg)

    assert offences(sources(), rule) == []


def test_no_error_is_swallowed() -> None:
    def rule(path: Path) -> Iterator[str]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else ""
                passes = all(isinstance(step, ast.Pass) for step in node.body)
                if not caught or (passes and caught in ("Exception", "BaseException")):
                    yield f"line {node.lineno}: except {caught}"

    assert offences(sources(), rule) == []


def test_nothing_is_left_open_or_skipped() -> None:
    words = ("TODO", "FIXME", "XXX", "NotImplementedError", "pytest.skip", "skipif", "xfail", "importorskip")

    def rule(path: Path) -> Iterator[str]:
        text = path.read_text(encoding="utf-8")
        yield from (word for word in words if word in text)

    checked = [path for path in [*sources(), *files("tests")] if path != Path(__file__)]
    assert offences(checked, rule) == []
