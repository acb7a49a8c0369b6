"""The optimizers and state formats that tests train the toy model with, by name."""

from tests.support.toy import OPTIMIZER
from torchround.config import AdamWTable
from torchround.config.optimizer_tables import MuonTable

_ADAMW = {"lr": OPTIMIZER.lr, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps, "weight_decay": 0.1}
OPTIMIZERS = {
    "adamw": AdamWTable(**_ADAMW),
    "adamw compact": AdamWTable(**_ADAMW, state="compact"),
    "muon": MuonTable(**_ADAMW),
    "muon compact": MuonTable(**_ADAMW, state="compact"),
}
