"""Small real corpora on disk, and loaders over them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import Loader, Tokenizer, build_loader, build_tokenizer

MakeLoader = Callable[..., Loader]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return build_tokenizer(TokenizerTable(name="bytes"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with short and empty documents, one longer than a piece of text, and records of all lengths."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(7):
        (folder / f"note-{number}.txt").write_text(f"note {number}\n" * (3**number % 41))
    (folder / "empty.txt").write_text("")
    (folder / "long.txt").write_text("".join(f"line {number} of the long one, ünïcode\n" for number in range(4000)))
    records = [{"text": f"record {number} " * (number * 7 % 23), "number": number} for number in range(40)]
    lines = [json.dumps(record) for record in records]
    (folder / "records.jsonl").write_text("\n".join(lines[:20] + ["", "   "] + lines[20:]) + "\n\n")
    return folder


@pytest.fixture(scope="session")
def make_loader(corpus: Path, tokenizer: Tokenizer) -> MakeLoader:
    def make(
        *,
        num_workers: int = 0,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
        weights: tuple[float, float] = (1.0, 2.5),
        seq_len: int = 512,
        global_batch_size: int = 6,
        folder: Path = corpus,
        shuffle_sequences: int | Literal["auto"] = 0,
        **data_keys: Any,
    ) -> Loader:
        sources = (
            SourceTable(path=str(folder / "*.txt"), weight=weights[0]),
            SourceTable(path=str(folder / "records.jsonl"), weight=weights[1]),
        )
        data = DataTable(
            sources=sources,
            shuffle=shuffle,
            shuffle_sequences=shuffle_sequences,
            num_workers=num_workers,
            epochs=epochs,
            **data_keys,
        )
        return build_loader(data, tokenizer, seq_len, global_batch_size, seed)

    return make
