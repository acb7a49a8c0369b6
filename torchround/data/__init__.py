"""Turns text files into batches of packed token sequences, from a position that a checkpoint saves exactly.

The steps read, tokenise, pack, shuffle, batch and prefetch are `torchdata` nodes. Their state is the saved position.
"""

from torchround.data.document_types import DataError, MissingTokenizerError, TokenizerError
from torchround.data.loader import Loader, ValidationLoader, build_validation_loader
from torchround.data.packing import cut, num_tokens
from torchround.data.text.tokenizer import Tokenizer, build_tokenizer

__all__ = [
    "DataError",
    "Loader",
    "MissingTokenizerError",
    "Tokenizer",
    "TokenizerError",
    "ValidationLoader",
    "build_tokenizer",
    "build_validation_loader",
    "cut",
    "num_tokens",
]
