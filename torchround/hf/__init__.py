"""Hugging Face folders: weights read straight into the host store, and written back from a checkpoint.

This package knows tensor names, shapes and dtypes, but no model family: its callers say which tensor holds which
parameter.
"""

from torchround.hf.pretrained import PretrainedWeights, read_adapters
from torchround.hf.tensor_folder import HFError, quantisation, quantised_advice

__all__ = ["HFError", "PretrainedWeights", "quantisation", "quantised_advice", "read_adapters"]
