"""The configuration of a run: one table per component, loading, overrides, messages."""

from torchround.config.data_tables import DataTable, SourceTable, TokenizerTable
from torchround.config.errors import MODEL_FOLDER, ConfigError, nearest, show
from torchround.config.load import Options, load_config, parse_command_line, to_toml, users_module
from torchround.config.optimizer_tables import AdamWTable, OptimizerTable
from torchround.config.tables import (
    Config,
    EngineTable,
    LoraTable,
    LRScheduleTable,
    MachinesTable,
    MetricsTable,
    PlanTable,
    RunTable,
    TraceTable,
    TrainingTable,
    ValidationTable,
)

__all__ = [
    "MODEL_FOLDER",
    "AdamWTable",
    "Config",
    "ConfigError",
    "DataTable",
    "EngineTable",
    "LRScheduleTable",
    "LoraTable",
    "MachinesTable",
    "MetricsTable",
    "OptimizerTable",
    "Options",
    "PlanTable",
    "RunTable",
    "SourceTable",
    "TokenizerTable",
    "TraceTable",
    "TrainingTable",
    "ValidationTable",
    "load_config",
    "nearest",
    "parse_command_line",
    "show",
    "to_toml",
    "users_module",
]
