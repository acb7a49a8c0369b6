"""Predicted device weights: one update ahead of the fp32 weights, which stay the truth.

A step of `async` computes with version `t - 1`, and its gradient is applied to version `t`. The update that makes a
version knows its own direction; for AdamW `d = -lr * m_hat / (sqrt(v_hat) + eps)`. With `engine.delay_correction =
"predict"` it writes `w + d` in place of `w` as that version's device weights, in the same pass. Nothing is kept for it:
the fp32 weights, the state as it is kept, and the numbers of the last update (`Prediction`) give the newest device weights
again, bit for bit.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchround.config import OptimizerTable
from torchround.engine.store.bundles import Bundle
from torchround.optim.update_pass import predict_


@dataclass(frozen=True)
class Prediction:
    """The numbers of the last applied update, which made the newest device weights.

    `settings` are the fields that all its rules had in common, such as `betas` and `eps`.
    """

    lr: float
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, bundles: Iterable[Bundle], lr: float) -> "Prediction":
        """Return the numbers of an update of these bundles by their present rules.

        Weight decay is left out, also if it is one for all: a predicted step has none (`UpdateRule.next_step`).
        """
        rules = {segment.rule for bundle in bundles for segment in bundle.segments}
        names = dict.fromkeys(name for rule in rules for name in vars(rule) if name != "weight_decay")
        values = {name: {getattr(rule, name, None) for rule in rules} for name in names}
        return cls(lr, {name: found.pop() for name, found in values.items() if len(found) == 1})

    @classmethod
    def from_state(
        cls, state: Any, applied_updates: int, bundles: Iterable[Bundle], table: type[OptimizerTable]
    ) -> "Prediction":
        """Rebuild it from a checkpoint, for these bundles. Raises `ValueError` for what no update can have left.

        `table` says which values of settings are legal.
        """
        lr = state.get("lr") if isinstance(state, Mapping) else None
        if not (type(lr) is float and math.isfinite(lr) and lr >= 0 and applied_updates > 0):
            raise ValueError(f"prediction is {str(state)[:100]}")
        settings = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in state.items()
            if name != "lr"
        }
        found, names = cls(lr, settings), cls.of(bundles, lr).settings.keys()
        if settings.keys() != names:
            listed = ", ".join(["lr", *names])
            raise ValueError(f"prediction has {', '.join(map(str, state))}; legal: {listed}")
        # A rule may have further fields that follow from its settings.
        table.model_validate({name: settings[name] for name in names & table.model_fields.keys()})
        return found

    def state(self) -> dict[str, Any]:
        """Return its values, JSON-able."""
        listed = {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.settings.items()
        }
        return {"lr": self.lr, **listed}

    def write(self, bundle: Bundle, device_weights: Tensor, step: int, applied_updates: int) -> None:
        """Write a bundle's device weights of version `step` as the last of `applied_updates` updates wrote them."""
        for segment in bundle.segments:
            buffers = bundle.update_buffers(segment, device_weights, step)
            # A rule is a dataclass of its settings.
            rule = type(segment.rule)(**{**vars(segment.rule), **self.settings})
            predict_(replace(buffers, rule=rule), lr=self.lr, update=applied_updates)
