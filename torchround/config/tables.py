"""`Config`, a whole run, and its tables: one for each component, which takes its own and never the whole.

Each key's docstring says its meaning, unit and cost. Paths are relative to the working directory.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from torchround.config.key_types import (
    UNSET,
    Beta,
    Many,
    ModulePattern,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Table,
)
from torchround.config.optimizer_tables import AdamWTable, ChosenOptimizer
from torchround.planning.update_modes import ModeName

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
ProjectName = Annotated[str, Field(pattern=r"^[^/\\#?%:\x00-\x1f]{1,128}$")]

# Far above any model: it keeps a slip of the keyboard from becoming a plan of a week.
Size = Annotated[int, Field(ge=1, le=2**24)]


class RunTable(Table):
    """The folder of the run's files, and the seed of everything random."""

    name: RunName = "run"
    """Name of the run, whose files are in `<folder>/<name>/` and resume it. Default: the TOML file's name without `.toml`."""

    folder: Name = "outputs"
    """Folder that holds all runs. It needs free space for `checkpoint.keep_latest_k` + 1 checkpoints."""

    seed: NonNegativeInt = 0
    """Seed of weight initialisation, data order and dropout. On GPUs equal losses also need `training.deterministic`."""


class ShapeTable(Table):
    """Sizes of a model of one's own, which begins at random. With `model.flavor` they replace the flavor's. Alone they need
    `num_layers`, `hidden_size`, `num_heads` and `ffn_size`. A run cannot be resumed with another shape."""

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
    """Rows of the embedding, a multiple of 128 is fast. Default: the flavor's, but at least the tokenizer's tokens."""

    max_positions: PositiveInt | None = None
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
    """Family, a module of `models/` such as `llama3`, or `transformers`: its decoder in the folder `hf_path`. `auto`, the default
    with `hf_path`: the first of all these that reads the folder. Required without `hf_path`."""

    module: Name | None = None
    """Python module of your own that adds families: `FAMILIES`, a sequence of them (docs/models.md)."""

    flavor: Name | None = None
    """Named size of the family (for example `debug` or `3.1-8B`), initialised at random. Not used with `hf_path`."""

    shape: ShapeTable | None = None
    """Sizes of one's own, `[model.shape]`, initialised at random, in place of a flavor or of its sizes."""

    hf_path: Name | None = None
    """Local folder in Hugging Face format with `config.json`, safetensors files and usually the tokenizer."""

    @model_validator(mode="before")
    @classmethod
    def _find_family(cls, data: Any) -> Any:
        finds = isinstance(data, dict) and data.get("hf_path", UNSET) != UNSET
        return {"family": "auto", **data} if finds else data


