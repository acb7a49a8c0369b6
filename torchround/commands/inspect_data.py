"""Show what a run would read: its first batches as text, how well they are packed, and what each source gives.

    torchround inspect_data --config debug.toml --batches 2 --data.shuffle false

Takes the overrides that `train.py` takes. A line is one document of a sequence. Text between « and » is not learnt: none
of its tokens is a label that counts. No token in a line predicts the line's first token. If a document continues from the
sequence before, its first token here is the last label there. Long documents are shortened; `--whole` shows all of each,
with every change between what is learnt and what is not.
"""

import argparse
import heapq
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from torchround.commands.configured_model import model_config
from torchround.config import Config, ConfigError, DataTable, Options, parse_command_line
from torchround.data import DataError, Tokenizer, build_loader, build_tokenizer, num_tokens
from torchround.data.document_types import Document
from torchround.data.loader import mix_settings
from torchround.data.opening import open_sources, packs_whole_documents
from torchround.data.reading_order import Reader
from torchround.data.tokenising import tokenise
from torchround.layer import IGNORED_LABEL, MicroBatch
from torchround.models import ModelConfigError

CHARACTERS_SHOWN = 160


def main(arguments: Sequence[str]) -> int:
    """Print all of it. Returns the exit code: 2 for a mistake in the config or in the data."""
    options, overrides = parse(arguments)
    try:
        parsed = parse_command_line(["--config", options.config, *overrides])
        config = parsed.config
        tokenizer = build_tokenizer(config.tokenizer, config.model.hf_path)
        vocab_size = model_vocabulary(parsed, tokenizer)
        print_batches(config, tokenizer, vocab_size, options)
        print_survey(config, tokenizer, vocab_size, options.documents)
    except (ConfigError, DataError, ModelConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own flags. Returns them and the rest, which are overrides of the configuration."""
    parser = argparse.ArgumentParser(description="Show what a run would read.", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="the run's TOML file")
    parser.add_argument("--batches", type=at_least_one, default=1, help="global batches to read (default 1)")
    parser.add_argument(
        "--sequences", type=at_least_one, default=2, help="sequences of each to print (default 2)"
    )
    parser.add_argument(
        "--documents", type=at_least_one, default=1000, help="documents to count by source (default 1000)"
    )
    parser.add_argument("--whole", action="store_true", help="print all of each document, not shortened")
    return parser.parse_known_args(arguments)


def at_least_one(text: str) -> int:
    """Parse a count from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text}; legal: an integer of at least 1")
    return int(text)


def model_vocabulary(options: Options, tokenizer: Tokenizer) -> int:
    """Return the number of token ids that data may use: the model's if a source holds ids, otherwise the tokenizer's."""
    # Only then, because the data can be looked at before the model's folder is there.
    if all(source.content != "tokens" for source in options.config.data.sources):
        return tokenizer.vocab_size
    return model_config(options, tokenizer.vocab_size)[1].vocab_size


def print_batches(config: Config, tokenizer: Tokenizer, vocab_size: int, options: argparse.Namespace) -> None:
    """Print the first batches as text, and the share of their positions that hold tokens and labels."""
    training = config.training
    sizes = training.seq_len, training.global_batch_size
    loader = build_loader(config.data, tokenizer, *sizes, config.run.seed, vocab_size=vocab_size)
    loader.check_first_records()
    most_characters = None if options.whole else CHARACTERS_SHOWN
    positions, tokens, labels, read_s = 0, 0, 0, 0.0
    for number in range(options.batches):
        begun_s = time.perf_counter()
        batch = next(loader, None)
        read_s += time.perf_counter() - begun_s
        if batch is None:
            print(f"--- the data ends after {number} batches")
            break
        positions += batch.tokens.numel()
        tokens += num_tokens(batch, tokenizer.pad_id)
        labels += batch.num_labels()
        rows = min(options.sequences, len(batch.tokens))
        print_rows(batch, number, rows, tokenizer, most_characters)
    loader.close()
    if not positions:
        return
    print(
        f"--- {positions} positions: {tokens / positions:.2%} tokens, {labels / positions:.2%} with a label"
    )
    if packs_whole_documents(config.data):
        print(
            f"--- {loader.num_long_documents()} documents longer than a sequence: {config.data.long_documents}"
        )
    # A window of shuffled sequences is packed before its first one is handed out.
    position = loader.state_dict()["position"]
    parts = [part for part in position.get("streams", [position]) if part is not None]
    waiting = sum(part.get("sequences", 0) - part.get("taken", 0) for part in parts)
    packed = tokens * (1 + waiting * training.seq_len / positions)
    print(f"--- read at {packed / read_s:,.0f} tokens/s, start of the pipeline included")


