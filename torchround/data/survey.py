"""Counts the documents and tokens of each source of a mix, and lists its longest documents.

It reads in the order of training, so it counts the documents that a run sees first.
"""

import heapq
from dataclasses import dataclass, field

from torchround.config import DataTable
from torchround.data.document_types import Document
from torchround.data.loader import mix_settings, open_sources
from torchround.data.reader import Reader
from torchround.data.text.tokenizer import Tokenizer
from torchround.data.tokenising import tokenise

LONGEST = 5


@dataclass
class SourceSurvey:
    """Counts for one source. `longest` lists the longest documents with their tokens, longest first."""

    name: str
    num_documents: int = 0
    num_tokens: int = 0
    longest: list[tuple[int, str]] = field(default_factory=list)

    def add(self, document: Document, num_tokens: int) -> None:
        """Count a document that has been read to its end."""
        self.num_documents += 1
        self.num_tokens += num_tokens
        self.longest = heapq.nlargest(LONGEST, [*self.longest, (num_tokens, str(document))])


@dataclass(frozen=True)
class Survey:
    """Counts for each source, the number of bad records, and the first of these with file and line."""

    sources: list[SourceSurvey]
    num_bad: int
    bad_records: list[str]


def survey(data: DataTable, tokenizer: Tokenizer, seed: int, max_documents: int) -> Survey:
    """Read the first `max_documents` documents of the mix, at most one pass over each source. Raises `DataError`.

    Bad records are skipped and listed, even if `data.on_bad_record` is `stop`.
    """
    data = data.model_copy(update={"epochs": 1, "on_bad_record": "skip"})
    sources = open_sources(data, tokenizer)
    found = [SourceSurvey(source.name) for source in sources]
    reader = Reader(sources, mix_settings(data, sources, seed))
    reader.reset()
    num_tokens = 0
    for piece in reader:
        num_tokens += len(tokenise(tokenizer, piece).tokens)
        if piece.last:
            found[piece.source].add(piece.document, num_tokens)
            num_tokens = 0
            if sum(source.num_documents for source in found) == max_documents:
                break
    num_bad = sum(progress["bad"] for progress in reader.get_state()["sources"])
    return Survey(found, num_bad, reader.bad_records)
