"""torchround trains language models that do not fit in GPU memory, round-robin over one to eight GPUs.

The names below are what a program needs to use the engine without the trainer. Each is imported when it is first asked
for, so that `import torchround` alone imports nothing else: the planner runs without torch.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "AcceleratorDevice": "torchround.engine.device",
    "AdamWTable": "torchround.config",
    "CpuDevice": "torchround.engine.device",
    "Engine": "torchround.engine.engine",
    "EngineSettings": "torchround.engine.settings",
    "FAMILIES": "torchround.models",
    "HostStore": "torchround.engine.store.host_store",
    "LayeredModel": "torchround.layer",
    "MicroBatch": "torchround.layer",
    "Partition": "torchround.planning.partition",
    "Pipeline": "torchround.library.pipeline",
    "make_plan": "torchround.planning.planner",
}


def __getattr__(name: str) -> Any:
    """Import one of the names above from its module. Raises `AttributeError` for any other name."""
    if name not in _MODULES:
        raise AttributeError(f"module 'torchround' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