class TokenizerTable(Table):
    """The tokenizer. Default: the one in `model.hf_path`."""

    path: Name | None = None
    """Tokenizer file (a tokenizer.json: a BPE of bytes, or SentencePiece's kind), or a folder that holds one. Default: `model.hf_path`."""

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
    """Whether names of special tokens in text (`<|im_start|>`) are tokens, as in conversations that a template has written."""

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

    packing: Literal["auto", "contiguous", "best_fit"] = "auto"
    """`contiguous`: documents end to end, cut every `training.seq_len` tokens. `best_fit`: whole documents, combined with
    little padding. `auto`: `best_fit` if a source holds conversations, otherwise `contiguous`."""

    long_documents: Literal["cut", "split"] = "cut"
    """Documents longer than a sequence in `best_fit`. `cut`: keep the beginning. `split`: keep all, in parts of their own."""

    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of a conversation that the loss counts: the assistant's turns, each with the token that ends it, or all."""

    on_bad_record: Literal["stop", "skip"] = "stop"
    """Reaction to a record that cannot be used. `stop`: the run ends after a checkpoint. `skip`: it is left out and named, until
    more than 1 % of a source's records are bad and more than 10 in each pass. A damaged file always ends the run."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the documents, with all their copies, held out from training for `validation` without sources."""

    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Threads that read and tokenise ahead of the training loop, or 0. The order of the data does not depend on it."""


class TrainingTable(Table):
    """The length of the run, its batches, its number format, and its reaction to bad steps."""

    steps: PositiveInt | None = None
    """Optimizer steps of the whole run, resumed parts included. Default: those of `data.epochs`, counted first, or 1000."""

    seq_len: PositiveInt = 2048
    """Tokens per packed sequence. Activation memory grows linearly with it, attention time quadratically."""

    global_batch_size: PositiveInt = 8
    """Sequences per optimizer step. Step time grows linearly with it."""

    micro_batch_size: PositiveInt = 1
    """Most sequences that a stage runs at once: a step has `ceil(global_batch_size / micro_batch_size)` micro-batches. Memory
    for activations grows linearly with it. Fewer micro-batches make larger pipeline bubbles."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Number format of activations, of gradients, and of the weights that devices compute with; the optimizer has float32.
    `float32` doubles device memory and transfers. `float16`, for GPUs without bfloat16, scales the loss."""

    fp16_accumulation: bool = False
    """Whether matrix products of `float16` add up in float16: up to twice as fast on GeForce cards, but less accurate."""

    deterministic: bool = False
    """Whether GPUs add up in a fixed order, for the same bits on cards of one kind. It slows attention's backward."""

    max_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0: no clipping. With Muon: of AdamW's part."""

    clip: Literal["global", "layer"] = "global"
    """`max_norm` bounds the norm of the whole gradient, or of each layer's, times the root of its share of the parameters."""

    on_spike: Literal["off", "skip", "stop"] = "off"
    """Reaction to a loss or gradient norm (in `bounded` the loss alone) of more than 10 median absolute deviations above the
    median of the last 100 good steps. `skip`: no update. `stop`: also, the run ends with exit code 1 after a checkpoint.
    Updates that are not finite are always left out."""

    max_skipped_steps: PositiveInt = 10
    """Bad steps in a row (spikes, or not finite) after which the run ends with exit code 1, a diagnosis and a checkpoint."""

    @property
    def num_steps(self) -> int:
        assert self.steps is not None, "the steps of data.epochs have not been counted yet (`train_model.py`)"
        return self.steps


class LRScheduleTable(Table):
    """The course of the learning rate: a linear warm-up, then a decay that reaches its floor at the last step."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to `optimizer.lr`, at least 0 and below `training.steps`."""

    decay: Literal["none", "linear", "cosine", "wsd"] = "cosine"
    """Shape after the warm-up. `none`: constant. `wsd` (warm-up, stable, decay): constant, then linear over the last fifth."""

    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the decay, as a fraction of `optimizer.lr`. Not used by `none`."""


class CheckpointTable(Table):
    """Times of saving, the checkpoints that are kept, and the start of a run. A run always saves at its end."""

    interval_steps: NonNegativeInt = 500
    """Steps between checkpoints; 0 saves only at the end and on a signal. With AdamW a checkpoint takes 12 bytes of disk per
    trained parameter, 6.03 with `optimizer.state = "compact"` (docs/checkpoints.md). Training continues during a save."""

    keep_latest_k: NonNegativeInt = 2
    """Number of newest checkpoints that are kept; 0 keeps all."""

    keep_every_n_steps: NonNegativeInt = 0
    """Checkpoints whose step this number divides are kept for ever; 0 keeps no others."""

    export: Literal["off", "weights", "adapters"] = "off"
    """Export of a complete run to the folder `export` of its own, in Hugging Face format, or of its `adapters` for PEFT."""

    load_path: Name | None = None
    """Folder of a checkpoint to start from if the run's own folder holds none. Default: fresh weights from `run.seed`."""

    load: Literal["all", "weights"] = "all"
    """`all`: the run continues from the step of `load_path`, in the same data. `weights`: a new run with its weights alone."""


