"""The plain loop of every optimizer and state format: no engine, no threads, and arithmetic written once more in NumPy.

It shares no code with `torchround/optim`: AdamW, the rounding of split weights and the 8-bit codes are fp32 operations of
NumPy here, and matrices are orthogonalised by the function that `torch.optim.Muon` uses.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz

from tests.support.device_toy import DeviceLoop
from tests.support.toy import MAX_NORM
from torchround.config import OptimizerTable
from torchround.layer import LayeredModel, MicroBatch
from torchround.optim import clip_scale, sum_of_squares

BLOCK = 128
MOMENTUM, FIRST, SECOND = "momentum_buffer", "exp_avg", "exp_avg_sq"
Values = np.ndarray


class StatefulLoop(DeviceLoop):
    """A loop with the optimizer of `table`; fp32 `weights` are the values before the first step.

    Device weights are in `dtype`. In bfloat16 they are the upper halves of the fp32 weights, ties away from zero, or with
    `predicts` the weights moved once more, cast as PyTorch casts.
    """

    def __init__(
        self,
        model: LayeredModel,
        weights: Mapping[str, Tensor],
        tied: bool,
        table: OptimizerTable,
        dtype: torch.dtype = torch.bfloat16,
        rounds: int = 1,
        predicts: bool = False,
        device: str = "cpu",
    ) -> None:
        super().__init__(model, dict(weights), tied, device, dtype, rounds)
        self._table, self._predicts = table, predicts
        self._splits = dtype == torch.bfloat16 and not predicts
        self._predicted: dict[int, Tensor] = {}
        first, last = model.names[0], model.names[-1]
        self._matrices = {
            name
            for name, parameter in self.owned.items()
            if table.name == "muon" and name in self.decayed and not name.startswith((f"{first}.", f"{last}."))
        }
        self._values: dict[str, dict[str, Values]] = {}
        self._parts: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.owned.items():
            kinds = (MOMENTUM,) if name in self._matrices else (FIRST, SECOND)
            self._keep(name, {kind: np.zeros(parameter.numel(), np.float32) for kind in kinds})

    def train_late(self, batches: Sequence[Sequence[MicroBatch]], lr: float) -> list[float]:
        """Train with each gradient applied one step late."""
        losses, waiting = [], None
        for micro_batches in batches:
            loss, gradients = self.gradients(micro_batches)
            losses.append(loss)
            if waiting is not None:
                self.update(waiting, lr)
            waiting = gradients
        assert waiting is not None, "there is a batch"
        self.update(waiting, lr)
        return losses

    def update(self, gradients: dict[str, Tensor], lr: float, loss_scale: float = 1.0) -> None:
        """Update the fp32 weights and the kept values from gradients of the loss times `loss_scale`.

        Matrices of Muon are not clipped, and the norm that clips the others does not count them.
        """
        self.updates += 1
        clipped = [name for name in gradients if name not in self._matrices]
        squares = {name: float(sum_of_squares(gradients[name].reshape(-1))) for name in clipped}
        norm = math.sqrt(math.fsum(squares.values())) / loss_scale
        scale = clip_scale(norm, MAX_NORM) / loss_scale
        for name, parameter in self.owned.items():
            gradient = gradients[name].float().reshape(-1).numpy()
            weight = parameter.data.view(-1).numpy()
            if name in self._matrices:
                self._update_matrix(name, parameter.shape, weight, gradient * np.float32(1 / loss_scale), lr)
            else:
                self._update_vector(name, weight, gradient, lr, scale)
        if self.tied:
            head, embedding = self._name["head.weight"], self._name["embedding.weight"]
            head.data.copy_(embedding.data)
            if self._predicts:
                self._predicted[id(head)] = self._predicted[id(embedding)]

    def _update_vector(self, name: str, weight: Values, gradient: Values, lr: float, scale: float) -> None:
        """Apply AdamW to a flat parameter."""
        table, one = self._table, np.float32
        beta1, beta2 = table.betas
        rate = getattr(table, "adamw_lr", None)
        lr = lr if rate is None else lr * (rate / table.lr)
        decay = table.weight_decay if name in self.decayed else 0.0
        first, second = (self._values[name][kind] for kind in (FIRST, SECOND))
        gradient = gradient * one(scale)
        first = (gradient - first) * one(1 - beta1) + first
        second = second * one(beta2) + (gradient * one(1 - beta2)) * gradient
        minus_step = one(-lr / (1 - beta1**self.updates))
        root_scale = one((1 - beta2**self.updates) ** -0.5)

        def step(first: Values, second: Values) -> Values:
            return (first * minus_step) / (np.sqrt(second) * root_scale + one(table.eps))

        weight[:] = weight * one(1 - lr * decay) + step(first, second)
        self._keep(name, {FIRST: first, SECOND: second})
        if self._predicts:
            kept = self._values[name]
            ahead = weight + step(kept[FIRST], kept[SECOND])
            self._predicted[id(self._name[name])] = torch.from_numpy(ahead)

    def _update_matrix(self, name: str, shape: torch.Size, weight: Values, gradient: Values, lr: float) -> None:
        """Apply Muon to a matrix, or to each matrix of a stack."""
        table, one = self._table, np.float32
        kept = self._values[name][MOMENTUM]
        rest = one(1 - table.momentum)
        momentum = (gradient - kept) * rest + kept
        # `Tensor.lerp_` computes from the end that is nearer.
        ahead = momentum - (momentum - gradient) * rest if table.nesterov else momentum
        matrices = torch.from_numpy(ahead).view(-1, *shape[-2:]).bfloat16().to(self._device)
        coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
        found = [_zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7) for matrix in matrices]
        direction = torch.stack(found).float().cpu().reshape(-1).numpy()
        rows, columns = shape[-2:]
        adjusted = 0.2 * math.sqrt(max(rows, columns))
        if table.adjust_lr == "original":
            adjusted = math.sqrt(max(1, rows / columns))
        decay = table.weight_decay if name in self.decayed else 0.0
        weight[:] = weight * one(1 - lr * decay) + direction * one(-lr * adjusted)
        self._keep(name, {MOMENTUM: momentum})

    def _keep(self, name: str, values: dict[str, Values]) -> None:
        """Keep values as the table's format holds them: read back, and as the tensors of a checkpoint."""
        shape = self.owned[name].shape
        self._values[name], self._parts[name] = {}, {}
        for kind, value in values.items():
            if self._table.state == "exact":
                self._values[name][kind] = value
                self._parts[name][kind] = torch.from_numpy(value).view(shape)
                continue
            codes, scales, read = coded_root(value) if kind == SECOND else coded(value)
            self._values[name][kind] = read
            self._parts[name][kind] = torch.from_numpy(codes).view(shape)
            self._parts[name][f"{kind}_scale"] = torch.from_numpy(scales).bfloat16()

    def _leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a device's copy of a parameter."""
        leaf = super()._leaf(parameter)
        if not parameter.requires_grad:
            return leaf
        ahead = self._predicted.get(id(parameter))
        if self._splits:
            leaf.data.copy_(halves(parameter.data)[0])
        elif ahead is not None:
            leaf.data.copy_(ahead.view(parameter.shape))
        return leaf

    def state(self) -> dict[str, Tensor]:
        """Return the state under the names of `HostStore.named_views`."""
        views = {}
        for name, parameter in self.owned.items():
            views[f"weights/{name}"] = parameter.data
            if self._splits:
                views[f"weights/{name}"], views[f"residual/{name}"] = halves(parameter.data)
            views |= {f"{part}/{name}": tensor for part, tensor in self._parts[name].items()}
        return views


