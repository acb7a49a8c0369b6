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
    """The parts of each layer whose results are kept. Default: as `engine.keep_activations` says."""


class EngineTable(Table):
    """Devices, update rule, memory, number formats and the plan. Weights and optimizer state stay in host memory."""

    devices: str = "auto"
    """Kind of device. `cpu`: virtual devices, each a thread with its own memory limit. A kind of accelerator, by PyTorch's
    name: `cuda` (NVIDIA and AMD), `xpu` (Intel), `npu` (Huawei Ascend). `auto`: the machine's accelerators, otherwise `cpu`."""

    num_devices: PositiveInt | None = None
    """Devices to use; more than the GPUs share them. Default: all GPUs; for `cpu` `cpu_threads`, otherwise PyTorch's threads,
    up to 8."""

    device_memory_gib: PositiveFloat | None = None
    """Memory that a device may use, in GiB (2^30 bytes). Less makes smaller stages and larger bubbles. Default: a share of the
    memory that is free on the GPU, or an equal share of host memory for `cpu`."""

    host_memory_gib: PositiveFloat | None = None
    """Host memory that the run may use in all, in GiB, virtual devices included. Default: 95 % of what is free for the
    process."""

    update: Literal["sync", "async", "bounded"] = "sync"
    """Age of the weights that step t computes with (docs/staleness.md). `sync`: after t updates. `async`: after t - 1, so that
    steps overlap. `bounded`: after t - 1 in the forward of the first `stale_layers` layers, otherwise after t; it needs
    `training.clip = "layer"` or `training.max_norm = 0`, one round, another dtype than float16 and another optimizer than Muon.
    `async` and `bounded` take 2 bytes more host memory per trained parameter."""

    stale_layers: NonNegativeInt | Literal["auto"] = "auto"
    """Layers of `bounded`, from the first one on, whose forward uses older weights. Losses depend on it. `auto`: the fewest
    with which steps are not longer, chosen at a run's first start."""

    delay_correction: Literal["auto", "none", "predict"] = "auto"
    """`predict`: devices compute in `async` with weights one update ahead along the last one (AdamW's moments), 2 bytes of
    host memory per trained parameter in bfloat16 (docs/optimizers.md). `auto`: `predict` where the optimizer can (AdamW, not
    Muon)."""

    rounds: PositiveInt | Literal["auto"] | None = None
    """Parts of a step's micro-batches that pass through all stages one after the other. More rounds keep fewer boundary
    activations in host memory, but each uploads all weights again, and above 1 the host adds gradients in float32 (4 bytes more
    per trained parameter), which changes the last bits of a loss. `auto`: as planned at the first start. Default: 1, or the
    plan's."""

    recompute: Literal["stage", "layer"] = "stage"
    """Activations of one micro-batch that a backward stage keeps on the device at once. `layer`: of one layer instead of all,
    which takes less device memory and one more forward pass of the stage."""

    keep_activations: Literal["auto", "none", "attention", "half", "all"] | Many[KeptPart] = "auto"
    """Results that forward stages keep in host memory for backward stages; losses do not depend on it. `all`: all parts of
    every block. `half`: of every other block. An array of parts, or `attention`: these of every block. Parts: `qkv`,
    `attention` (its kernel), `output` (the product after it), `gate_up`, `down`. A compiled layer keeps all or nothing. `auto`:
    what shortens steps by more than `slower_for_memory` and fits; nothing on virtual devices and on a card of unknown speed."""

    slower_for_memory: Fraction = 0.01
    """Share of a step by which a plan may be slower than the fastest one if it needs less host memory."""

    grad_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of gradients during the download and in host memory. `auto`: `training.dtype`. `float32` takes 2 bytes more
    host memory per trained parameter and doubles the download."""

    accumulate_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which a device adds up the gradients of a round. `bfloat16` halves their memory, but loses small
    parts."""

    plan: PlanTable | Name | None = None
    """Partition in place of the planner's: the path of a `plan.json`, or `{forward = [2, 2], fused = 2, backward = [2, 2]}`."""

    measure_steps: NonNegativeInt = 3
    """Steps at the start of a run that measure every layer's time for a second plan, which is written to `plan.json` and kept
    when the run resumes. 0: plan from FLOPs and bytes alone. Losses do not depend on it."""

    hang_timeout_s: PositiveFloat = 300.0
    """Seconds without progress of a worker that stop the run, with a report. Longer than a stage takes for one micro-batch."""

    compile: bool | Literal["auto"] = "auto"
    """Code that is compiled (docs/engine.md). `true`: the host's optimizer update and the layers. `auto`: the layers on `cuda`
    and `xpu` if the device has room, and the update from 2^21 trained parameters on. Losses of compiled layers differ in the
    last bits. Needs a C++ compiler (`CXX`) and, on GPUs, Triton with a C compiler (`CC`) and Python's headers. Code that cannot
    be compiled runs uncompiled, with one warning."""

    cpu_threads: PositiveInt | None = None
    """Threads inside one operation of the host; a virtual device always has one. Bits do not depend on it. Default:
    PyTorch's."""


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
