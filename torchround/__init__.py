"""torchround trains language models that do not fit in GPU memory, round-robin over one to eight GPUs.

The names below are what a program needs to use the engine without the trainer. Each is imported when it is first asked
for, so that `import torchround` alone imports nothing else: the planner runs without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; the same names as in _MODULES
    from torchround.config import AdamWTable as AdamWTable
    from torchround.engine.device import AcceleratorDevice as AcceleratorDevice
    from torchround.engine.device import CpuDevice as CpuDevice
    from torchround.engine.engine import Engine as Engine
    from torchround.engine.settings import EngineSettings as EngineSettings
    from torchround.engine.store.host_store import HostStore as HostStore
    from torchround.layer import LayeredModel as LayeredModel
    from torchround.layer import LayerWork as LayerWork
    from torchround.layer import MicroBatch as MicroBatch
    from torchround.layer import Products as Products
    from torchround.library.pipeline import Pipeline as Pipeline
    from torchround.models import FAMILIES as FAMILIES
    from torchround.planning.partition import Partition as Partition
    from torchround.planning.plan import Plan as Plan
    from torchround.planning.planner import make_plan as make_plan

_MODULES = {
    "AcceleratorDevice": "torchround.engine.device",
    "AdamWTable": "torchround.config",
    "CpuDevice": "torchround.engine.device",
    "Engine": "torchround.engine.engine",
    "EngineSettings": "torchround.engine.settings",
    "FAMILIES": "torchround.models",
    "HostStore": "torchround.engine.store.host_store",
    "LayerWork": "torchround.layer",
    "LayeredModel": "torchround.layer",
    "MicroBatch": "torchround.layer",
    "Partition": "torchround.planning.partition",
    "Pipeline": "torchround.library.pipeline",
    "Plan": "torchround.planning.plan",
    "Products": "torchround.layer",
    "make_plan": "torchround.planning.planner",
}


def __getattr__(name: str) -> Any:
    """Import one of the names above from its module. Raises `AttributeError` for any other name."""
    if name not in _MODULES:
        raise AttributeError(f"module 'torchround' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List the names for completion in an interpreter."""
    return [*globals(), *_MODULES]
