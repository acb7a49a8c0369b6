"""The tables of a run: what is trained, for how long, and what is kept of it.

The tables of its data are in `data_tables.py`, the engine's is in `config.py`.

Each key's docstring says its meaning, unit, legal range and cost. Types and ranges are checked when a config loads.
Paths are relative to the working directory.
"""

from typing import Annotated, Literal

from pydantic import Field

from torchround.config.data_tables import SourceTable
from torchround.config.key_types import (
    Beta,
    Fraction,
    Many,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Table,
    matching,
)

RunName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        "up to 128 letters, digits, '.', '_' and '-', of which the first is a letter or digit",
    ),
]
ProjectName = Annotated[
    str,
    matching(
        r"[^/\\#?%:\x00-\x1f]{1,128}", "1 to 128 characters, none a control character or one of / \\ # ? % :"
    ),
]

# Bounds far above any model. They keep a slip of the keyboard from becoming a plan of a week.
Size = Annotated[int, Field(ge=1, le=2**24)]
Positions = Annotated[int, Field(ge=1, le=2**40)]


class RunTable(Table):
    """The folder of the run's files, and the seed of everything random."""

    name: RunName = "run"
    """Name of the run, whose files are in `<folder>/<name>/` and resume it. Default: the TOML file's name without `.toml`."""

    folder: Name = "outputs"
    """Folder that holds all runs. It needs free space for `checkpoint.keep_latest_k` + 1 checkpoints."""

    seed: NonNegativeInt = 0
    """Seed of weight initialisation, data order and dropout. The same seed gives bitwise equal losses on virtual devices, and
    on GPUs with `training.deterministic`."""


class ShapeTable(Table):
    """Sizes of a model of one's own, which begins at random. With `model.flavor` they replace the flavor's. Alone they need
    `num_layers`, `hidden_size`, `num_heads` and `ffn_size`; what else is missing is as in the family's models.

    `config.json` of an export holds them under Hugging Face's names. A run cannot be resumed with another shape.
    """

    num_layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Blocks."""

    hidden_size: Size | None = None
    """Width of the residual stream. Multiples of 64 are fast."""

    num_heads: Size | None = None
    """Heads of attention, a multiple of `num_kv_heads`."""

    num_kv_heads: Size | None = None
    """Heads of keys and values. Default: the flavor's, otherwise `num_heads`."""

    head_dim: Size | None = None
    """Channels of a head, an even number. Default: the flavor's, otherwise `hidden_size / num_heads`."""

    ffn_size: Size | None = None
    """Width of the feed-forward; in a model with experts, of each expert."""

    vocab_size: Size | None = None
    """Rows of the embedding, at least as many as the tokenizer has tokens; a multiple of 128 is fast. Default: the flavor's, or
    as many as the tokenizer has tokens if these are more, or if there is no flavor."""

    max_positions: Positions | None = None
    """Longest sequence that the model is meant for, in tokens. Nothing is allocated for it. Default: the family's."""

    rope_theta: Annotated[float, Field(gt=1)] | None = None
    """Base of the rotary embedding. The scaling of a flavor stays. Default: the family's."""

    norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Epsilon of the norms. Default: the family's."""

    tied_embeddings: bool | None = None
    """Use of the embedding as the head's projection too, which saves its parameters. Default: the flavor's, or false."""

    num_experts: Size | None = None
    """Experts in each block, in families that have them. Default: the flavor's, otherwise a dense feed-forward."""

    num_chosen: Size | None = None
    """Experts that serve a token, 1 to `num_experts`."""

    balance_coefficient: Annotated[float, Field(ge=0)] | None = None
    """Factor of the penalty for an unequal load of the experts. 0: no penalty. Default: the flavor's, otherwise 0.001."""

    window: Size | None = None
    """Tokens that a token sees in blocks with a sliding window, in families that have them. Default: the family's."""