def halves(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 upper halves of fp32 values, ties up in magnitude of the bits, and the int16 that is left."""
    bits = weight.contiguous().numpy().view(np.uint32).astype(np.int64)
    upper = (bits + 0x8000) >> 16
    residual = torch.from_numpy((bits - (upper << 16)).astype(np.int16))
    return torch.from_numpy(upper.astype(np.uint16).view(np.int16)).view(torch.bfloat16), residual


def scales_of(blocks: Values) -> Values:
    """Return a scale for each row: its largest magnitude, rounded up to a finite bfloat16; below 2^-100 it is 0."""
    bits = np.abs(blocks).max(axis=1).view(np.uint32).astype(np.int64)
    found = (np.minimum((bits + 0xFFFF) >> 16, 0x7F7F) << 16).astype(np.uint32).view(np.float32)
    return np.where(found < 2.0**-100, np.float32(0), found)


def coded(values: Values) -> tuple[Values, Values, Values]:
    """Return the int8 codes of signed values, a scale for each block, and the values that are read back."""
    one, blocks = np.float32, _blocks(values)
    scales = scales_of(blocks)
    wide = scales[:, None]
    codes = np.rint(one(254) * (blocks / (np.where(wide > 0, wide, one(1)) + np.abs(blocks))))
    read = (codes / (one(254) - np.abs(codes))) * wide
    return codes.ravel()[: values.size].astype(np.int8), scales, read.ravel()[: values.size]


def coded_root(values: Values) -> tuple[Values, Values, Values]:
    """Return the uint8 codes of the roots of values that are never negative, scales of roots, and what is read back."""
    one, roots = np.float32, np.sqrt(_blocks(values))
    scales = scales_of(roots)
    inverse = np.divide(one(255), scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.minimum(np.rint(roots * inverse[:, None]), one(255))
    codes = np.where(roots > 0, np.maximum(codes, one(1)), codes)
    read = codes * (scales / one(255))[:, None]
    return codes.ravel()[: values.size].astype(np.uint8), scales, (read * read).ravel()[: values.size]


def _blocks(values: Values) -> Values:
    padded = np.zeros(-(-values.size // BLOCK) * BLOCK, np.float32)
    padded[: values.size] = values
    return padded.reshape(-1, BLOCK)
