"""Hugging Face folders: weights read straight into the host store, and written back from a checkpoint.

This room knows tensor names, shapes and dtypes, and no model family: which parameter is which tensor is given.
"""

from torchround.hf.pretrained import PretrainedWeights, WithAdapters, read_adapters
from torchround.hf.tensor_folder import HFError

__all__ = ["HFError", "PretrainedWeights", "WithAdapters", "read_adapters"]