class ModelTable(Table):
    """The model: a family, and one of its named sizes, a shape of one's own, or a Hugging Face folder."""

    family: Name
    """Model family, a package of `models/` (for example `llama3`). Required. `transformers`: a decoder that the package of that
    name defines, from the folder `hf_path`; slower than a family of torchround's own that reads the folder too."""

    module: Name | None = None
    """Python module of your own that adds families: `FAMILIES`, a sequence of them (docs/models.md)."""

    flavor: Name | None = None
    """Named size of the family (for example `debug` or `3.1-8B`), initialised at random. Not used with `hf_path`."""

    shape: ShapeTable | None = None
    """Sizes of one's own, `[model.shape]`, initialised at random, in place of a flavor or of its sizes. Not with `hf_path`."""

    hf_path: Name | None = None
    """Local folder in Hugging Face format. Its `config.json` gives the shapes, its safetensors files the weights; a folder
    without weights is refused. The folder is also the default of `tokenizer.path`. Not used with `flavor` or `shape`."""


class TrainingTable(Table):
    """The length of the run, its batches, its number format, and its reaction to bad steps."""

    steps: PositiveInt | None = None
    """Optimizer steps of the whole run, resumed parts included. At least 1. Default: the steps that `data.epochs` make,
    counted at the start by one reading of the data; 1000 without `data.epochs`."""

    seq_len: PositiveInt = 2048
    """Tokens per packed sequence. Activation memory grows linearly with it, attention time quadratically. More than the model's
    positions (`max_position_embeddings`, RoPE's scaling counted) is a warning."""

    global_batch_size: PositiveInt = 8
    """Sequences per optimizer step, at least `micro_batch_size`. Step time grows linearly with it."""

    micro_batch_size: PositiveInt = 1
    """Most sequences that a stage runs at once. The batch is cut into `ceil(global_batch_size / micro_batch_size)`
    micro-batches. Memory for activations grows linearly with it. Fewer micro-batches make larger pipeline bubbles."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Number format of activations and of the weights that devices compute with. The optimizer updates weights with all bits of
    float32 (docs/optimizers.md). `float32` doubles device memory, boundary activations and transfers. `float16`, for GPUs
    without bfloat16, scales the loss: by 65536 at first, half after each overflow, double after 2000 good steps."""

    fp16_accumulation: bool = False
    """Whether matrix products of `float16` add up in float16 instead of float32: up to twice as fast on GeForce cards, no gain
    on others. Sums lose bits and overflow earlier, which costs skipped updates or accuracy. Needs `dtype = "float16"` and an
    NVIDIA GPU. Throughput that RoundPipe's authors published is of this setting."""

    deterministic: bool = False
    """Whether GPUs add up in a fixed order. Then the same seed gives the same bits on cards of one kind with the same versions
    of all packages. It costs time and device memory in attention's backward (the plan counts the memory), and an operation of a
    borrowed model without such a form is refused at the first step. Virtual devices always have a fixed order."""

    max_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 switches clipping off. With Muon only the
    parameters that AdamW updates count, and only their gradient is scaled."""

    clip: Literal["global", "layer"] = "global"
    """The norm that `max_norm` bounds. `global`: of the whole gradient. `layer`: of each layer's gradient, by `max_norm` times
    the root of its share of the trained parameters. A tied weight counts as a layer of its own."""

    on_spike: Literal["off", "skip", "stop"] = "off"
    """Reaction to a spike: a loss or gradient norm far above those of earlier steps. `skip`: the step's update is left out.
    `stop`: also, the run ends with exit code 1 after a checkpoint. In `engine.update = "bounded"` the loss alone is compared.
    Updates whose loss or gradient is not finite are always left out, in `bounded` layer by layer if the loss is finite."""

    spike_factor: PositiveFloat = 10.0
    """Size of a spike: more than this many median absolute deviations (at least 1 % of the median) above the median of the last
    `spike_window`."""

    spike_window: Annotated[int, Field(ge=10, le=1000)] = 100
    """Number of good steps that a spike is compared with. Before a run has had that many, no step is a spike."""

    max_skipped_steps: PositiveInt = 10
    """Number of bad steps in a row after which the run ends with exit code 1, a diagnosis and a checkpoint. A bad step is a
    spike, or has a loss or gradient that is not finite. A `float16` overflow counts only at the lowest loss scale."""

    @property
    def num_steps(self) -> int:
        """Return `steps`. A run sets it before it builds anything that needs it (`commands/train_model.py`)."""
        assert self.steps is not None, "the steps of data.epochs have not been counted yet"
        return self.steps


class LRScheduleTable(Table):
    """The course of the learning rate: a linear warm-up, then a decay that reaches its floor at the last step."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to `optimizer.lr`, at least 0 and below `training.steps`."""

    decay: Literal["none", "linear", "cosine", "wsd"] = "cosine"
    """Shape after the warm-up. `none`: constant. `wsd` (warm-up, stable, decay): constant, then linear over the last fifth."""

    min_lr_factor: Fraction = 0.1
    """Learning rate at the end of the decay, as a fraction of `optimizer.lr`. Not used by `none`."""


