"""`Config`, a whole run: one attribute per TOML table. A component takes its own table, never the whole.

The engine's table is here too; the others are in `tables.py`.
"""

from typing import Literal

from pydantic import Field

from torchround.config.key_types import Many, Table
from torchround.config.tables import (
    CheckpointTable,
    DataTable,
    LoraTable,
    LRScheduleTable,
    MetricsTable,
    ModelTable,
    Name,
    NonNegativeInt,
    OptimizerTable,
    PositiveFloat,
    PositiveInt,
    RunTable,
    TokenizerTable,
    TraceTable,
    TrainingTable,
    ValidationTable,
)


class PlanTable(Table):
    """A partition given by hand: how many layers each stage holds, in dispatch order.

    `sum(forward) + fused = sum(backward) + fused` = layers of the model, embedding and head included.
    """

    forward: Many[PositiveInt]
    """Layers of each forward stage, from the first layer. Required; may be empty."""

    fused: PositiveInt
    """Layers of the fused stage: the last ones, forward and backward in one go. At least 1. Required."""

    backward: Many[PositiveInt]
    """Layers of each further backward stage, from the deepest down to the first layer. Required; may be
    empty."""

    rounds: PositiveInt | None = None
    """Rounds of a step, at most the number of micro-batches. When left out: `engine.rounds`."""


class EngineTable(Table):
    """How stages run on devices. Weights, gradients and optimizer state stay in host memory."""

    devices: Literal["auto", "cuda", "cpu"] = "auto"
    """Kind of device. `cpu`: virtual devices, each a thread with its own memory limit. `auto`: `cuda` where
    there is one, otherwise `cpu`."""

    num_devices: PositiveInt | None = None
    """Devices to use, at least 1. More than the machine has of kind `cuda` share them. When left out: all GPUs;
    one for `cpu`."""

    device_memory_gib: PositiveFloat | None = None
    """Memory that a device may use, in GiB (2^30 bytes), above 0. When left out: the card's memory, or a fair
    share of host memory for `cpu`. A lower limit makes smaller stages and larger bubbles."""

    update: Literal["sync", "async"] = "sync"
    """`sync`: step t computes with the weights after t updates. `async`: with the weights after t - 1, so that
    the fill and drain of neighbouring steps overlap; 2 bytes more host memory per trained parameter, and the
    one-step delay can hurt pre-training from scratch."""

    rounds: PositiveInt | Literal["auto"] | None = None
    """Parts that a step's micro-batches are cut into; each passes through all stages in turn. 1 to the number
    of micro-batches. More rounds keep fewer boundary activations in host memory, but upload the weights
    again in each; above 1 the host adds gradients in float32 (4 bytes more per trained parameter), part by
    part, so the last bits of a loss depend on the number of rounds. `auto`: the planner chooses, for this
    number of devices; a run that goes on keeps its rounds. When left out: 1, or the plan's."""

    recompute: Literal["stage", "layer"] = "stage"
    """What a backward stage keeps on the device at once: the activations of all its layers for one
    micro-batch (`stage`), or of one layer (`layer`: less device memory, one more forward pass of the stage)."""

    grad_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format in which gradients travel to the host and wait there. `auto`: `training.dtype`. `float32`
    costs 2 bytes more host memory per trained parameter and doubles the download."""

    accumulate_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which a device adds up a round's micro-batches. `bfloat16` halves the device memory of
    gradients but loses small contributions when there are many micro-batches."""

    plan: PlanTable | Name | None = None
    """Partition to use instead of the planner's: a path to a `plan.json`, or
    `{forward = [2, 2], fused = 2, backward = [2, 2], rounds = 1}`. When left out: the planner decides."""

    measure_steps: NonNegativeInt = 3
    """Steps at the start of a run that measure every layer's time, by running with one layer a stage. Then the
    planner decides once more, from medians of those times, and the plan is kept (`plan.json`), also by a run
    that goes on. Losses do not depend on it. 0: plan from FLOPs and bytes alone. Not used with `plan`."""

    hang_timeout_s: PositiveFloat = 300.0
    """Seconds without progress of a worker after which the run stops with a report of what each thread waits
    for. Above 0; longer than the longest stage takes for one micro-batch."""

    compile: bool | Literal["auto"] = "auto"
    """What Inductor compiles. `true`: the host's optimizer pass and the layers. `auto`: the optimizer pass alone, from
    2^25 trained parameters on; smaller models do not win the time back. `false`: nothing.

    The optimizer pass becomes several times as fast, with the same bits; compiling it takes a core about 20 s while
    the first step runs. Each kind of layer is compiled once for all layers of that kind, during the first step, for
    each size of a micro-batch: 10 to 60 s each, on CUDA once per GPU. Layers become faster where elementwise steps
    count, and their losses differ in the last bits from uncompiled ones, so a run should keep this setting; in device
    memory a compiled layer holds all its gradients of one micro-batch at once. Results are kept in
    `TORCHINDUCTOR_CACHE_DIR`. Needs a C++ compiler (`CXX`) and, on CUDA, Triton; what cannot be compiled runs as it
    is, with one warning."""

    share_links: bool | Literal["auto"] = "auto"
    """Whether GPUs that share a link to the host, such as those below one PCIe switch, take turns to upload weights.
    `auto`: measured at the start of a run with several GPUs, which takes about a second; those that get clearly
    less through together than one after the other take turns. `true`: all devices take turns, without measuring. `false`:
    nothing is measured, and none do. Losses do not depend on it."""

    cpu_threads: PositiveInt | None = None
    """Threads that PyTorch uses inside one operation on the CPU, at least 1. When left out: PyTorch's choice.
    With several `cpu` devices, devices x threads should not exceed the cores."""


class Config(Table):
    """A whole run. `load_config` also checks what tables demand of each other; the constructor does not."""

    run: RunTable = Field(default_factory=RunTable)
    model: ModelTable
    tokenizer: TokenizerTable = Field(default_factory=TokenizerTable)
    data: DataTable
    training: TrainingTable = Field(default_factory=TrainingTable)
    engine: EngineTable = Field(default_factory=EngineTable)
    optimizer: OptimizerTable = Field(default_factory=OptimizerTable)
    lr_schedule: LRScheduleTable = Field(default_factory=LRScheduleTable)
    checkpoint: CheckpointTable = Field(default_factory=CheckpointTable)
    validation: ValidationTable = Field(default_factory=ValidationTable)
    lora: LoraTable = Field(default_factory=LoraTable)
    metrics: MetricsTable = Field(default_factory=MetricsTable)
    trace: TraceTable = Field(default_factory=TraceTable)

    @property
    def num_micro_batches(self) -> int:
        """M: micro-batches of one step, `ceil(global_batch_size / micro_batch_size)`."""
        return -(-self.training.global_batch_size // self.training.micro_batch_size)
