"""The tables that say what is trained, on what, and how far. The engine's is in `tables_engine.py`.

Each key's docstring says meaning, unit, legal range and cost; the type and the range are checked on load.
Paths are relative to the working directory.
"""

from typing import Annotated, Literal

from pydantic import Field

from torchround.config.key_types import MAX_INT, Legal, Many, Pair, Table

PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
RunName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"),
    Legal(
        "a string of letters, digits, '.', '_' and '-' that begins with a letter or digit, at most 128 of them"
    ),
]
ProjectName = Annotated[
    str,
    Field(pattern=r"^[^/\\#?%:\x00-\x1f]{1,128}$"),
    Legal("a string of 1 to 128 characters, none of them a control character or one of / \\ # ? % :"),
]


class RunTable(Table):
    """Where the run leaves its files, and the seed of everything random."""

    name: RunName = "run"
    """Name of the run: its files are in `<folder>/<name>/`, and a run that finds checkpoints there resumes.
    When left out, it is the name of the TOML file without `.toml`."""

    folder: Name = "outputs"
    """Folder that holds all runs. Free space for `checkpoint.keep_latest_k` + 1 checkpoints is needed."""

    seed: NonNegativeInt = 0
    """Seed of weight initialisation, data order and dropout. The same seed gives bitwise equal losses."""


class ModelTable(Table):
    """Which model: a family, and in it either a named size or a Hugging Face folder."""

    family: Name
    """Model family, a package of `torchround/models/` (for example `llama3`). Required."""

    flavor: Name | None = None
    """Named size of the family (for example `debug` or `3.1-8B`), initialised at random. Either this or `hf_path`."""

    hf_path: Name | None = None
    """Local folder with `config.json` in Hugging Face format, which then gives the shapes; also the default
    of `tokenizer.path`. Either this or `flavor`."""


class TokenizerTable(Table):
    """How text becomes tokens. When left out, the tokenizer in `model.hf_path` is used."""

    path: Name | None = None
    """Tokenizer file (a byte-level BPE tokenizer.json, or Llama 3's tokenizer.model), or a folder that holds
    one. Either this or `name`; neither: `model.hf_path`."""

    name: Literal["bytes"] | None = None
    """Built-in tokenizer. `bytes`: one token per UTF-8 byte plus special ones; needs no file."""

    chat_template: Name | None = None
    """File with the Jinja template that conversations are written with. When left out, the one beside the
    tokenizer: `chat_template.jinja`, or the one in `tokenizer_config.json`. Only read for conversations."""


class SourceTable(Table):
    """One source of documents, an element of `data.sources` or `validation.sources`."""

    path: Name
    """A file, a glob (`corpus/**/*.jsonl`), or `python-stdlib`: the source files of the running Python's
    standard library, real text that every machine has. For `format = "dataset"`, a folder or a name that the
    package datasets loads. Required."""

    format: Literal["auto", "text", "jsonl", "parquet", "dataset"] = "auto"
    """`text`: one document per file. `jsonl`: one JSON object per line, compressed where the name ends in `.gz` or
    `.zst`. `parquet`: one document per row. `dataset`: through the package datasets. `auto`: by the ending of
    each file's name (`.jsonl`, `.jsonl.gz`, `.jsonl.zst`, `.parquet`), otherwise `text`."""

    content: Literal["text", "messages", "alpaca", "tokens"] = "text"
    """What a record holds. `text`: a string. `messages`: a conversation, as a list of `{role, content}` or of
    `{from, value}` (ShareGPT), with `tools` beside it. `alpaca`: `instruction`, `input` and `output`. `tokens`: a
    list of token ids, used as they are. Files of text only hold `text`."""

    field: Name | None = None
    """Field of each record that holds the content. When left out: `text`, `messages` (or `conversations`) or
    `tokens`. Not used by `alpaca`."""

    weight: PositiveFloat = 1.0
    """Share of documents drawn from this source, relative to the other sources' weights. Above 0."""

    split: Name = "train"
    """Split of a dataset. Only read for `dataset`."""

    subset: Name | None = None
    """Named configuration of a dataset that has several. Only read for `dataset`."""


