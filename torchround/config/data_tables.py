"""The tables of a run's data: the tokenizer, the sources, and how documents become batches.

Paths are relative to the working directory.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from torchround.config.key_types import Fraction, Many, Name, PositiveFloat, PositiveInt, Table

TEMPLATE_INPUTS = ("messages", "tools", "documents", "add_generation_prompt")


def _without_inputs(variables: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if taken := sorted(variables.keys() & set(TEMPLATE_INPUTS)):
        raise ValueError(f"{', '.join(taken)} come from the conversation")
    return variables


TemplateVariables = Annotated[dict[str, JsonValue], AfterValidator(_without_inputs)]


class TokenizerTable(Table):
    """The tokenizer. Default: the one in `model.hf_path`."""

    path: Name | None = None
    """Tokenizer file (a byte-level BPE tokenizer.json), or a folder that holds one. Give either this or `name`. Default:
    `model.hf_path`."""

    name: Literal["bytes"] | None = None
    """Built-in tokenizer. `bytes`: one token per UTF-8 byte, plus special ones. It needs no file."""

    chat_template: Name | None = None
    """File with the Jinja template that turns a conversation into text. Only read for conversations. Default: the template
    beside the tokenizer, in `chat_template.jinja` or in `tokenizer_config.json`."""

    chat_template_kwargs: TemplateVariables | None = None
    """Further variables for chat templates, as `apply_chat_template` of transformers takes them, for example `{ enable_thinking
    = false }`."""


class SourceTable(Table):
    """One source of documents, an element of `data.sources` or `validation.sources`."""

    path: Name
    """A file, a glob (`corpus/**/*.jsonl`), or `python-stdlib`, the source files of the running Python's standard library: real
    text that every machine has. With `format = "dataset"`, a folder or a name that the package datasets loads. Required."""

    format: Literal["auto", "text", "json", "jsonl", "parquet", "dataset"] = "auto"
    """File format. `text`: one document per file. `json`: an array of objects, or one object per line. `jsonl`: one JSON object
    per line, compressed if the name ends in `.gz` or `.zst`. `parquet`: one document per row. `dataset`: read through the
    package datasets. `auto`: by the ending of each file's name (`.json`, `.jsonl`, `.parquet`), otherwise `text`."""

    module: Name | None = None
    """Python module of your own that reads the files, in place of `format`: `read(path)` yields a table of fields for each record
    (docs/data.md). It is looked up where Python looks, and then in the working directory."""

    content: Literal["text", "messages", "alpaca", "prompt_completion", "tokens"] = "text"
    """Content of a record. `text`: a string. `messages`: a conversation, as a list of `{role, content}` or of `{from, value}`
    (ShareGPT), with optional fields `tools` and `system`. `alpaca`: fields `instruction`, `input` and `output`. `prompt_completion`:
    fields `prompt` (or `question`) and `completion` (or `response`, `answer`), each a string or a list of messages; the
    completion is learnt. `tokens`: a list of token ids, used unchanged. A file of format `text` can only hold `text`."""

    field: Name | None = None
    """Field of each record that holds the content. Default: `text`, `messages` (or `conversations`) or `tokens`, as `content`
    says."""

    weight: PositiveFloat = 1.0
    """Share of documents drawn from this source, relative to the other sources' weights."""

    special_tokens: bool = False
    """Whether names of special tokens in text (`<|im_start|>`) are tokens, for conversations that a chat template has already
    written. `false` reads them as plain text, so that no document can fake a turn. Only for `text`, and `prompt_completion` of
    strings."""

    split: Name = "train"
    """Split of a dataset. Only read with `format = "dataset"`."""

    subset: Name | None = None
    """Named configuration of a dataset that has several. Only read with `format = "dataset"`."""


class DataTable(Table):
    """The training data. Documents are packed to `training.seq_len` tokens. Attention stays inside each document."""

    sources: Annotated[Many[SourceTable], Field(min_length=1)]
    """Array of sources, each a table as below. Required."""

    shuffle: bool = True
    """Visit the documents in a new random order each epoch, fixed by `run.seed`. `false`: as listed. Compressed files, parquet
    files and datasets are shuffled by parts, and in each part by blocks of up to 8192 records."""

    shuffle_sequences: Annotated[int, Field(ge=0, le=65536)] | Literal["auto"] = "auto"
    """Packed sequences of a shuffle window, which are put into a random order fixed by `run.seed`; 0 leaves their order. It
    spreads a long document over many batches. `auto`: windows of about 16 Mi tokens, at most 4096 sequences; 0 if documents
    stay whole or `shuffle` is off. A window ends early after an epoch. Host memory: 9 bytes per token of a window, 72 MiB at
    2048 tokens per sequence. A resumed run packs its window again."""

    epochs: PositiveInt | None = None
    """Passes over each source, after which the run ends with its final checkpoint. `training.steps` can be left out then.
    Default: sources start over until `training.steps` is reached."""

    weight_by: Literal["source", "size"] = "source"
    """Meaning of `weight`. `source`: the source's share of the documents drawn. `size`: a factor of the source's number of
    documents, so that with weights of 1 every document is visited equally often; compressed files are read once to count
    them."""

    packing: Literal["auto", "contiguous", "best_fit"] = "auto"
    """How documents fill sequences. `contiguous`: end to end, cut every `training.seq_len` tokens, without padding. `best_fit`:
    whole documents, combined with little padding. `auto`: `best_fit` if a source holds conversations, otherwise
    `contiguous`."""

    long_documents: Literal["cut", "split"] = "cut"
    """Treatment of documents longer than `training.seq_len` tokens in `best_fit`. `cut`: keep the beginning. `split`: keep
    everything, in parts that do not attend to each other. The log counts such documents."""

    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of a conversation that the loss counts: the assistant's turns, each with the token that ends it, or all."""

    on_bad_record: Literal["stop", "skip"] = "stop"
    """Reaction to a record that cannot be used: broken JSON, a missing field, invalid UTF-8, an error in the chat
    template. `stop`: the run ends after a checkpoint. `skip`: it is left out, counted and named."""

    max_bad_fraction: Fraction = 0.01
    """Fraction of a source's records that may be bad with `on_bad_record = "skip"`. The run ends with exit code 1 after a
    checkpoint once more are, and more than 10 in each pass. A file that is damaged or cannot be read always ends the run."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the documents held out from training. `validation` without sources uses it. Copies of a document are held out
    with it."""

    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Threads that read and tokenise ahead of the training loop, or 0. The order of the data does not depend on it."""
