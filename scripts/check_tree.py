#!/usr/bin/env python3
# ruff: noqa: SIM905 (a list of words in quotes would take a line for each word)
"""Check how the tree is built: directions of imports, circles, what runs at import, links of the docs, lines per room.

    python scripts/check_tree.py            # lists every offence and exits with 1 if there is one
    python scripts/check_tree.py --write    # records the lines of each room in .ci/lines.json

A room has at most the lines that `.ci/lines.json` records. Who needs more records more in the same commit and says why in
its message. A room that falls by 100 lines or more must be recorded, so that it stays small.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINES = ROOT / ".ci" / "lines.json"
SLACK = 100
PRODUCT = ("torchround", "torchround/models", "train.py")  # a search does not follow the link to the models
PROGRAMS = ("scripts", "benchmarks", "simulate")
TOP_LEVEL = frozenset(
    "torchround models simulate configs examples tests scripts benchmarks docs train.py pyproject.toml constraints.txt README.md CHANGELOG.md CONTRIBUTING.md LICENSE"
    " Dockerfile Dockerfile.cpu".split()
)

# What each room may import besides itself. `commands` and the package's own names may import every room.
BELOW_ENGINE = {"compiled_loops", "config", "errors", "layer", "packed_formats", "planning", "untrusted"}
BELOW_RUN = BELOW_ENGINE | set(
    "accelerators optim data checkpoint hf observe engine machines generation".split()
)
MAY_IMPORT: dict[str, set[str]] = {
    "untrusted": set(),
    "accelerators": set(),
    "errors": set(),
    "layer_work": set(),
    "layer": {"accelerators", "layer_work", "packed_formats", "untrusted"},
    "keeping": set(),
    "compiled_loops": set(),
    "packed_formats": {"compiled_loops"},
    "models": {"accelerators", "keeping", "layer", "packed_formats", "untrusted"},
    "config": {"planning", "untrusted"},
    "planning": {"layer_work", "untrusted"},
    "machines": {"config", "untrusted"},
    "optim": BELOW_ENGINE | {"accelerators"},
    "data": BELOW_ENGINE,
    "checkpoint": BELOW_ENGINE | {"machines"},
    "hf": BELOW_ENGINE | {"checkpoint"},
    "observe": BELOW_ENGINE,
    "engine": BELOW_ENGINE | {"accelerators", "keeping", "optim", "observe", "machines"},
    "generation": BELOW_ENGINE | {"engine"},
    "run": BELOW_RUN,
    "trainer": BELOW_RUN | {"run"},
    "library": BELOW_RUN - {"generation"} | {"keeping", "run"},
}
KNOW_MODELS = {"commands", "models", "__init__"}
IMPURE = frozenset(
    "torch threading multiprocessing concurrent asyncio subprocess io os pathlib shutil tempfile glob".split()
)
MODEL_IMPORTS = {"accelerators", "keeping", "layer", "packed_formats", "untrusted"}
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
STATEFUL_CALLS = frozenset(
    "list dict set bytearray defaultdict deque Counter OrderedDict count Lock RLock Condition Event Semaphore local"
    " ContextVar Queue WeakKeyDictionary WeakValueDictionary empty zeros ones Generator".split()
)
OPEN_ENDS = ("TODO", "FIXME", "XXX", "NotImplementedError", "pytest.skip", "skipif", "xfail", "importorskip")
# Tests need a card or a compiler, a browser, or the right to make a network.
MAY_SKIP = {
    "tests/accelerator/conftest.py",
    "tests/observe/test_page_in_browser.py",
    "tests/support/namespaces.py",
}
USERS_FILES = frozenset(
    "config.toml finetune.toml NAME.toml other.toml run.toml small.toml tiny.toml child.toml chats.toml".split()
)


@dataclass(frozen=True)
class Source:
    """One Python file. `name` is its path from the root."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Parse the text as Python 3.10, the oldest version that the package supports."""
        return ast.parse(self.text, feature_version=(3, 10))

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def room(self) -> str:
        """Find the package or module below `torchround` that the file belongs to; empty for other files."""
        parts = self.name.split("/")
        return parts[1].removesuffix(".py") if parts[0] == "torchround" else ""

    def imports(self, whole: bool = True) -> Iterator[str]:
        """Yield what the file imports: `from a import b` gives `a` and `a.b`. Without `whole`, only at its top."""
        for node in ast.walk(self.tree) if whole else self.tree.body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def sources(*places: str) -> list[Source]:
    """Read the Python files in these folders, or these files."""
    paths = {
        path for place in places for path in [ROOT / place, *(ROOT / place).rglob("*.py")] if path.is_file()
    }
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in sorted(paths)]