def print_rows(
    batch: MicroBatch, number: int, rows: int, tokenizer: Tokenizer, most_characters: int | None
) -> None:
    """Print the first `rows` sequences of batch `number`."""
    for row in range(rows):
        print(f"--- batch {number}, sequence {row}")
        print_sequence(batch, row, tokenizer, most_characters)


def print_sequence(batch: MicroBatch, row: int, tokenizer: Tokenizer, most_characters: int | None) -> None:
    """Print one line per document: its number in the sequence, its tokens, its text."""
    for document in batch.document_ids[row].unique().tolist():
        inside = batch.document_ids[row] == document
        text = marked(batch.tokens[row][inside], batch.labels[row][inside], tokenizer)
        print(f"{document:4} {int(inside.sum()):7} tokens  {shortened(text, most_characters)}")


def marked(tokens: torch.Tensor, labels: torch.Tensor, tokenizer: Tokenizer) -> str:
    """Return the text of a document's `tokens` `[n]`, with « and » around the tokens that are not learnt.

    `labels` `[n]`: `labels[i]` is token `i + 1`, or `IGNORED_LABEL` if that token is not learnt.
    """
    # No label tells whether the first token is learnt, so it counts as not learnt.
    ignored = [True, *(labels == IGNORED_LABEL).tolist()[:-1]]
    edges = [
        0,
        *(index for index in range(1, len(ignored)) if ignored[index] != ignored[index - 1]),
        len(ignored),
    ]
    runs = [(tokens[start:end].tolist(), ignored[start]) for start, end in pairwise(edges)]
    texts = [(text_of(run, tokenizer), masked) for run, masked in runs]
    return "".join(f"«{text}»" if masked else text for text, masked in texts)


def text_of(ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the text of `ids`. An id of the model that the tokenizer does not know is shown as a number."""
    return tokenizer.decode(ids)


def shortened(text: str, most_characters: int | None) -> str:
    """Put a text on one line. One of more than `most_characters` keeps its beginning and its end."""
    text = text.replace("\n", "⏎")
    if most_characters is None or len(text) <= most_characters:
        return text
    half = most_characters // 2
    return f"{text[:half]} … {text[-half:]}"


def print_survey(config: Config, tokenizer: Tokenizer, vocab_size: int, max_documents: int) -> None:
    """Print documents and tokens by source, the longest documents, and the bad records by file and line."""
    sources, num_bad, bad_records = survey(config.data, tokenizer, config.run.seed, max_documents, vocab_size)
    all_tokens = max(1, sum(source.num_tokens for source in sources))
    for source in sources:
        share = source.num_tokens / all_tokens
        print(
            f"--- {source.name}: {source.num_documents} documents, {source.num_tokens} tokens ({share:.1%})"
        )
        for tokens, document in source.longest:
            print(f"{tokens:12} tokens  {document}")
    print(f"--- {num_bad} bad records")
    for record in bad_records:
        print(f"     {record}")


# Counts by source. The survey reads in the order of training, so it sees the documents that a run sees first.

LONGEST = 5  # documents that are shown of each source


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


def survey(
    data: DataTable, tokenizer: Tokenizer, seed: int, max_documents: int, vocab_size: int | None = None
) -> tuple[list[SourceSurvey], int, list[str]]:
    """Count the first `max_documents` documents of the mix, at most one pass over each source. Raises `DataError`.

    Returns the counts by source, the number of bad records, and the first of these with file and line. Bad records are
    skipped, even if `data.on_bad_record` is `stop`.
    """
    # One epoch: without a limit the mix never ends. One bad record must not hide the others.
    data = data.model_copy(update={"epochs": 1, "on_bad_record": "skip", "max_bad_fraction": 1.0})
    sources = open_sources(data, tokenizer, vocab_size)
    found = [SourceSurvey(source.name) for source in sources]
    reader = Reader(sources, mix_settings(data, sources, seed))
    reader.reset()
    num_tokens = 0  # in the pieces of the document so far; a long document comes in several
    for piece in reader:
        num_tokens += len(tokenise(tokenizer, piece).tokens)
        if piece.last:
            found[piece.source].add(piece.document, num_tokens)
            num_tokens = 0
            if sum(source.num_documents for source in found) == max_documents:
                break
    num_bad = sum(progress["bad"] for progress in reader.get_state()["sources"])
    return found, num_bad, reader.bad_records
