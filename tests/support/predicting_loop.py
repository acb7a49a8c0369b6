"""The plain loop of `async` with `engine.delay_correction = "predict"`, in any dtype: no engine, no threads.

The prediction is written once more, in NumPy's fp32 arithmetic, so that it shares no code with the update.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tests.support.toy import OPTIMIZER, PlainLoop
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, MicroBatch


class PredictingLoop(PlainLoop):
    """Parameters hold device weights of `dtype`; the fp32 weights of `owned` are `truth`.

    A tied weight's two parts are rounded to `dtype` and then added in fp32, as the host adds them.
    """

    def __init__(self, model: LayeredModel, store: HostStore, tied: bool) -> None:
        super().__init__(model, {name: view.float() for name, view in store.weights().items()}, tied)
        self.module.to(store.dtype)
        self.truth = {name: store.weights()[name].float().clone() for name in self.owned}
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.truth.items()}

    def train_late(
        self, batches: Sequence[Sequence[MicroBatch]], lr: float, skipped: Sequence[int] = ()
    ) -> list[float]:
        """Train with each gradient applied one step late; the updates of the steps in `skipped` are left out."""
        losses, waiting = [], None
        for step, micro_batches in enumerate(batches):
            loss, gradients = self.gradients(micro_batches)
            losses.append(loss)
            if waiting is not None:
                self.update(waiting, lr)
            waiting = None if step in skipped else {name: g.clone() for name, g in gradients.items()}
        if waiting is not None:
            self.update(waiting, lr)
        return losses

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
        """Return the loss and the gradients, each micro-batch's added in fp32 and the sum rounded once."""
        labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        sums = {name: torch.zeros(p.shape) for name, p in self._name.items() if p.requires_grad}
        total = 0.0
        for micro_batch in micro_batches:
            hidden, micro_batch = None, replace(micro_batch, loss_factor=1.0 / labels)
            for layer in self.module:
                hidden = layer(hidden, micro_batch)
            hidden.backward(torch.full_like(hidden, 1.0 / labels))
            total += hidden.item()
            for name, gradient in sums.items():
                gradient.add_(self._name[name].grad.float())
                self._name[name].grad = None
        rounded = {name: gradient.to(self._name[name].dtype) for name, gradient in sums.items()}
        if self.tied:
            parts = (rounded.pop("head.weight"), rounded["embedding.weight"])
            rounded["embedding.weight"] = parts[0].float() + parts[1].float()
        return total / labels, {name: rounded[name] for name in self.owned}

    def update(self, gradients: dict[str, Tensor], lr: float) -> None:
        """Update the truth, then predict the device weights from it."""
        parameters, self.owned = self.owned, {name: torch.nn.Parameter(w) for name, w in self.truth.items()}
        tied, self.tied = self.tied, False
        super().update(gradients, lr)
        self.owned, self.tied = parameters, tied
        for name, parameter in self.owned.items():
            parameter.data.copy_(self.predicted(name, lr))
        if tied:
            self._name["head.weight"].data.copy_(self._name["embedding.weight"].data)

    def predicted(self, name: str, lr: float) -> Tensor:
        """Return `w - lr m_hat / (sqrt(v_hat) + eps)` in fp32."""
        beta1, beta2 = OPTIMIZER.betas
        weight, first, second = (tensor.numpy() for tensor in (self.truth[name], *self.moments[name]))
        root_scale = np.float32((1 - beta2**self.updates) ** -0.5)
        spread = np.sqrt(second) * root_scale + np.float32(OPTIMIZER.eps)
        step = first * np.float32(-lr / (1 - beta1**self.updates)) / spread
        return torch.from_numpy(weight + step)

    def state(self) -> dict[str, Tensor]:
        """Return the fp32 state under the names of `HostStore.named_views`."""
        views = {f"weights/{name}": weight for name, weight in self.truth.items()}
        for name, (first, second) in self.moments.items():
            views[f"exp_avg/{name}"], views[f"exp_avg_sq/{name}"] = first, second
        return views