# Rules: each yields the offences of one file of the product.


def imports_only_what_is_below(source: Source) -> Iterator[str]:
    """Check the direction of imports between rooms, and who knows the models."""
    if not source.room:
        return
    modules = [module.split(".") for module in source.imports()]
    rooms = {module[1] for module in modules if module[0] == "torchround" and len(module) > 1} - {source.room}
    if source.room in MAY_IMPORT:
        yield from (f"imports {room}" for room in sorted(rooms - MAY_IMPORT[source.room]))
    if source.room not in KNOW_MODELS and "models" in rooms:
        yield "knows the models"
    yield from (f"imports {module[0]}" for module in modules if module[0] in ("scripts", "tests"))


def model_imports_little(source: Source) -> Iterator[str]:
    """Check that a family imports torch, the layer protocol, the defence, and what families share."""
    if source.room != "models":
        return
    family = source.name.split("/")[2]
    third_party = {
        "torch",
        "triton" if source.name.endswith("_triton.py") else "",
        "transformers" if family == "borrowed" else "",
    }
    for module in source.imports():
        first, *rest = module.split(".")
        if (first, rest[:1]) == ("torchround", ["models"]):
            allowed = family == "__init__.py" or rest[1:2] in ([], ["common"], ["kernels"], [family])
        elif first == "torchround":
            # `from torchround import x` names the package first, then the module.
            allowed = not rest or rest[0] in MODEL_IMPORTS
        else:
            allowed = first in third_party or first in sys.stdlib_module_names
        if not allowed:
            yield f"imports {module}"


