"""`Config`, a whole run: one attribute per TOML table. A component takes its own table, never the whole.

The engine's table is here too; the others are in `tables.py` and `data_tables.py`.
"""

from typing import Literal

from pydantic import Field

from torchround.config.data_tables import DataTable, TokenizerTable
from torchround.config.key_types import (
    Fraction,
    Many,
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Table,
)
from torchround.config.optimizer_tables import AdamWTable, ChosenOptimizer
from torchround.config.tables import (
    CheckpointTable,
    LoraTable,
    LRScheduleTable,
    MachinesTable,
    MetricsTable,
    ModelTable,
    RunTable,
    TraceTable,
    TrainingTable,
    ValidationTable,
)

KeptPart = Literal["qkv", "attention", "output", "gate_up", "down"]


class PlanTable(Table):
    """A partition given by hand: how many layers each stage holds, in dispatch order.

    `sum(forward) + fused = sum(backward) + fused` = layers of the model, embedding and head included.
    """

    forward: Many[PositiveInt]
    """Layers of each forward stage, from the first layer on. Required, but may be empty."""

    fused: PositiveInt
    """Layers of the fused stage: the last layers, which run forward and backward in one pass. Required."""

    backward: Many[PositiveInt]
    """Layers of each further backward stage, from the deepest down to the first layer. Required, but may be empty."""

    rounds: PositiveInt | None = None
    """Rounds of a step, at most the number of micro-batches. Default: `engine.rounds`."""

    kept: Many[Many[KeptPart]] | None = None
    """The parts of each layer whose results are kept, which may be none. Default: as `engine.keep_activations` says."""


