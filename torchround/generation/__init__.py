"""Text from a model that an engine holds: continuations of prompts, and losses of documents.

Read `continuations.py` first. It sees a list of layers and an engine, as training does; no family is known here.
"""

from torchround.generation.continuations import generate
from torchround.generation.inference import Score, TextEngine, inference_store, score
from torchround.generation.sampling import Sampling

__all__ = ["Sampling", "Score", "TextEngine", "generate", "inference_store", "score"]