class DataTable(Table):
    """What is trained on. Documents are packed to `training.seq_len`; attention stays inside documents."""

    sources: Annotated[Many[SourceTable], Field(min_length=1)]
    """Array of sources, each `{path, format, content, field, weight, split, subset}`. At least one. Required."""

    shuffle: bool = True
    """Visit the documents in a new random order each epoch, fixed by `run.seed`. `false`: as listed. Compressed
    files, parquet files and datasets are shuffled by parts, and in each part by blocks of up to 8192 records."""

    epochs: PositiveInt | None = None
    """Passes over each source, after which the run ends with its final checkpoint. When left out, sources start
    over until `training.steps` is reached. At least 1."""

    weight_by: Literal["source", "size"] = "source"
    """What `weight` is a share of. `source`: of the documents drawn. `size`: of the source's own number of
    documents, so that with weights of 1 every document is visited equally often; compressed files are read
    through once at the start to count them."""

    packing: Literal["auto", "contiguous", "best_fit"] = "auto"
    """`contiguous`: documents end to end, cut every `training.seq_len` tokens, no padding. `best_fit`: whole
    documents, put together so that little padding is left. `auto`: `best_fit` where a source holds conversations,
    otherwise `contiguous`."""

    long_documents: Literal["cut", "skip", "split"] = "cut"
    """What `best_fit` does with documents of more than `training.seq_len` tokens. `cut`: keeps the beginning.
    `skip`: leaves them out. `split`: keeps all of it, in parts that do not see each other. They are counted."""

    loss_on: Literal["assistant", "all"] = "assistant"
    """What is learnt of a conversation: the assistant's turns with the token that ends each, or all of it."""

    on_bad_record: Literal["stop", "skip"] = "stop"
    """What a record that cannot be used (broken JSON, a missing field, invalid UTF-8, a truncated archive, an error
    in the chat template) does: `stop` ends the run after a checkpoint, `skip` leaves it out, counts it, and warns
    with file and line."""

    on_changed_files: Literal["stop", "go_on"] = "stop"
    """What a run does that is resumed on files of another size or number. `stop`: nothing, exit code 2. `go_on`: it
    goes on at the same document numbers, as after a bad record was repaired in place; it is needed once. Where
    documents were added or taken out, the rest of the epoch has another order: a warning tells how many may come
    again or be left out."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the documents that is never trained on, at least 0 and below 1; `validation` without sources uses
    it. A document's own content decides, so that copies of it are held out too."""

    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Threads that read and tokenise ahead of the training loop, 0 to 256; 0 does it in the loop itself. The order
    of the data does not depend on it."""


class TrainingTable(Table):
    """How long, in which batches and in which number format."""

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run, resumed parts included. At least 1."""

    seq_len: PositiveInt = 2048
    """Tokens per packed sequence. At least 1. Activation memory grows linearly with it, attention time
    quadratically."""

    global_batch_size: PositiveInt = 8
    """Sequences per optimizer step. At least `micro_batch_size`. Step time grows linearly with it."""

    micro_batch_size: PositiveInt = 1
    """Sequences that a stage runs at once, at most; the batch is cut into
    `ceil(global_batch_size / micro_batch_size)` micro-batches, the first ones longer by one where it does not
    divide evenly. Device memory for activations grows linearly with it; fewer micro-batches make larger
    bubbles."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Number format of the weights that devices compute with, and of activations. The optimizer always keeps
    float32 weights. `float32` doubles device memory, boundary activations and transfers. `float16`, for GPUs
    without bfloat16, scales the loss: by 65536 at first, half of that after each gradient that is not finite
    (whose update is skipped), twice that after 2000 good steps."""

    max_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 switches clipping off (the norm
    is still measured)."""

    on_spike: Literal["off", "skip", "stop"] = "off"
    """What a step does whose loss or gradient norm is far above those of the steps before it. `skip`: its update is
    left out. `stop`: left out, and the run ends with exit code 1 after a checkpoint. Updates with a loss or a gradient
    that is not finite are always left out. See docs/faults.md."""

    spike_factor: PositiveFloat = 10.0
    """Far above: more than this many median absolute deviations above the median of the last `spike_window` good
    steps. A deviation counts as at least 1 % of the median. Above 0."""

    spike_window: Annotated[int, Field(ge=10, le=1000)] = 100
    """Good steps that a spike is measured by, 10 to 1000. Nothing is a spike before there were as many."""

    max_skipped_steps: PositiveInt = 10
    """Bad steps in a row (spikes, or a loss or gradient that is not finite; not what `float16` overflows in while its
    loss scale can still fall) after which the run ends with exit code 1, a diagnosis, and a checkpoint. At least 1."""


class OptimizerTable(Table):
    """AdamW, run on the host in float32. Weight decay only on matrices: no norm, bias or sink."""

    lr: PositiveFloat = 3e-4
    """Peak learning rate, reached after `lr_schedule.warmup_steps`. Above 0."""

    betas: Pair[Beta] = (0.9, 0.95)
    """Decay of the first and of the second moment, each at least 0 and below 1."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment. Above 0."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, as a factor of the learning rate per step. At least 0."""


class LRScheduleTable(Table):
    """How the learning rate moves: a linear warm-up, then a decay to the floor at the last step."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to `optimizer.lr`. At least 0, below
    `training.steps`."""

    decay: Literal["none", "linear", "cosine", "wsd"] = "cosine"
    """Shape after the warm-up. `none`: constant. `wsd` (warm-up, stable, decay): constant, then linear over
    the last fifth of the steps after the warm-up."""

    min_lr_factor: Fraction = 0.1
    """Floor that the decay ends at, as a fraction of `optimizer.lr`, 0 to 1. Not used by `none`."""


class CheckpointTable(Table):
    """When the run is saved, how much is kept, and where it starts from. A run always saves at its end."""

    interval_steps: NonNegativeInt = 500
    """Steps between checkpoints; 0 saves only at the end and on a signal. A checkpoint is 12 bytes per trained
    parameter on disk (async: 14), and 2 or 4 per frozen one that `lora.map_base` does not leave in its files. It is
    written beside training, which waits only where a step is shorter than the writing."""

    keep_latest_k: NonNegativeInt = 2
    """Complete checkpoints that are kept, the newest ones; 0 keeps all."""

    keep_every_n_steps: NonNegativeInt = 0
    """Checkpoints of steps that this divides are kept for ever, besides the newest ones; 0 keeps none for their step.
    A multiple of `interval_steps`, or few of its multiples will ever be saved."""

    export: Literal["off", "weights", "adapters"] = "off"
    """What a complete run leaves in `export/step-N` of its folder, in Hugging Face format. `weights`: the model, with
    adapters merged, as `transformers` loads it. `adapters`: those alone, as PEFT loads them. Any checkpoint is exported by
    `scripts/export_hf.py`."""

    load_path: Name | None = None
    """Folder of a checkpoint to start from when the run's own folder holds none. When left out, weights are
    initialised from `run.seed`."""

    load: Literal["all", "weights"] = "all"
    """What of `load_path` is used. `all`: the run goes on from there, in the same data. `weights`: a new stage, which
    begins at step 0 with those weights, a fresh optimizer and any data, as fine-tuning after pre-training does."""


class ValidationTable(Table):
    """Loss on text that is not trained on, measured forward only."""

    interval_steps: NonNegativeInt = 0
    """Steps between validations; 0 switches validation off."""

    sources: Many[SourceTable] = ()
    """Array of sources as in `data.sources`. When empty, the share `data.validation_fraction` of those is used;
    one of the two is required when `interval_steps` is above 0."""

    max_batches: PositiveInt = 10
    """Global batches per validation, at least 1. Each costs about a third of a training step."""


class LoraTable(Table):
    """Low-rank adapters on frozen weights. Frozen weights have no gradient and no optimizer state."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all weights. Usual: 8 to 64. Memory grows linearly with it."""

    alpha: PositiveFloat = 16.0
    """The adapter's output is scaled by `alpha / rank`. Above 0."""

    dropout: Beta = 0.0
    """Probability that an input of the adapter is zeroed in training, at least 0 and below 1."""

    targets: Annotated[Many[Name], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the linear maps in each block that get an adapter, as Hugging Face names them: `q_proj`, `k_proj`,
    `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`, for `gpt_oss` `gate_up_proj` in place of two; in models
    with experts every expert gets its own. At least one."""

    path: Name | None = None
    """Folder with adapters in PEFT's format that a new run starts from, of the same rank and alpha. Needs
    `model.hf_path`. When left out, adapters begin without effect."""

    map_base: bool = False
    """Frozen weights stay in the files of `model.hf_path` and are read as they are used: a run starts at once, its base
    takes no host memory of its own and is not part of checkpoints. Weights that the files hold in another format than
    `training.dtype` (MXFP4 too) are copied as ever. Uploads come from memory that is not page-locked, which makes them
    slower, and from disk where the base is larger than free memory. The files must stay as they are."""


class MetricsTable(Table):
    """What is reported, how often, and where. Losses are also in `metrics.jsonl` in the run's folder."""

    log_every_steps: PositiveInt = 1
    """Steps between lines on the console and in `metrics.jsonl`. At least 1."""

    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases. `offline` writes a local run that can be sent later with `wandb sync`. A failure of the
    logger never stops training."""

    wandb_project: ProjectName = "torchround"
    """Project that the run is filed under. Only read when `wandb` is not `off`."""


class TraceTable(Table):
    """Timelines for finding out where time and memory go."""

    steps: Many[PositiveInt] = ()
    """Steps (counted from 1) whose tasks and copies are written to `trace/` in the run's folder. Empty: none. One
    after the last step is a warning."""

    memory: bool = False
    """Also write a snapshot of device memory for each traced step."""
