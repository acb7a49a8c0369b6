"""The optimizers and state formats that tests train the toy model with, by name."""

from tests.support.toy import OPTIMIZER
from torchround.config import AdamWTable
from torchround.config.optimizer_tables import MuonTable
from torchround.planning.update_modes import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC

_ADAMW = {"lr": OPTIMIZER.lr, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps, "weight_decay": 0.1}
OPTIMIZERS = {
    "adamw": AdamWTable(**_ADAMW),
    "adamw compact": AdamWTable(**_ADAMW, state="compact"),
    "muon": MuonTable(**_ADAMW),
    "muon compact": MuonTable(**_ADAMW, state="compact"),
}
# What each may train with: Muon updates neither layer by layer nor ahead.
POLICIES = {
    "adamw": (SYNC, ASYNC, ASYNC_PREDICT, BOUNDED),
    "adamw compact": (SYNC, ASYNC, ASYNC_PREDICT, BOUNDED),
    "muon": (SYNC, ASYNC),
    "muon compact": (SYNC, ASYNC),
}