class CheckpointTable(Table):
    """Times of saving, the checkpoints that are kept, and the start of a run. A run always saves at its end."""

    interval_steps: NonNegativeInt = 500
    """Steps between checkpoints; 0 saves only at the end and on a signal. With AdamW a checkpoint takes 12 bytes of disk per
    trained parameter, 6.03 if `optimizer.state` is "compact"; Muon's matrices take 8 and 5.02. 16-bit async adds 2. A frozen
    parameter takes 2 or 4, unless `lora.map_base` leaves it in its own file. Training goes on during a save."""

    keep_latest_k: NonNegativeInt = 2
    """Number of newest complete checkpoints that are kept; 0 keeps all."""

    keep_every_n_steps: NonNegativeInt = 0
    """Checkpoints whose step this number divides are kept for ever, if they are saved at all; 0 keeps no others."""

    export: Literal["off", "weights", "adapters"] = "off"
    """Export of a complete run to the folder `export` of its own, in Hugging Face format. `weights`: the model with merged
    adapters. `adapters`: the adapters alone, as PEFT loads them. `torchround export_hf` exports any checkpoint."""

    load_path: Name | None = None
    """Folder of a checkpoint to start from if the run's own folder holds none. Default: fresh weights from `run.seed`."""

    load: Literal["all", "weights"] = "all"
    """The part of `load_path` that is used. `all`: the run continues from that step, in the same data. `weights`: training
    begins at step 0 with those weights, a fresh optimizer and any data."""


class MachinesTable(Table):
    """Several machines, each with its own devices, that train one model together. `torchrun` starts one process on each."""

    timeout_s: PositiveFloat = 60.0
    """Seconds without a sign of life from a machine after which all others end with a message that names it. A machine that
    computes, saves or compiles gives signs of life. A tensor that has begun to arrive may also take so long for each 8 MiB."""

    connections: Annotated[int, Field(ge=1, le=16)] = 4
    """Connections between each two machines that carry gradients and weights. One connection carries 15 to 19 Gb/s at most."""

    share_host: bool = False
    """Whether several processes may run on one host, each as a machine with a share of it. Slower, and meant for tests."""

    planned: PositiveInt = 1
    """Machines that `--dry-run` and `torchround plan` plan for. A run counts its own."""

    card: Name | None = None
    """Card of each planned machine, such as `"rtx4090"` (docs/planning.md), for dry runs. Default: this machine."""

    num_cards: PositiveInt | None = None
    """Cards of each planned machine, at least 1, unless `engine.num_devices` says how many a run uses. Default: 1."""

    host_memory_gib: PositiveFloat | None = None
    """Host memory of each planned machine, in GiB: 128 with modules of 128 GB. A plan uses at most 95 % of it. Default: no
    limit; then a plan takes the least among the fastest, and keeps nothing for backward stages."""

    gbit_per_s: PositiveFloat | None = None
    """Rate of the network between two machines, in Gb/s each way, for dry runs. Default: plans are made for 10, 25 and 100."""


