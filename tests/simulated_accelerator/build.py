"""Builds the simulated accelerator with g++, once for each torch, Python, compiler and state of its sources.

The result is kept in a folder for caches, so later processes only load it. `NotBuilt` says why there is none.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

NAME = "simulated_accelerator"
SOURCES = Path(__file__).parent
STANDARD = "c++20"


class NotBuilt(Exception):
    """The simulated accelerator cannot be built here; the message says why."""


def build():
    """Return the path of the built module. Raises `NotBuilt` without a compiler, or if it refuses the sources."""
    if sys.platform != "linux":
        raise NotBuilt(f"the simulated accelerator needs Linux, this is {sys.platform}")
    wanted = os.environ.get("CXX", "g++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise NotBuilt(f"the simulated accelerator needs the C++ compiler {wanted}, which is not installed")
    folder = cache_folder() / NAME / _key(compiler)
    built = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes wait here, and then find it
            if not built.exists():
                _compile(compiler, folder, built)
    return built


def cache_folder():
    if chosen := os.environ.get("TORCHROUND_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchround"


def _key(compiler):
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    facts = [torch.__version__, torch.__file__, sysconfig.get_config_var("SOABI") or "", version, *_flags()]
    digest = hashlib.sha256("\n".join(facts).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _flags():
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        *(f"-std={STANDARD}", "-O1", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(f"-isystem{folder}" for folder in includes),
    ]


def _compile(compiler, folder, built):
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    runs = [
        subprocess.Popen(
            [compiler, *_flags(), "-c", source, "-o", target],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for source, target in zip(sources, objects, strict=True)
    ]
    answers = [run.communicate()[1] for run in runs]
    for run, source, answer in zip(runs, sources, answers, strict=True):
        if run.returncode != 0:
            raise NotBuilt(f"{compiler} refused {source.name}:\n{answer[-4000:]}")
    libraries = Path(torch.__file__).parent / "lib"
    partial = built.with_suffix(".partial")
    linked = subprocess.run(
        [
            *(compiler, "-shared", "-o", partial, *objects, f"-L{libraries}", f"-Wl,-rpath,{libraries}"),
            *("-ltorch", "-ltorch_cpu", "-lc10"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if linked.returncode != 0:
        raise NotBuilt(f"{compiler} could not link the simulated accelerator:\n{linked.stderr[-4000:]}")
    for target in objects:
        target.unlink()
    partial.rename(built)  # a process that is killed here leaves no half of a module
