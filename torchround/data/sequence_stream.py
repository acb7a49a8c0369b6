"""One stream of packed sequences from the documents that are dealt to it, and the positions of all streams.

The nodes are: read, tokenise, pack, shuffle (if asked for), batch, and prefetch (with workers).
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode, Prefetcher

from torchround.config import DataTable
from torchround.data.best_fit import BestFitPacker
from torchround.data.document_types import Cursor, DataError
from torchround.data.formats.sources import Source
from torchround.data.packing import Batches, ContiguousPacker, TokenPiece
from torchround.data.reading_order import DocumentPiece, MixSettings, Reader, SourceProgress
from torchround.data.shuffling import SequenceShuffler, auto_window
from torchround.data.text.tokenizer import Tokenizer, encode_spans, encode_text, ends_with_special, opens_with
from torchround.layer import MicroBatch

PREFETCHED_BATCHES = 2
CONVERSATIONS = ("messages", "alpaca")
WITH_PROMPTS = (*CONVERSATIONS, "prompt_completion")
LATEST = 2
MOST_SEQUENCES = 65536
ELSEWHERE = "elsewhere"
"""Stands in a position for a stream that another machine reads."""


@dataclass(frozen=True)
class OrderRules:
    """The rules that turn documents into the order of sequences: their number, and the sequences per shuffled window.

    A run keeps the rules that it began with, so a position says which ones it was saved under. In rules 1, the epochs of a
    source have independent orders, and windows reach across their ends. In rules 2, copies of a document are kept apart.
    A position without a number is of rules 1. `window` is 0 if sequences are not shuffled.
    """

    number: int
    window: int

    @property
    def copies_apart(self) -> bool:
        return self.number >= 2

    def window_of_each(self, num_streams: int) -> int:
        """Return the sequences in a window of each stream: all windows together have those of one stream's window."""
        return -(-self.window // num_streams)

    def identity(self, seq_len: int) -> dict[str, Any]:
        """Return the entries that a position has of them. Keys are added only if they matter."""
        entries: dict[str, Any] = {"order": self.number} if self.number > 1 else {}
        # A window that is half used up must be packed again into the same sequences.
        if self.window:
            entries |= {"seq_len": seq_len, "shuffle_sequences": self.window}
        return entries


def packs_whole_documents(data: DataTable) -> bool:
    chats = any(table.content in WITH_PROMPTS for table in data.sources)
    return data.packing == "best_fit" or (data.packing == "auto" and chats)


def rules_for(data: DataTable, seq_len: int) -> OrderRules:
    window = data.shuffle_sequences
    if window == "auto":
        # Whole documents leave in a mixed order already.
        window = auto_window(seq_len) if data.shuffle and not packs_whole_documents(data) else 0
    return OrderRules(LATEST, window)


def rules_of(saved: dict[str, Any], data: DataTable, own: OrderRules) -> OrderRules:
    """Return the rules that a position was saved under, for a run whose config asks for `own`.

    A window that the config names stays: `Loader` refuses the position if another one was saved.
    """
    number, window = saved.get("order", 1), own.window
    if data.shuffle_sequences == "auto":
        window = saved.get("shuffle_sequences", 0)
    is_known = type(number) is int and 1 <= number <= LATEST
    is_window = type(window) is int and 0 <= window <= MOST_SEQUENCES
    return OrderRules(number if is_known else own.number, window if is_window else own.window)


class SequenceStream:
    """The stream's part of each batch, `[part_size, T]`; fewer sequences in the last part of limited data.

    `mix` says which documents of the sources are this stream's. `position` is the place after the last batch that was kept, None for the beginning.
    """

    def __init__(
        self,
        data: DataTable,
        tokenizer: Tokenizer,
        seq_len: int,
        part_size: int,
        mix: MixSettings,
        sources: Sequence[Source],
    ) -> None:
        self.position: Any = None
        self._data = data
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._part_size = part_size
        self._mix = mix
        self._sources = sources
        self._tokenising: Tokenising | None = None
        self._nodes: BaseNode[MicroBatch | DataError] | None = None
        self._has_ended = False

    def next(self, rules: OrderRules, num_read: int) -> MicroBatch | None:
        """Return the stream's part of the next batch, None at its end. Raises `DataError`.

        `num_read` streams are read by this process and share its workers.
        """
        if self._has_ended:
            return None
        if self._nodes is None:
            assert self.position != ELSEWHERE, "another machine has read this stream: its position is missing"
            self._nodes = self._start(rules, -(-self._data.num_workers // num_read))
        item = next(self._nodes, None)
        if isinstance(item, DataError):
            raise item
        self._has_ended = item is None
        return item

    def keep_position(self) -> None:
        """Move the position after the part that `next` returned. The end of the data is no place of its own."""
        if self._nodes is None or self._has_ended:
            return
        state: dict[str, Any] = self._nodes.state_dict()
        if isinstance(self._nodes, Prefetcher):
            # The prefetcher keeps the nodes' state as it was after each batch, so a resumed run repeats no batch.
            assert state["steps_since_snapshot"] == 0, (
                f"{state['steps_since_snapshot']} batches without a snapshot"
            )
            state = state["snapshot"]
        self.position = state

    def close(self) -> None:
        """End the threads. The position stays, and asking for a further part starts them again."""
        self._nodes = None  # torchdata's prefetch thread ends with its node
        self._has_ended = False
        if self._tokenising is not None:
            self._tokenising.close()
            self._tokenising = None

    def _start(self, rules: OrderRules, num_workers: int) -> BaseNode[MicroBatch | DataError]:
        # New nodes each time: a thread that still works on the old ones cannot disturb them.
        mix, pad_id, seq_len = self._mix, self._tokenizer.pad_id, self._seq_len
        reader = Reader(self._sources, replace(mix, copies_apart=rules.copies_apart))
        self._tokenising = Tokenising(reader, self._tokenizer, num_workers)
        sequences: BestFitPacker | ContiguousPacker | SequenceShuffler
        if packs_whole_documents(self._data):
            # Asked for only here: to count the records of small archives, they are read.
            counts = [each.quick_count() for each in self._sources] if rules.copies_apart else []
            sequences = BestFitPacker(self._tokenising, seq_len, pad_id, self._data.long_documents, counts)
        else:
            sequences = ContiguousPacker(self._tokenising, seq_len, pad_id)
        if rules.window:
            window = rules.window_of_each(mix.num_streams)
            sequences = SequenceShuffler(sequences, window, mix.seed, across_epochs=not rules.copies_apart)
        batches = Batches(sequences, self._part_size)
        if not num_workers:
            batches.reset(self.position)
            return batches
        prefetcher = Prefetcher(batches, PREFETCHED_BATCHES)
        prefetcher.reset(self.position and {"snapshot": self.position, "steps_since_snapshot": 0})
        return prefetcher


# The position of all streams, as a checkpoint holds it.


def joined(positions: Sequence[Any]) -> Any:
    """Return the position of all streams, fit for JSON. A single stream's is the whole; None is the beginning."""
    if len(positions) == 1:
        return _plain(positions[0])
    if all(position is None for position in positions):
        return None
    return {"streams": [_plain(position) for position in positions]}


def joined_positions(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a loader from the states of the same loader on all machines, which read different streams.

    Raises `DataError` if no machine has one of the streams.
    """
    first = states[0]
    # A machine that has read nothing yet has no position of any stream.
    of_streams = [state["position"]["streams"] for state in states if "streams" in (state["position"] or ())]
    if not of_streams:
        return first
    if len(of_streams) < len(states):
        of_streams.append([None] * len(of_streams[0]))
    of_each = zip(*of_streams, strict=True)
    found = [next((each for each in streams if each != ELSEWHERE), ELSEWHERE) for streams in of_each]
    if ELSEWHERE in found:
        raise DataError(f"no machine has the position of data stream {found.index(ELSEWHERE)}")
    return {**first, "position": {"streams": found}}


def split_position(position: Any, num_streams: int, first_places: Sequence[Cursor]) -> list[Any]:
    """Return each stream's position. Raises `DataError` for one that no run with these streams and sources saves.

    `first_places` has the place at which each source begins.
    """
    if position is None:
        return [None] * num_streams
    try:
        parts = [position] if num_streams == 1 else list(position["streams"])
        states = [part.get("packing", part) for part in parts if part is not None]
        sources = [SourceProgress(**source) for state in states for source in state["reader"]["sources"]]
        places = [len(source.place) for source in sources]
        numbers = [n for each in sources for n in (*each.place, each.epoch, each.used, each.drawn, each.bad)]
        fits = len(parts) == num_streams and places == [*map(len, first_places)] * len(states)
        # Earlier versions could pack a group anew in changed files, `without` the documents that had left it.
        if (
            not fits
            or any(type(n) is not int or n < 0 for n in numbers)
            or any(s.get("without") for s in states)
        ):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError("the saved data position cannot be used: it has other streams or sources") from error
    return parts


def _plain(state: Any) -> Any:
    """Copy a nested state with lists in place of arrays."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state


# Tokens. The order is the reading order for any number of threads.
#
# torchdata's `ParallelMapper` is not used. Each of its worker threads calls `torch.set_num_threads(1)`, which leaves
# every thread started later, the engine's among them, a single core for its matrix products. Its state also has another
# shape without workers than with them.

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
        parts = (before, encode_text(tokenizer, text, special), after)
        tokens = np.concatenate([np.array(ids, dtype=np.int64) for ids in parts])
    else:
        spans = encode_spans(tokenizer, piece.content)
        tokens = np.concatenate(spans)
        learn = np.repeat([span.learn for span in piece.content], [len(ids) for ids in spans])
    return TokenPiece(tokens, piece.first, learn, piece.last, piece.epoch, piece.source)