def planner_is_pure(source: Source) -> Iterator[str]:
    """Check that the planner has no torch, no threads and no files."""
    if source.room == "planning":
        yield from (
            f"imports {name}" for name in IMPURE & {module.split(".")[0] for module in source.imports()}
        )
        calls = {
            node.func.id
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        yield from (f"calls {name}" for name in calls & {"open", "print", "input"})


def only_defines(source: Source) -> Iterator[str]:
    """Check that nothing runs at import, and that no constant of a module can change."""
    for node in source.tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        is_branch = test in ("TYPE_CHECKING", "__name__ == '__main__'") or test.startswith(
            "sys.version_info "
        )
        finds_clone = source.name.startswith("scripts/") and "sys.path." in ast.unparse(node)
        if not (isinstance(node, DEFINITIONS) or is_text or is_branch or finds_clone):
            yield f"line {node.lineno} runs at import"
        value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
        name = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
        if value is not None and (name in STATEFUL_CALLS or ast.unparse(value) in ("[]", "{}")):
            yield f"line {node.lineno} makes state that is shared by all engines"
    yield from (
        f"line {node.lineno}: global" for node in ast.walk(source.tree) if isinstance(node, ast.Global)
    )


def says_what_fails(source: Source) -> Iterator[str]:
    """Check that an assert has a message and that no error is swallowed."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert) and not node.msg:
            yield f"line {node.lineno}: assert without a message"
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else ""
            passes = all(isinstance(step, ast.Pass) for step in node.body)
            if not caught or (passes and caught in ("Exception", "BaseException")):
                yield f"line {node.lineno}: except {caught} swallows every error"


def knows_no_kind_of_device(source: Source) -> Iterator[str]:
    """Check that `accelerators.py` alone names kinds of devices. A text with a space is a sentence, which may."""
    if source.room and source.name != "torchround/accelerators.py":
        for node in ast.walk(source.tree):
            word = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            if isinstance(word, str) and " " not in word and re.match(r"(cuda|xpu|npu)", word.lower()):
                yield f"line {node.lineno}: {word}"


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (
    *(imports_only_what_is_below, model_imports_little, planner_is_pure, only_defines, says_what_fails),
    knows_no_kind_of_device,
)


def circles(checked: list[Source]) -> Iterator[str]:
    """Yield a circle of modules that import each other while they are imported."""
    modules = {source.module for source in checked}
    graph = {source.module: modules & {*source.imports(whole=False)} - {source.module} for source in checked}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"modules import each other: {' -> '.join(error.args[1])}"


def open_ends(checked: list[Source]) -> Iterator[str]:
    """Yield what is left open, and tests that may be skipped."""
    for source in checked:
        if source.name not in MAY_SKIP and source.name != "scripts/check_tree.py":
            yield from (f"{source.name}: {word}" for word in OPEN_ENDS if word in source.text)


def top_level() -> Iterator[str]:
    """Yield what is at the top level and should not be, or the other way round."""
    ignored = {line.rstrip("/").removeprefix("*") for line in (ROOT / ".gitignore").read_text().split()}
    found = {
        path.name
        for path in ROOT.iterdir()
        if not path.name.startswith(".") and not path.name.endswith(tuple(ignored))
    }
    yield from (f"top level: {name}" for name in sorted(found ^ TOP_LEVEL))


# Links, headings and paths of the docs.


def wrong_links() -> Iterator[str]:
    """Yield links of README and docs that lead nowhere, and names of files that do not exist."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    folders = (
        "torchround",
        "torchround/models",
        "models",
        "configs",
        "examples",
        "scripts",
        "benchmarks",
        "simulate",
        "tests",
        "docs",
        ".ci",
    )
    paths = {path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*")}
    paths |= {path.relative_to(ROOT) for path in ROOT.iterdir()}
    endings = {"/".join(path.parts[start:]) for path in paths for start in range(len(path.parts))}
    for page in pages:
        text = page.read_text("utf-8")
        for file, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]+))?\)", text):
            target = page.parent / file if file else page
            if not target.exists():
                yield f"{page.name}: links to {file}"
            elif anchor and anchor not in _anchors(target):
                yield f"{page.name}: links to {file}#{anchor}"
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        for code in re.findall(r"`([\w./-]+\.(?:py|toml|md|sh|cpp))`", prose):
            if code not in endings and Path(code).name not in USERS_FILES:
                yield f"{page.name}: names {code}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Lines per room.


def lines_per_room() -> dict[str, int]:
    """Count the physical lines of each room of the product, and of tests, scripts and benchmarks."""
    found: dict[str, int] = {}
    for source in sources(*PRODUCT, *PROGRAMS, "tests"):
        parts = source.name.split("/")
        room = "top files"
        if len(parts) > 1:
            room = parts[0] if parts[0] != "torchround" else parts[1] if len(parts) > 2 else "top files"
        found[room] = found.get(room, 0) + source.text.count("\n")
    return dict(sorted(found.items()))


def rooms_that_grew(found: dict[str, int], recorded: dict[str, int]) -> Iterator[str]:
    """Yield rooms with more lines than are recorded, and records that are far above the lines."""
    for room in sorted({*found, *recorded}):
        lines, most = found.get(room, 0), recorded.get(room, 0)
        if lines > most:
            yield f"{room} has {lines} lines, {most} are recorded: make it smaller, or record more and say why"
        elif lines <= most - SLACK:
            yield f"{room} has {lines} lines, {most} are recorded: record what it has now (--write)"


def main(arguments: list[str] | None = None) -> int:
    """Print every offence. Return 1 if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="record the lines of each room")
    lines = lines_per_room()
    if parser.parse_args(arguments).write:
        LINES.write_text(json.dumps(lines, indent=1) + "\n")
        return 0
    product, everything = sources(*PRODUCT), sources(*PRODUCT, *PROGRAMS, "tests")
    offences = [
        *(
            f"{s.name}: {offence}"
            for s in sources(*PRODUCT, *PROGRAMS)
            for rule in RULES
            for offence in rule(s)
        ),
        *(*circles(product), *open_ends(everything), *top_level(), *wrong_links()),
        *rooms_that_grew(lines, json.loads(LINES.read_text())),
    ]
    print("\n".join(offences) or f"{len(everything)} files, no offence")
    return int(bool(offences))


if __name__ == "__main__":
    sys.exit(main())
