"""Text that every installation has: the documentation strings of installed Python packages, as bytes.

Nothing is downloaded. The text belongs to a version of a package, so results name the version and a hash.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# Shorter ones are mostly lists of arguments.
LEAST_CHARACTERS = 400
HELD_OUT_FRACTION = 0.05


@dataclass(frozen=True)
class InstalledText:
    """The documentation of one package: `train` and `held_out` are `[bytes]` uint8, `digest` is of both."""

    package: str
    version: str
    digest: str
    train: Tensor
    held_out: Tensor


@cache
def documentation_of(package: str) -> InstalledText:
    """Read the documentation strings of all modules of a package, each once, in an order that its hashes give.

    The order mixes the package's parts, and whole strings are held out. A large package takes ten seconds.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    found: dict[bytes, str] = {}
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        for text in _strings(path):
            found[hashlib.sha256(text.encode()).digest()] = text
    ordered = [found[key] for key in sorted(found)]
    cut = int(len(ordered) * (1 - HELD_OUT_FRACTION))
    train, held_out = (_as_bytes("\n\n".join(part)) for part in (ordered[:cut], ordered[cut:]))
    digest = hashlib.sha256(train.numpy().tobytes() + held_out.numpy().tobytes()).hexdigest()
    return InstalledText(package, importlib.metadata.version(package), digest, train, held_out)


def _strings(path: Path) -> list[str]:
    """Return the long documentation strings of a module; none if this Python cannot read it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for text in texts if len(text) >= LEAST_CHARACTERS]


def _as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
