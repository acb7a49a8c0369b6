"""Nothing happens at import, and the planner runs without torch. `scripts/check_tree.py` checks what reading alone shows."""

import subprocess
import sys
from pathlib import Path

import setuptools

from scripts.check_tree import PRODUCT, ROOT, sources


def modules(*places):
    """List the modules that can be imported. Triton's kernels are imported by their first call, for it need not be installed."""
    return [source.module for source in sources(*places) if not source.name.endswith(("__main__.py", "_triton.py"))]


def run_python(code, folder):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_planner_runs_where_there_is_no_torch():
    imports = "\n".join(f"import {module}" for module in modules("torchround/planning"))
    run_python(f"sys.modules['torch'] = None\n{imports}", ROOT)


IMPORT_EVERYTHING = """
import os, random, signal, threading, logging
import numpy, torch, torchdata.nodes, pydantic, tokenizers
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


def test_nothing_happens_at_import(tmp_path):
    imports = "\n".join(f"import {module}" for module in modules(*PRODUCT))
    run_python(IMPORT_EVERYTHING.replace("IMPORTS", imports), tmp_path)


def test_an_installation_holds_every_package_of_models_and_simulate_and_none_of_these_names():
    """setuptools finds them through the links `torchround/models` and `torchround/simulate`."""
    assert 'include = ["torchround*"]' in (ROOT / "pyproject.toml").read_text()
    found = setuptools.find_packages(str(ROOT), include=["torchround*"])
    tops = (ROOT / "models", ROOT / "simulate")
    folders = [path.parent.relative_to(ROOT) for top in tops for path in top.rglob("__init__.py")]
    assert Path("models/common") in folders
    assert {f"torchround.{'.'.join(folder.parts)}" for folder in folders} <= {*found}
    assert {name.split(".")[0] for name in found} == {"torchround"}
