"""Text from a model that an engine holds: continuations of prompts, and losses of documents.

Read `continuations.py` first. It sees a list of layers and an engine, as training does; no family is known here.
"""

from torchround.generation.continuations import Sampling, generate
from torchround.generation.inference import Score, TextEngine, inference_store, score

__all__ = ["Sampling", "Score", "TextEngine", "generate", "inference_store", "score"]