class MachinesTable(Table):
    """Several machines, each with its own devices, that train one model together. `torchrun` starts one process on each."""

    timeout_s: PositiveFloat = 60.0
    """Seconds without a sign of life from a machine after which all others end with a message that names it."""

    share_host: bool = False
    """Whether several processes may run on one host, each as a machine with a share of it, for tests."""

    planned: PositiveInt = 1
    """Machines that `--dry-run` and `torchround plan` plan for. A run counts its own."""

    card: Name | None = None
    """Card of each planned machine, such as `"rtx4090"` (docs/planning.md). Default: this machine."""

    num_cards: PositiveInt | None = None
    """Cards of each planned machine, unless `engine.num_devices` says how many a run uses. Default: 1."""

    host_memory_gib: PositiveFloat | None = None
    """Host memory of each planned machine, in GiB, of which a plan uses at most 95 %. Default: no limit."""

    gbit_per_s: PositiveFloat | None = None
    """Rate of the network between two planned machines, in Gb/s each way. Default: bytes alone are counted."""


class ValidationTable(Table):
    """The loss on held-out text, measured with forward passes only."""

    interval_steps: NonNegativeInt = 0
    """Steps between validations; 0 switches validation off. A run that ends by itself also validates its last step."""

    sources: Many[SourceTable] = ()
    """Array of sources as in `data.sources`. If it is empty, `data.validation_fraction` gives the documents."""

    max_batches: PositiveInt = 10
    """Global batches per validation. Each takes about a third of a training step."""

    keep_best: bool = False
    """Save a checkpoint after each validation whose loss is the lowest so far, keep it, and export it."""

    patience: NonNegativeInt = 0
    """Validations in a row without a lower loss after which the run ends with exit code 0. 0 never ends it early."""

    prompts: Many[Name] = ()
    """Texts, or with conversations user's messages, that each validation continues. Each token takes a forward pass."""

    prompt_tokens: PositiveInt = 64
    """Most tokens of a continuation. A token that ends a document or a turn ends it earlier."""


class LoraTable(Table):
    """Low-rank adapters (LoRA) on frozen weights. Frozen weights have no gradient and no optimizer state."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all weights. Usual ranks are 8 to 64. Memory grows linearly with it."""

    alpha: PositiveFloat = 16.0
    """Scale of the adapters: their output is multiplied by `alpha / rank`."""

    rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (rank-stabilised LoRA), so that high ranks learn as fast as low ones."""

    dora: bool = False
    """Learn the length of each output's weights beside their direction (DoRA). Linear layers alone, not experts. A block
    then keeps the output of each adapted layer a second time, and `dropout` above 0 multiplies its weights twice."""

    rank_pattern: dict[ModulePattern, PositiveInt] = Field(default={})
    """Other ranks: `{ "down_proj" = 32, "layers\\.[01]\\.self_attn\\.q_proj" = 4 }`. A key is a module's name in Hugging Face
    form, or its end behind a dot, as a regular expression; the first that matches decides, as in PEFT."""

    alpha_pattern: dict[ModulePattern, PositiveFloat] = Field(default={})
    """Other values of `alpha`, by the same keys as `rank_pattern`."""

    dropout: Beta = 0.0
    """Probability that training zeroes an input of the adapter."""

    targets: Annotated[Many[Name], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear maps of each block that get an adapter: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`,
    `down_proj`; experts that are one tensor have `gate_up_proj` in place of two. Every expert gets its own. More of a name
    chooses among modules of the same name: `experts.down_proj`."""

    path: Name | None = None
    """Folder with adapters in PEFT's format that a new run starts from; `rank` and the keys after it as they have them."""

    base: Literal["bf16", "nf4", "fp8", "mxfp4", "auto"] = "bf16"
    """Format of the blocks' frozen matrices in host memory and on the link: `bf16` is `training.dtype`; `nf4` takes 0.28 of
    its bytes, `mxfp4` 0.27, `fp8` 0.52. `auto` keeps the format of the release: MXFP4 of GPT-OSS, FP8 of DeepSeek.
    Checkpoints do not hold packed weights; a resumed run packs them again (docs/packed_weights.md)."""

    base_cache: Name | None = None
    """Folder that keeps packed weights, so that the next start reads or maps them with their checksums. It may serve several
    runs on one base."""

    map_base: bool = False
    """Read frozen weights from the files of `model.hf_path` when they are used: they take no host memory and no room in
    checkpoints, and the files must not change. Packed ones are read from `base_cache`. Weights in another format than
    `training.dtype` are still copied."""

    experts_by_need: bool | Literal["auto"] = "auto"
    """Upload only the packed experts that tokens are routed to, once the routing is known: the upload is not hidden behind
    other work. `auto`: in passes of few tokens, such as continuations, if layers are not compiled. `true` needs
    packed experts and `engine.compile = false`."""