class ValidationTable(Table):
    """The loss on held-out text, measured with forward passes only."""

    interval_steps: NonNegativeInt = 0
    """Steps between validations; 0 switches validation off. A run that ends by itself also validates its last step."""

    sources: Many[SourceTable] = ()
    """Array of sources as in `data.sources`. If it is empty, validation needs a `data.validation_fraction`."""

    max_batches: PositiveInt = 10
    """Global batches per validation. Each takes about a third of a training step."""

    keep_best: bool = False
    """Save a checkpoint after each validation whose loss is the lowest so far, and keep the best one for ever, besides the ones
    that `[checkpoint]` keeps. `checkpoint.export` then exports it. Needs `interval_steps`."""

    patience: NonNegativeInt = 0
    """Validations in a row without a lower loss after which the run ends, with its final checkpoint and exit code 0. 0 never
    ends it early. A resumed run continues the count. Needs `interval_steps`."""

    prompts: Many[Name] = ()
    """Texts that each validation continues, with the likeliest token each time: `["Once upon a time"]`. If a source of
    `data.sources` holds conversations (`messages` or `alpaca`), each text is a user's message, which the chat template writes.
    The continuations are on the console, in `metrics.jsonl` and on the run's page. Each token takes a forward pass through all
    stages."""

    prompt_tokens: PositiveInt = 64
    """Most tokens of a continuation. A token that ends a document or a turn ends it earlier."""


class LoraTable(Table):
    """Low-rank adapters (LoRA) on frozen weights. Frozen weights have no gradient and no optimizer state."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all weights. Usual ranks are 8 to 64. Memory grows linearly with it."""

    alpha: PositiveFloat = 16.0
    """Scale of the adapters: their output is multiplied by `alpha / rank`."""

    dropout: Beta = 0.0
    """Probability that training zeroes an input of the adapter."""

    targets: Annotated[Many[Name], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear maps of each block that get an adapter, as Hugging Face names them: `q_proj`, `k_proj`, `v_proj`, `o_proj`,
    `gate_proj`, `up_proj`, `down_proj`. `gpt_oss` has `gate_up_proj` in place of `gate_proj` and `up_proj`. Every expert gets
    its own."""

    path: Name | None = None
    """Folder with adapters in PEFT's format that a new run starts from. They must have the same rank and alpha. Needs
    `model.hf_path`. Default: new adapters, which begin without effect."""

    map_base: bool = False
    """Leave frozen weights in the files of `model.hf_path`, which must not change, and read them when they are used. The frozen
    base then takes no host memory and no room in checkpoints. Weights in another format than `training.dtype` (MXFP4 too) are
    still copied. Each accelerator takes 32 MiB of host memory to read ahead. Uploads read the disk if memory is short."""


class MetricsTable(Table):
    """Reports: how often and where to. Losses are always written to `metrics.jsonl` in the run's folder."""

    log_every_steps: PositiveInt = 1
    """Steps between lines on the console and in `metrics.jsonl`, each the mean over them. The last step has a line too."""

    wandb: Literal["off", "online", "offline"] = "off"
    """Logging to Weights & Biases. `offline` writes a local run for `wandb sync`. A failure of the logger never stops
    training."""

    wandb_project: ProjectName = "torchround"
    """Weights & Biases project of the run. Environment variables such as `WANDB_ENTITY` set the rest."""

    module: Name | None = None
    """Python module of your own that reports the run elsewhere: `make_writer(folder, config)` (docs/metrics.md). It is looked
    up where Python looks, and then in the working directory."""


class TraceTable(Table):
    """Timelines of chosen steps, which show how time and memory are spent."""

    steps: Many[PositiveInt] = ()
    """Steps, counted from 1, to write to `trace/` in the run's folder with their neighbours. One too late is a warning."""

    profiler: bool = False
    """Also write what `torch.profiler` records: operators, kernels, copies, allocations. It slows the steps."""
