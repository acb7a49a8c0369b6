"""`Config`: one attribute per TOML table. Components take their own table, never the whole."""

from pydantic import Field

from torchround.config.table import Table
from torchround.config.tables import (
    CheckpointTable,
    DataTable,
    LoraTable,
    LRScheduleTable,
    MetricsTable,
    ModelTable,
    OptimizerTable,
    RunTable,
    TokenizerTable,
    TraceTable,
    TrainingTable,
    ValidationTable,
)
from torchround.config.tables_engine import EngineTable


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
