"""The configuration of a run: one table per component, loading, overrides, messages."""

from torchround.config.load import MODEL_FOLDER as MODEL_FOLDER
from torchround.config.load import ConfigError as ConfigError
from torchround.config.load import Options as Options
from torchround.config.load import load_config as load_config
from torchround.config.load import nearest as nearest
from torchround.config.load import parse_command_line as parse_command_line
from torchround.config.load import show as show
from torchround.config.load import to_toml as to_toml
from torchround.config.load import users_module as users_module
from torchround.config.optimizer_tables import AdamWTable as AdamWTable
from torchround.config.optimizer_tables import OptimizerTable as OptimizerTable
from torchround.config.tables import Config as Config
from torchround.config.tables import DataTable as DataTable
from torchround.config.tables import EngineTable as EngineTable
from torchround.config.tables import LoraTable as LoraTable
from torchround.config.tables import LRScheduleTable as LRScheduleTable
from torchround.config.tables import MachinesTable as MachinesTable
from torchround.config.tables import MetricsTable as MetricsTable
from torchround.config.tables import PlanTable as PlanTable
from torchround.config.tables import RunTable as RunTable
from torchround.config.tables import SourceTable as SourceTable
from torchround.config.tables import TokenizerTable as TokenizerTable
from torchround.config.tables import TraceTable as TraceTable
from torchround.config.tables import TrainingTable as TrainingTable
from torchround.config.tables import ValidationTable as ValidationTable
