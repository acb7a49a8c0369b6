"""The plain loop of Muon: autograd, torch's own Newton-Schulz iteration, and the momentum written once more."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from tests.support.plain_adamw import adamw_update_
from tests.support.toy import MAX_NORM, PlainLoop, layer_scales
from torchround.config.optimizer_tables import MuonTable
from torchround.layer import LayeredModel
from torchround.optim import clip_scale, sum_of_squares

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class MuonLoop(PlainLoop):
    """Muon for the matrices between the first and the last layer, AdamW for the others, in fp32.

    Only AdamW's gradients are clipped, by their own norm or, with `clip = "layer"`, by that of their layer. `norms` are
    those of whole gradients.
    """

    def __init__(
        self, model: LayeredModel, weights: Mapping[str, Tensor], tied: bool, table: MuonTable, clip: str = "global"
    ) -> None:
        super().__init__(model, {name: weight.clone() for name, weight in weights.items()}, tied, clip)
        self.table = table
        inner = model.names[1:-1]
        self.matrices = {n for n in self.owned if self._name[n].ndim > 1 and n.startswith(inner)}
        self.momenta = {name: torch.zeros_like(self.owned[name]) for name in self.matrices}

    def update(self, gradients: dict[str, Tensor], lr: float) -> None:
        squares = {name: float(sum_of_squares(g.reshape(-1))) for name, g in gradients.items()}
        self.norms.append(math.sqrt(math.fsum(squares.values())))
        clipped = {name: square for name, square in squares.items() if name not in self.matrices}
        scales = dict.fromkeys(clipped, clip_scale(math.sqrt(math.fsum(clipped.values())), MAX_NORM))
        if self.clip == "layer":
            scales = layer_scales(clipped, {name: self.owned[name].numel() for name in clipped})
        self.updates += 1
        with torch.no_grad():
            for name, parameter in self.owned.items():
                if name in self.matrices:
                    self._update_matrix(name, parameter.data, gradients[name], lr)
                else:
                    self._update_other(name, parameter.data, gradients[name], lr, scales[name])
            if self.tied:
                self._name["head.weight"].copy_(self._name["embedding.weight"])

    def _update_matrix(self, name: str, weight: Tensor, gradient: Tensor, lr: float) -> None:
        table, momentum = self.table, self.momenta[name]
        rest = 1.0 - table.momentum
        momentum.copy_((gradient - momentum) * rest + momentum)
        look_ahead = momentum - (momentum - gradient) * rest if table.nesterov else momentum
        stack = look_ahead.bfloat16().reshape(-1, *weight.shape[-2:])
        direction = torch.stack([_zeropower_via_newtonschulz(m, COEFFICIENTS, 5, 1e-7) for m in stack])
        rows, columns = weight.shape[-2:]
        ratio = 0.2 * math.sqrt(max(rows, columns))
        if table.adjust_lr == "original":
            ratio = math.sqrt(max(1.0, rows / columns))
        step = direction.view(weight.shape).float() * (-lr * ratio)
        weight.copy_(weight * (1.0 - lr * table.weight_decay) + step)

    def _update_other(self, name: str, weight: Tensor, gradient: Tensor, lr: float, scale: float) -> None:
        first, second = self.moments[name]
        flat = (weight, first, second, gradient, weight)
        table = self.table
        adamw_update_(
            *(tensor.reshape(-1) for tensor in flat),
            lr=lr if table.adamw_lr is None else lr * (table.adamw_lr / table.lr),
            betas=table.betas,
            eps=table.eps,
            weight_decay=table.weight_decay if name in self.decayed else 0.0,
            bias_correction_step=self.updates,
            gradient_scale=scale,
        )

    def state(self) -> dict[str, Tensor]:
        views = {}
        for name, parameter in self.owned.items():
            views[f"weights/{name}"] = parameter.data
            if name in self.matrices:
                views[f"momentum_buffer/{name}"] = self.momenta[name]
            else:
                views[f"exp_avg/{name}"], views[f"exp_avg_sq/{name}"] = self.moments[name]
        return views
