"""Turns pieces of documents into tokens, in threads. The order is the reading order for any number of threads.

torchdata's `ParallelMapper` is not used. Each of its worker threads calls `torch.set_num_threads(1)`, which leaves
every thread started later, the engine's among them, a single core for its matrix products. Its state also has another
shape without workers than with them.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from torchround.data.document_types import DataError
from torchround.data.packing import TokenPiece
from torchround.data.reading_order import DocumentPiece
from torchround.data.text.tokenizer import Tokenizer, encode_spans, encode_text, ends_with_special, opens_with

Result = Callable[[], TokenPiece | DataError]


class Tokenising(BaseNode[TokenPiece | DataError]):
    """Token pieces, one for each piece of `source`. `num_workers = 0` does the work in the calling thread.

    The package tokenizers releases Python's global lock, so threads run in parallel. A `DataError` of the reader is the last item:
    the pieces before it are still used, and it reaches the caller as it was raised.
    """

    def __init__(self, source: BaseNode[DocumentPiece], tokenizer: Tokenizer, num_workers: int) -> None:
        super().__init__()
        self._source = source
        self._tokenizer = tokenizer
        self._num_workers = num_workers
        self._threads: ThreadPoolExecutor | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.close()
        if self._num_workers:
            self._threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="torchround-tokenise")
        # Work under way, in reading order, each with the reader's state after its piece.
        self._ahead: deque[tuple[Result, dict[str, Any]]] = deque()
        self._ended = False
        self._failed = False
        self._source.reset(initial_state)
        self._state: dict[str, Any] = self._source.state_dict()

    def get_state(self) -> dict[str, Any]:
        """Return the reader's state after the last piece handed out. A resumed run reads pieces under way again."""
        return self._state

    def next(self) -> TokenPiece | DataError:
        """Return the next piece. Raises `StopIteration` at the end of the source or after an error."""
        # Two pieces per thread: one under way, one ready for the thread that ends first.
        while not self._ended and len(self._ahead) < max(1, 2 * self._num_workers):
            self._read_one()
        if not self._ahead:
            if not self._failed:
                self._state = self._source.state_dict()  # also counts bad records after the last piece
            raise StopIteration
        result, self._state = self._ahead.popleft()
        return result()

    def close(self) -> None:
        """End the threads. May be called from any thread. Asking for a piece is then an error until the next `reset`."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _read_one(self) -> None:
        try:
            piece = next(self._source)
        except StopIteration:
            self._ended = True
        except DataError as error:
            self._ended = self._failed = True
            found = error
            self._ahead.append((lambda: found, self._state))
        else:
            self._ahead.append((self._start(piece), self._source.state_dict()))

    def _start(self, piece: DocumentPiece) -> Result:
        work = partial(tokenise, self._tokenizer, piece)
        return work if self._threads is None else self._threads.submit(work).result


def tokenise(tokenizer: Tokenizer, piece: DocumentPiece) -> TokenPiece:
    """Turn the content of a piece into tokens.

    Token ids stay unchanged, and a conversation is encoded as its template wrote it. Text gets BOS before a document's
    first token, if the vocabulary has one, and EOS after its last. A source that reads special tokens gets neither twice.
    """
    learn = None
    if isinstance(piece.content, np.ndarray):
        tokens = piece.content
    elif isinstance(piece.content, str):
        text, special = piece.content, piece.special_tokens
        begins = piece.first and not (special and opens_with(tokenizer, text, tokenizer.bos_id))
        ends = piece.last and not (special and ends_with_special(tokenizer, text))
        before = [tokenizer.bos_id] if begins and tokenizer.bos_id is not None else []
        after = [tokenizer.eos_id] if ends else []
        parts = (before, encode_text(tokenizer, text, special, not piece.first), after)
        tokens = np.concatenate([np.array(ids, dtype=np.int64) for ids in parts])
    else:
        spans = encode_spans(tokenizer, piece.content)
        tokens = np.concatenate(spans)
        learn = np.repeat([span.learn for span in piece.content], [len(ids) for ids in spans])
    return TokenPiece(tokens, piece.first, learn, piece.last)
