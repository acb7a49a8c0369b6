"""Text files in, batches of packed token sequences out, at a position that is never lost.

Read, tokenise, pack, batch, prefetch: a chain of `torchdata` nodes whose state goes into the checkpoint.
"""

from torchround.data.errors import DataError, MissingTokenizerError, TokenizerError
from torchround.data.loader import Loader, ValidationLoader, build_loader, build_validation_loader
from torchround.data.packing.batches import cut, num_tokens
from torchround.data.text.tokenizer import Tokenizer, build_tokenizer

__all__ = [
    "DataError",
    "Loader",
    "MissingTokenizerError",
    "Tokenizer",
    "TokenizerError",
    "ValidationLoader",
    "build_loader",
    "build_tokenizer",
    "build_validation_loader",
    "cut",
    "num_tokens",
]
