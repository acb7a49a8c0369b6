"""Predicted device weights: one update ahead of the fp32 weights, which stay the truth.

A step of `async` computes with version `t - 1`, and its gradient is applied to version `t`. The update that makes a
version knows its own direction, `d = -lr * m_hat / (sqrt(v_hat) + eps)`. With `engine.delay_correction = "predict"` it
writes `w + d` in place of `w` as that version's device weights, in the same pass. Nothing is kept for it: the fp32
state and the numbers of the last update (`Prediction`) give the newest device weights again, bit for bit.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchround.engine.store.bundles import Bundle
from torchround.optim.adamw import predict_


@dataclass(frozen=True)
class Prediction:
    """The numbers of the last applied update, which made the newest device weights."""

    lr: float
    betas: tuple[float, float]
    eps: float

    @classmethod
    def from_state(cls, state: Mapping[str, Any], applied_updates: int) -> "Prediction":
        """Rebuild it from a checkpoint. Raises `ValueError` for numbers that no update can have had."""
        found = cls(state["lr"], tuple(state["betas"]), state["eps"])
        numbers = (found.lr, *found.betas, found.eps)
        is_legal = all(type(number) is float and math.isfinite(number) for number in numbers) and (
            found.lr >= 0
            and found.eps > 0
            and len(found.betas) == 2
            and all(0 <= b < 1 for b in found.betas)
            and applied_updates > 0
        )
        if not is_legal:
            raise ValueError(f"prediction is {str(dict(state))[:100]}")
        return found

    def state(self) -> dict[str, Any]:
        """Return its values, JSON-able."""
        return {**asdict(self), "betas": list(self.betas)}


def derive_newest(
    bundles: Iterable[Bundle], step: int, prediction: Prediction | None, applied_updates: int
) -> None:
    """Write the device weights of version `step` from the fp32 state; without a prediction they are the fp32 weights."""
    for bundle in bundles:
        device_weight = bundle.version(step)
        if prediction is None:
            device_weight.copy_(bundle.authority)
            continue
        weight, first, second = bundle.weight, bundle.exp_avg, bundle.exp_avg_sq
        assert weight is not None and first is not None and second is not None, (
            "a trained bundle lacks a buffer"
        )
        predict_(
            *(device_weight, weight, first, second),
            lr=prediction.lr,
            betas=prediction.betas,
            eps=prediction.eps,
            bias_correction_step=applied_updates,
        )
