"""Hugging Face folders: weights read straight into the host store, and written back from a checkpoint.

This room knows tensor names, shapes and dtypes, and no model family: which parameter is which tensor is given.
"""

from torchround.hf.adapters import WithAdapters, read_adapters
from torchround.hf.errors import HFError
from torchround.hf.pretrained import PretrainedWeights

__all__ = ["HFError", "PretrainedWeights", "WithAdapters", "read_adapters"]