class EngineTable(Table):
    """Devices, update rule, memory, number formats and the plan. Weights and optimizer state stay in host memory."""

    devices: str = "auto"
    """Kind of device. `cpu`: virtual devices, each a thread with its own memory limit. A kind of accelerator, by PyTorch's
    name: `cuda` (NVIDIA and AMD), `xpu` (Intel), `npu` (Huawei Ascend). `auto`: the machine's accelerators, otherwise `cpu`."""

    num_devices: PositiveInt | None = None
    """Devices to use. If it is more than the number of GPUs, several devices share a GPU. Default: all GPUs. For `cpu` as many
    as `cpu_threads`, or as many as the threads that PyTorch would use, up to 8."""

    device_memory_gib: PositiveFloat | None = None
    """Memory that a device may use, in GiB (2^30 bytes). A lower limit makes smaller stages and larger bubbles. Default: a
    share of the memory that is free on the GPU, or an equal share of host memory for `cpu`."""

    host_memory_gib: PositiveFloat | None = None
    """Host memory that the run may use in all, in GiB: weights, gradients, optimizer state, buffers, and the memory of virtual
    devices. A run that needs more is refused. Default: 95 % of what is free, or of what is left of the container's limit."""

    update: Literal["sync", "async", "bounded"] = "sync"
    """Age of the weights that a step computes with. `sync`: step t uses the weights after t updates. `async`: those after t - 1
    updates, so that steps overlap; it takes 2 bytes more host memory per trained parameter, 4 with `delay_correction`, and the
    delay can hurt pre-training from scratch. `bounded`: each layer is updated once its own gradient is complete. The forward of
    step t uses the weights after t - 1 updates in the first `stale_layers` layers; everything else uses those after t updates.
    Steps overlap as in `async`, with one version of the weights (in bfloat16 2 bytes more than `sync`). It needs `training.clip
    = "layer"` or `training.max_norm = 0`, one round, another `training.dtype` than float16, and another optimizer than Muon."""

    stale_layers: NonNegativeInt | Literal["auto"] = "auto"
    """Layers of `bounded`, from the first one on, whose forward uses weights that are one update older: 0 to the layers before
    the last, embedding included. Losses depend on it, so a run keeps its number when it resumes. Each of these layers keeps its
    input in host memory until its backward. `auto`: the fewest with which steps are not longer, chosen at a run's first
    start."""

    delay_correction: Literal["auto", "none", "predict"] = "auto"
    """Correction of the delay in `async`, which it needs. `auto`: `predict` there (docs/staleness.md), and `none` with
    optimizers that cannot predict (Muon). `predict`: devices compute with weights one update ahead of the newest, along the
    last update (AdamW's moments, no weight decay). In bfloat16 it takes 2 bytes of host memory per trained parameter
    (docs/optimizers.md). Checkpoints, exports and validations use the true weights; a validation writes the device weights
    twice more."""

    rounds: PositiveInt | Literal["auto"] | None = None
    """Number of parts that a step's micro-batches are cut into, 1 to the number of micro-batches. The parts pass through all
    stages one after the other. More rounds keep fewer boundary activations in host memory, but each uploads all weights again.
    Above 1, the host adds the rounds' gradients in float32 (4 bytes more per trained parameter), so the last bits of a loss
    depend on it. `auto`: the planner chooses for this number of devices, and a resumed run keeps its rounds. Default: 1, or the
    plan's."""

    recompute: Literal["stage", "layer"] = "stage"
    """Activations that a backward stage keeps on the device at once, for one micro-batch. `stage`: of all its layers. `layer`:
    of one layer, which takes less device memory and one more forward pass of the stage."""

    keep_activations: Literal["auto", "none", "attention", "half", "all"] | Many[KeptPart] = "auto"
    """Results that forward stages keep in host memory, so that backward stages do not compute them again. Losses do not depend
    on it, to the bit. `none`: recompute everything. `all`: keep all parts of every block. `half`: all parts of every other
    block. `attention`, or an array of parts: these of every block. The parts are `qkv` (the products before attention),
    `attention` (its kernel), `output` (the product after it), `gate_up` and `down` (the products of the MLP or of the experts).
    A compiled layer keeps all parts or nothing. `auto`: what makes steps shorter by more than `slower_for_memory`, as far as
    host memory, device memory and the link allow; nothing on virtual devices and on a card of unknown speed."""

    slower_for_memory: Fraction = 0.01
    """Share of a step by which a plan may be slower than the fastest one if it needs less host memory. `keep_activations =
    "auto"` takes memory only for steps that get shorter by more. 0: the fastest plan within the limits."""

    grad_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of gradients during the download and in host memory. `auto`: `training.dtype`. `float32` takes 2 bytes more
    host memory per trained parameter and doubles the download."""

    accumulate_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which a device adds up the gradients of a round's micro-batches. `bfloat16` halves their device memory,
    but loses small contributions if there are many micro-batches."""

    plan: PlanTable | Name | None = None
    """Partition in place of the planner's: a path to a `plan.json`, or a table `{forward = [2, 2], fused = 2, backward = [2,
    2]}`."""

    measure_steps: NonNegativeInt = 3
    """Steps at the start of a run that measure every layer's time, under the plan from FLOPs and bytes. Then the planner plans
    again and writes `plan.json`, which a resumed run keeps. Losses do not depend on it. 0: plan from FLOPs and bytes alone."""

    hang_timeout_s: PositiveFloat = 300.0
    """Seconds without progress of a worker that stop the run, with a report. Longer than a stage takes for one micro-batch."""

    compile: bool | Literal["auto"] = "auto"
    """Code that is compiled. `true`: the host's optimizer update and the layers. `auto`: the layers on accelerators that
    Inductor writes code for (`cuda`), and the optimizer update from 2^21 trained parameters on. `false`: nothing.

    The compiled update is several times as fast, with the same bits; compiling takes one core about 1 s while the first step
    runs. Layers are compiled during the first step, once for each kind of layer, size of micro-batch and GPU: 10 to 60 s each.
    A compiled layer holds all its gradients of one micro-batch on the device at once. Its losses differ in the last bits from
    uncompiled ones, so a run should keep this setting. Compiled layers are cached in `TORCHINDUCTOR_CACHE_DIR`, the optimizer
    there or in `~/.cache/torchround`. Needs a C++ compiler (`CXX`) and, on GPUs, Triton with a C compiler (`CC`) and Python's
    headers (`python3-dev`). Code that cannot be compiled runs uncompiled, with one warning. With `auto` so do layers that take
    too much device memory while they are compiled, and blocks in micro-batches of more than 8192 tokens."""

    cpu_threads: PositiveInt | None = None
    """Threads that PyTorch uses inside one operation of the host: the optimizer's update, initial weights. Bits do not depend
    on it. A virtual device always computes with one thread. Default: PyTorch's choice."""


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
        """Return M, the micro-batches of one step: `ceil(global_batch_size / micro_batch_size)`."""
        return -(-self.training.global_batch_size // self.training.micro_batch_size)
