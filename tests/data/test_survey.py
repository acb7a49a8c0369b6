"""The survey of a corpus: documents and tokens by source, and its longest documents."""

from pathlib import Path

from torchround.commands.inspect_data import survey
from torchround.config import DataTable, SourceTable
from torchround.data import Tokenizer


def test_a_survey_reads_a_long_document_as_one_and_stops_at_its_limit(corpus: Path, tokenizer: Tokenizer) -> None:
    data = DataTable(sources=(SourceTable(path=str(corpus / "*.txt")),), shuffle=False)
    (found,), _, _ = survey(data, tokenizer, seed=0, max_documents=2)
    long_tokens = len((corpus / "long.txt").read_bytes()) + 2
    assert found.num_documents == 2
    assert found.longest == [
        (long_tokens, str(corpus / "long.txt")),
        (found.num_tokens - long_tokens, str(corpus / "note-0.txt")),
    ]