class MetricsTable(Table):
    """Reports: how often and where to. Losses are always written to `metrics.jsonl` in the run's folder."""

    log_every_steps: PositiveInt = 1
    """Steps between lines on the console and in `metrics.jsonl`, each the mean over them. The last step has a line too."""

    wandb: Literal["off", "online", "offline"] = "off"
    """Logging to Weights & Biases. `offline` writes a local run for `wandb sync`. Its failures stop no run."""

    wandb_project: ProjectName = "torchround"
    """Weights & Biases project of the run. Environment variables such as `WANDB_ENTITY` set the rest."""

    module: Name | None = None
    """Python module of your own that reports the run elsewhere: `make_writer(folder, config)` (docs/metrics.md)."""


class TraceTable(Table):
    """Timelines of chosen steps, which show how time and memory are spent."""

    steps: Many[PositiveInt] = ()
    """Steps, counted from 1, to write to `trace/` in the run's folder. Steps in a row share a file. One too late is a warning."""

    profiler: bool = False
    """Also write what `torch.profiler` records: operators, kernels, copies, allocations. It slows the steps."""


KeptPart = Literal["qkv", "attention", "output", "gate_up", "down"]


class PlanTable(Table):
    """A partition by hand: the layers of each stage. Either way they add up to the model's, embedding and head included."""

    forward: Many[PositiveInt]
    """Layers of each forward stage, from the first layer on. Required, but may be empty."""

    fused: PositiveInt
    """Layers of the fused stage: the last layers, which run forward and backward in one pass. Required."""

    backward: Many[PositiveInt]
    """Layers of each further backward stage, from the deepest down to the first layer. Required, but may be empty."""

    rounds: PositiveInt | None = None
    """Rounds of a step, at most the number of micro-batches. Default: `engine.rounds`."""


