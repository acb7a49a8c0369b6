"""The tables of a run's data: the tokenizer, the sources, and how documents become batches.

Paths are relative to the working directory.
"""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from torchround.config.key_types import Fraction, Many, Name, PositiveFloat, PositiveInt, Table


class TokenizerTable(Table):
    """The tokenizer. Default: the one in `model.hf_path`."""

    path: Name | None = None
    """Tokenizer file (a byte-level BPE tokenizer.json), or a folder that holds one. Default: `model.hf_path`."""

    name: Literal["bytes"] | None = None
    """Built-in tokenizer. `bytes`: one token per UTF-8 byte, plus special ones. It needs no file."""

    chat_template: Name | None = None
    """File with the Jinja template that turns a conversation into text. Default: the one beside the tokenizer."""

    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Further variables for chat templates, for example `{ enable_thinking = false }`."""


class SourceTable(Table):
    """One source of documents, an element of `data.sources` or `validation.sources`."""

    path: Name
    """A file, a glob (`corpus/**/*.jsonl`), or `python-stdlib`, the source files of Python's standard library. With `format =
    "dataset"`, a folder or a name that the package datasets loads. Required."""

    format: Literal["auto", "text", "json", "jsonl", "parquet", "dataset"] = "auto"
    """`text`: one document per file. `json`: an array of objects, or one object per line. `jsonl`: one object per line,
    compressed if the name ends in `.gz` or `.zst`. `auto`: by the ending of each name, otherwise `text`."""

    module: Name | None = None
    """Python module of your own that reads the files: `read(path)` yields a table of fields for each record (docs/data.md)."""

    content: Literal["text", "messages", "alpaca", "prompt_completion", "tokens"] = "text"
    """`text`: a string. `messages`: a list of `{role, content}` or of `{from, value}` (ShareGPT), with optional fields `tools`
    and `system`. `alpaca`: `instruction`, `input` and `output`. `prompt_completion`: `prompt` (or `question`) and `completion`
    (or `response`, `answer`), strings or lists of messages. `tokens`: a list of token ids."""

    field: Name | None = None
    """Field of each record that holds the content. Default: `text`, `messages` (or `conversations`) or `tokens`."""

    weight: PositiveFloat = 1.0
    """Share of documents drawn from this source, relative to the other sources' weights."""

    special_tokens: bool = False
    """Whether names of special tokens in text (`<|im_start|>`) are tokens, for conversations that a template has written
    already."""

    split: Name = "train"
    """Split of a dataset. Only read with `format = "dataset"`."""

    subset: Name | None = None
    """Named configuration of a dataset that has several. Only read with `format = "dataset"`."""


class DataTable(Table):
    """The training data. Documents are packed to `training.seq_len` tokens. Attention stays inside each document."""

    sources: Annotated[Many[SourceTable], Field(min_length=1)]
    """Array of sources, each a table as below. Required."""

    shuffle: bool = True
    """Visit the documents in a new random order each epoch, fixed by `run.seed`. Compressed files, parquet files and datasets
    are shuffled by parts, and in each part by blocks of up to 8192 records."""

    shuffle_sequences: Annotated[int, Field(ge=0, le=65536)] | Literal["auto"] = "auto"
    """Packed sequences of a window that are put into a random order, which spreads a long document over many batches. `auto`:
    about 16 Mi tokens (9 bytes of host memory each), at most 4096 sequences; 0 if documents stay whole or `shuffle` is off."""

    epochs: PositiveInt | None = None
    """Passes over each source, after which the run ends. Default: sources start over until `training.steps` is reached."""

    weight_by: Literal["source", "size"] = "source"
    """Meaning of `weight`. `source`: the source's share of the documents drawn. `size`: a factor of its number of documents."""

    packing: Literal["auto", "contiguous", "best_fit"] = "auto"
    """`contiguous`: documents end to end, cut every `training.seq_len` tokens. `best_fit`: whole documents, combined with
    little padding. `auto`: `best_fit` if a source holds conversations, otherwise `contiguous`."""

    long_documents: Literal["cut", "split"] = "cut"
    """Documents longer than `training.seq_len` tokens in `best_fit`. `cut`: keep the beginning. `split`: keep everything, in
    parts that do not attend to each other."""

    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of a conversation that the loss counts: the assistant's turns, each with the token that ends it, or all."""

    on_bad_record: Literal["stop", "skip"] = "stop"
    """Reaction to a record that cannot be used. `stop`: the run ends after a checkpoint. `skip`: it is left out and named."""

    max_bad_fraction: Fraction = 0.01
    """Fraction of a source's records that may be bad with `on_bad_record = "skip"`, once more than 10 are in each pass. A damaged
    file always ends the run."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the documents, with all their copies, held out from training for `validation` without sources."""

    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Threads that read and tokenise ahead of the training loop, or 0. The order of the data does not depend on it."""