class EngineTable(Table):
    """Devices, update rule, memory, number formats and the plan. Weights and optimizer state stay in host memory."""

    devices: str = "auto"
    """Kind of device. `cpu`: virtual devices, each a thread with its own memory limit. A kind of accelerator, by PyTorch's
    name: `cuda` (NVIDIA and AMD), `xpu` (Intel), `npu` (Huawei Ascend). `auto`: the machine's accelerators, otherwise `cpu`."""

    num_devices: PositiveInt | None = None
    """Devices to use; more than the GPUs share them. Default: all GPUs; for `cpu` `cpu_threads`, otherwise up to 8."""

    device_memory_gib: PositiveFloat | None = None
    """Memory that a device may use, in GiB (2^30 bytes). Less makes smaller stages and larger bubbles. Default: a share of the
    memory that is free on the GPU, or an equal share of host memory for `cpu`."""

    host_memory_gib: PositiveFloat | None = None
    """Host memory that the run may use in all, in GiB, virtual devices included. Default: 95 % of what is free."""

    update: ModeName = "sync"
    """Age of the weights that step t computes with (docs/staleness.md). `sync`: after t updates. `async`: after t - 1, so that
    steps overlap. `bounded`: after t - 1 in the forward of the first `stale_layers` layers, otherwise after t; it needs
    `training.clip = "layer"` or `training.max_norm = 0`, one round, another dtype than float16 and another optimizer than Muon.
    `async` and `bounded` take 2 bytes more host memory per trained parameter."""

    stale_layers: NonNegativeInt | Literal["auto"] = "auto"
    """First layers whose forward uses older weights in `bounded`. `auto`: the fewest with which steps are not longer, chosen
    at a run's first start. Losses depend on it."""

    delay_correction: Literal["auto", "none", "predict"] = "auto"
    """`predict`: devices compute in `async` with weights one update ahead along the last one (AdamW's moments), 2 bytes of host
    memory per trained parameter in bfloat16 (docs/optimizers.md). `auto`: `predict` with AdamW, `none` with Muon."""

    rounds: PositiveInt | Literal["auto"] | None = None
    """Parts of a step's micro-batches that pass through all stages one after the other. More rounds keep fewer boundary
    activations in host memory, but each uploads all weights again, and above 1 the host adds gradients in float32 (4 bytes more
    per trained parameter), which changes the last bits of a loss. `auto`: as planned at the first start. Default: 1."""

    recompute: Literal["stage", "layer"] = "stage"
    """Activations that a backward stage keeps at once. `layer`: of one layer, for one more forward pass of the stage."""

    keep_activations: Literal["auto", "none", "attention", "half", "all"] | Many[KeptPart] = "auto"
    """Results that forward stages keep in host memory for backward stages; losses do not depend on it. `all`: all parts of
    every block. `half`: of every other block. An array of parts, or `attention`: these of every block. Parts: `qkv`,
    `attention` (its kernel), `output` (the product after it), `gate_up`, `down`. A compiled layer keeps all or nothing. `auto`:
    what shortens steps by more than 1 % and fits; nothing on virtual devices and on a card of unknown speed."""

    accumulate_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which a device adds up the gradients of a round. `bfloat16` takes half, but loses small parts."""

    plan: PlanTable | Name | None = None
    """Partition in place of the planner's: the path of a `plan.json`, or `{forward = [2, 2], fused = 2, backward = [2, 2]}`."""

    measure_steps: NonNegativeInt = 3
    """Steps at the start of a run that measure every layer's time for a second plan, which is written to `plan.json` and kept
    when the run resumes. 0: plan from FLOPs and bytes alone. Losses do not depend on it."""

    hang_timeout_s: PositiveFloat = 300.0
    """Seconds without progress of a worker that stop the run, with a report. Longer than a stage takes for one micro-batch."""

    compile: bool | Literal["auto"] = "auto"
    """Code that is compiled (docs/engine.md). `true`: the host's optimizer update and the layers. `auto`: the layers on `cuda`
    if the device has room, and the update from 2^21 trained parameters on. Losses of compiled layers differ in the
    last bits. Needs a C++ compiler (`CXX`) and, on GPUs, Triton with a C compiler (`CC`) and Python's headers. Code that cannot
    be compiled runs uncompiled, with one warning; layers with buffers do without one. Too little memory for it is an error."""

    compile_options: dict[str, bool | int | float | str] | None = None
    """Options of Inductor for the layers, passed on as `options` of `torch.compile`. `{ "triton.cudagraphs" = true }` captures the
    launches of a layer as a CUDA graph; it has not been tried on a card yet. Options may change losses."""

    cpu_threads: PositiveInt | None = None
    """Threads inside one operation of the host; a virtual device always has one. Default: PyTorch's choice."""


class Config(Table):
    """The configuration of a run. `load_config` also checks what tables demand of each other; the constructor does not."""

    run: RunTable = Field(default_factory=RunTable)
    model: ModelTable
    tokenizer: TokenizerTable = Field(default_factory=TokenizerTable)
    data: DataTable
    training: TrainingTable = Field(default_factory=TrainingTable)
    engine: EngineTable = Field(default_factory=EngineTable)
    optimizer: ChosenOptimizer = Field(default_factory=AdamWTable)
    lr_schedule: LRScheduleTable = Field(default_factory=LRScheduleTable)
    checkpoint: CheckpointTable = Field(default_factory=CheckpointTable)
    validation: ValidationTable = Field(default_factory=ValidationTable)
    lora: LoraTable = Field(default_factory=LoraTable)
    metrics: MetricsTable = Field(default_factory=MetricsTable)
    trace: TraceTable = Field(default_factory=TraceTable)
    machines: MachinesTable = Field(default_factory=MachinesTable)

    def with_steps(self, steps: int) -> "Config":
        training = self.training.model_copy(update={"steps": steps})
        return self.model_copy(update={"training": training})

    @property
    def num_micro_batches(self) -> int:
        return -(-self.training.global_batch_size // self.training.micro_batch_size)
