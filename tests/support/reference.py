"""The one loop that tests compare training with: plain autograd on one thread, and optimizers written once more in NumPy.

It shares no arithmetic with the product: no engine, no stages, no recomputation, no kernels. What it follows is said in
docs: gradients add up in `accumulate` over the micro-batches of a round, are rounded to `gradient_dtype`, and the host adds
rounds, and the uses of a tied weight from the last layer on, in fp32.
"""

import itertools
import math
from collections import defaultdict

import numpy as np
import torch
from torch import nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz
from torch.utils import _pytree as pytree

from tests.support.toy import MAX_NORM, OPTIMIZER

BLOCK, ROW = 128, 4096
MOMENTUM, FIRST, SECOND = "momentum_buffer", "exp_avg", "exp_avg_sq"


class Reference:
    """Training of a layered model from fp32 `weights` by name; a tied weight has the name of its first use.

    `update` is `sync`, `async`, `predict` (async whose device weights are moved once more) or `bounded`, whose forward reads
    the version before in the first `stale` layers, in the first `stale_rounds` rounds of a step. `optimizer` is a table of the product, or makes an optimizer of PyTorch
    from named parameters. In float16 the loss is scaled: by `loss_scale` at first, and doubled after `growth` good steps.
    """

    def __init__(
        self, model, weights, optimizer, update="sync", dtype=torch.float32, *, rounds=1, clip="global", max_norm=MAX_NORM,
        stale=0, stale_rounds=1, gradient_dtype=None, accumulate=torch.float32, loss_scale=2.0**16, growth=2000, device="cpu",
    ):  # fmt: skip
        self.model, self.update_kind, self.dtype, self.rounds, self.device = model, update, dtype, rounds, device
        self.clip, self.max_norm, self.stale, self.stale_rounds = clip, max_norm, stale, stale_rounds
        self.gradient_dtype, self.accumulate = gradient_dtype or dtype, accumulate
        names, self.uses, self.frozen = {}, defaultdict(list), {}
        matrices = set()
        for index, (prefix, layer) in enumerate(zip(model.names, model.layers, strict=True)):
            for path, parameter in layer.named_parameters():
                name = names.setdefault(id(parameter), f"{prefix}.{path}")
                self.uses[name].append((index, path))
                if not parameter.requires_grad:
                    self.frozen[name] = weights[name].to(self._dtype_of(name), copy=True)
                owner = layer.get_submodule(path.rpartition(".")[0])
                if parameter.ndim > 1 and path.rpartition(".")[2] not in getattr(owner, "undecayed", ()):
                    matrices.add(name)
        self.weights = {name: weights[name].float().clone() for name in self.uses if name not in self.frozen}
        self.decayed = matrices
        self.paths = [[path for path, _ in layer.named_parameters()] for layer in model.layers]
        self.buffers = [dict(layer.named_buffers()) for layer in model.layers]
        self.table = None if callable(optimizer) else optimizer
        self.parameters = {name: nn.Parameter(weight) for name, weight in self.weights.items()}
        self.torch = optimizer(list(self.parameters.items())) if self.table is None else None
        inner = {name for name in self.weights if 0 < self.uses[name][0][0] < len(model.layers) - 1}
        self.directed = matrices & inner if self.table is not None and self.table.name == "muon" else set()
        self.splits = dtype == torch.bfloat16 and self.table is not None and update in ("sync", "async")
        # Weights of one group are clipped together: those that the same layers use.
        self.groups = defaultdict(list)
        for name in self.weights:
            self.groups[tuple(sorted({index for index, _ in self.uses[name]}))].append(name)
        self.values, self.parts, self.ahead = {}, {}, {}
        for name, weight in self.weights.items():
            kinds = (MOMENTUM,) if name in self.directed else (FIRST, SECOND)
            if self.table is not None:
                self._keep(name, {kind: np.zeros(weight.numel(), np.float32) for kind in kinds})
        self.versions = [self._device_weights()] * 2  # the version before, and the newest
        self.updates, self.sums = 0, {}
        self.loss_scale, self.growth = loss_scale, growth
        self.norms, self.scales, self.overflowed, self.skipped = [], [], [], []  # of each step

    @classmethod
    def of(cls, model, store, optimizer=OPTIMIZER, **options):
        mode = store.mode
        usual = {"update": "predict" if mode.predicts else mode.name, "dtype": store.dtype}
        usual |= {"clip": "layer" if mode.name == "bounded" else "global"}
        return cls(model, store.weights(), optimizer, **usual | options)

    def train(self, batches, lr=1e-2):
        return [self.step(micro_batches, lr) for micro_batches in batches]

    def step(self, micro_batches, lr=1e-2):
        loss, gradients = self.gradients(micro_batches)
        self.update(gradients, lr)
        return loss

    def gradients(self, micro_batches, num_labels=None):
        """Return the loss of a call, and the gradients of the step so far, times the loss scale."""
        labels = num_labels or max(sum(micro_batch.num_labels() for micro_batch in micro_batches), 1)
        factor, losses = self.scale() / labels, []
        newest = self.versions[0 if self.update_kind in ("async", "predict") else 1]
        stale_rounds = 0 if self.sums else self.stale_rounds
        for number, part in enumerate(_cut(micro_batches, self.rounds)):
            older = self.versions[0] if number < stale_rounds else newest
            leaves = self._leaves(newest)
            for micro_batch in part:
                loss = self._last(micro_batch.for_training(factor), leaves, older, differentiates=True)
                loss.backward(torch.full_like(loss, factor))
                losses.append(loss.item())
            for name in self.weights:
                for use in reversed(self.uses[name]):
                    found = leaves[use].grad.to(self.gradient_dtype).cpu()
                    self.sums[name] = self.sums[name].float() + found.float() if name in self.sums else found
        return sum(losses) / labels, dict(self.sums)

    def update(self, gradients, lr=1e-2, skips=False):
        """End the step: apply its gradients, unless they are not finite, and make the next version of the device weights."""
        scale, self.sums = self.scale(), {}
        squares = {name: _square(gradient) for name, gradient in gradients.items()}
        # By group, first what is clipped: matrices that are orthogonalised have no size that matters.
        clipped = {
            g: math.fsum(squares[n] for n in names if n not in self.directed) for g, names in self.groups.items()
        }
        others = [math.fsum(squares[n] for n in names if n in self.directed) for names in self.groups.values()]
        norm = math.sqrt(math.fsum([*clipped.values(), *others])) / scale
        self.norms.append(norm)
        overflowed = not math.isfinite(norm) and self.update_kind != "bounded"
        self.scales.append(scale)
        self.overflowed.append(overflowed)
        self.skipped.append(overflowed or skips)
        if not self.skipped[-1]:
            self.updates += 1
            whole = math.sqrt(math.fsum(clipped.values())) / scale
            sizes = {
                g: sum(self.weights[n].numel() for n in names if n not in self.directed)
                for g, names in self.groups.items()
            }
            for group, names in self.groups.items():
                limit, found = self.max_norm, whole
                if self.clip == "layer":
                    found = math.sqrt(clipped[group]) / scale
                    limit *= math.sqrt(sizes[group] / sum(sizes.values()))
                    if not math.isfinite(found):
                        continue
                by = (min(limit / (found + 1e-6), 1.0) if limit else 1.0) / scale
                for name in names:
                    self._update_one(name, gradients[name].float().reshape(-1).numpy(), lr, by, scale)
            if self.torch is not None:
                self.torch.step()
        self.versions = [self.versions[1], self._device_weights()]

    def evaluate(self, micro_batches):
        """Return the loss at the device weights between steps: those of stale layers are of the version before."""
        held = {name: self.versions[0 if self.uses[name][0][0] < self.stale else 1][name] for name in self.weights}
        leaves = self._leaves(held)
        with torch.no_grad():
            losses = [self._last(micro_batch, leaves).item() for micro_batch in micro_batches]
        return sum(losses) / sum(micro_batch.num_labels() for micro_batch in micro_batches)

    def outputs(self, micro_batch):
        with torch.no_grad():
            return list(self._hidden(micro_batch, self._leaves(self.versions[1])))

    def scale(self):
        """Return the loss scale of the step under way, which the steps up to the last but one decide."""
        scale, good = self.loss_scale if self.dtype == torch.float16 else 1.0, 0
        for used, overflowed in list(zip(self.scales, self.overflowed, strict=True))[:-1]:
            good = 0 if overflowed else good + 1
            if self.dtype == torch.float16 and overflowed:
                scale = min(scale, used / 2)
            elif self.dtype == torch.float16 and good == self.growth:
                scale, good = scale * 2, 0
        return scale

    def state(self):
        views = {f"weights/{name}": weight for name, weight in self.frozen.items()}
        for name, weight in self.weights.items():
            views[f"weights/{name}"] = weight
            if self.splits:
                views[f"weights/{name}"], views[f"residual/{name}"] = halves(weight)
            views |= {f"{part}/{name}": tensor for part, tensor in self.parts.get(name, {}).items()}
            if self.update_kind in ("async", "predict") or self.uses[name][0][0] < self.stale:
                views[f"master_1_old/{name}"] = self.versions[0][name]
        return views

    # The forward.

    def _leaves(self, version):
        """Return a leaf on the device for each use of each weight."""
        leaves = {}
        for name, uses in self.uses.items():
            for use in uses:
                value = self.frozen[name] if name in self.frozen else version[name]
                leaf = leaves[use] = nn.Parameter(
                    value.to(self.device, copy=True), requires_grad=name not in self.frozen
                )
                if leaf.requires_grad:
                    leaf.grad_dtype = self.accumulate
                    leaf.grad = torch.zeros_like(leaf, dtype=self.accumulate)
        return leaves

    def _last(self, micro_batch, leaves, older=None, differentiates=False):
        *_, loss = self._hidden(micro_batch, leaves, older, differentiates)
        return loss

    def _hidden(self, micro_batch, leaves, older=None, differentiates=False):
        """Yield each layer's value. A stale layer's value is that of older weights, its gradient that of the newest."""
        if self.device != "cpu":
            micro_batch = micro_batch.rebuild()([tensor.to(self.device) for tensor in micro_batch.tensors()])
        stale = self._leaves(older) if differentiates and self.stale else None
        hidden = None
        for index, layer in enumerate(self.model.layers):
            given = (hidden, micro_batch.for_layer(index))

            def call(version, layer=layer, given=given, index=index):
                own = {path: version[index, path] for path in self.paths[index] if (index, path) in version}
                own |= {path: buffer.to(self.device) for path, buffer in self.buffers[index].items()}
                return torch.func.functional_call(layer, own, given)

            hidden = call(leaves)
            if stale is not None and index < self.stale:
                with torch.no_grad():
                    read = call(stale)
                # A tensor that comes twice stays one.
                joined = {id(other): _WithGradientOf.apply(value, other) for value, other in _pairs(read, hidden)}
                hidden = pytree.tree_map(lambda value, other, joined=joined: joined.get(id(other), value), read, hidden)
            yield hidden

    def _dtype_of(self, name):
        return self.model.own_dtypes.get(name, self.dtype)

    # The update.

    def _device_weights(self):
        """Return what devices compute with after an update: rounded weights, or those that the next update may give."""
        found = {}
        for name, weight in self.weights.items():
            ahead = self.ahead.get(name)
            found[name] = (
                weight.to(self._dtype_of(name), copy=True) if ahead is None else ahead.to(self._dtype_of(name))
            )
            if self.splits and self._dtype_of(name) == torch.bfloat16:
                found[name] = halves(weight)[0]
        return found

    def _update_one(self, name, gradient, lr, by, loss_scale):
        weight = self.weights[name]
        if self.torch is not None:
            self.parameters[name].grad = torch.from_numpy(gradient * np.float32(by)).view(weight.shape)
        elif name in self.directed:
            self._muon(name, weight.view(-1).numpy(), gradient * np.float32(1 / loss_scale), lr)
        else:
            self._adamw(name, weight.view(-1).numpy(), gradient * np.float32(by), lr)

    def _adamw(self, name, weight, gradient, lr):
        table = self.table
        rate = getattr(table, "adamw_lr", None)
        lr = lr if rate is None else lr * (rate / table.lr)
        decay = table.weight_decay if name in self.decayed else 0.0
        first, second, step = adamw_moments(
            *(self.values[name][kind] for kind in (FIRST, SECOND)), gradient, lr, table.betas, table.eps, self.updates
        )
        weight[:] = weight * np.float32(1 - lr * decay) + step(first, second)
        self._keep(name, {FIRST: first, SECOND: second})
        if self.update_kind == "predict":
            kept = self.values[name]
            ahead = weight + step(kept[FIRST], kept[SECOND])
            self.ahead[name] = torch.from_numpy(ahead).view(self.weights[name].shape)

    def _muon(self, name, weight, gradient, lr):
        table, one, shape = self.table, np.float32, self.weights[name].shape
        kept, rest = self.values[name][MOMENTUM], np.float32(1 - table.momentum)
        momentum = (gradient - kept) * rest + kept
        # `Tensor.lerp_` computes from the end that is nearer.
        ahead = momentum - (momentum - gradient) * rest
        matrices = torch.from_numpy(ahead).view(-1, *shape[-2:]).bfloat16().to(self.device)
        coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
        found = [_zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7) for matrix in matrices]
        direction = torch.stack(found).float().cpu().reshape(-1).numpy()
        rows, columns = shape[-2:]
        adjusted = 0.2 * math.sqrt(max(rows, columns))
        decay = table.weight_decay if name in self.decayed else 0.0
        weight[:] = weight * one(1 - lr * decay) + direction * one(-lr * adjusted)
        self._keep(name, {MOMENTUM: momentum})

    def _keep(self, name, values):
        """Keep values as the table's format holds them: read back, and as the tensors of a checkpoint."""
        shape = self.weights[name].shape
        self.values[name], self.parts[name] = {}, {}
        for kind, value in values.items():
            if self.table.state == "exact":
                self.values[name][kind] = value
                self.parts[name][kind] = torch.from_numpy(value).view(shape)
                continue
            codes, scales, read = coded_root(value) if kind == SECOND else coded(value)
            self.values[name][kind] = read
            self.parts[name][kind] = torch.from_numpy(codes).view(shape)
            self.parts[name][f"{kind}_scale"] = torch.from_numpy(scales).bfloat16()


class _WithGradientOf(torch.autograd.Function):
    """The value of one tensor, whose gradient is that of another."""

    @staticmethod
    def forward(ctx, value, other):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def _pairs(read, hidden):
    """Return the tensors of two equal structures in pairs, if a gradient comes back to them."""
    leaves = zip(pytree.tree_leaves(read), pytree.tree_leaves(hidden), strict=True)
    return [(one, other) for one, other in leaves if isinstance(other, torch.Tensor) and other.requires_grad]


def _cut(items, count):
    size, rest = divmod(len(items), count)
    starts = [index * size + min(index, rest) for index in range(count + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(starts) if stop > start]


def _square(gradient):
    """Return the sum of squares in fp64, whole rows of 4096 elements first: each product is exact, and no sum depends on threads."""
    flat = gradient.reshape(-1).double().square()
    whole = flat.numel() // ROW * ROW
    return float(flat[:whole].view(-1, ROW).sum(dim=1).sum() + flat[whole:].sum())


def adamw_moments(first, second, gradient, lr, betas, eps, number):
    """Return the moments after update `number`, counted from 1, and a function that gives the step of moments."""
    one, (beta1, beta2) = np.float32, betas
    minus_step = one(-lr / (1 - beta1**number))
    root_scale = one((1 - beta2**number) ** -0.5)

    def step(first, second):
        return (first * minus_step) / (np.sqrt(second) * root_scale + one(eps))

    first = (gradient - first) * one(1 - beta1) + first
    return first, second * one(beta2) + (gradient * one(1 - beta2)) * gradient, step


def halves(weight):
    """Return the bfloat16 upper halves of fp32 values, ties up in magnitude of the bits, and the int16 that is left."""
    bits = weight.contiguous().numpy().view(np.uint32).astype(np.int64)
    upper = (bits + 0x8000) >> 16
    residual = torch.from_numpy((bits - (upper << 16)).astype(np.int16))
    return torch.from_numpy(upper.astype(np.uint16).view(np.int16)).view(torch.bfloat16), residual


def coded(values):
    """Return the int8 codes of signed values, a scale for each block, and the values that are read back."""
    one, blocks = np.float32, _blocks(values)
    scales = _scales_of(blocks)
    wide = scales[:, None]
    codes = np.rint(one(254) * (blocks / (np.where(wide > 0, wide, one(1)) + np.abs(blocks))))
    read = (codes / (one(254) - np.abs(codes))) * wide
    return codes.ravel()[: values.size].astype(np.int8), scales, read.ravel()[: values.size]


def coded_root(values):
    """Return the uint8 codes of the roots of values that are never negative, scales of roots, and what is read back."""
    one, roots = np.float32, np.sqrt(_blocks(values))
    scales = _scales_of(roots)
    inverse = np.divide(one(255), scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.minimum(np.rint(roots * inverse[:, None]), one(255))
    codes = np.where(roots > 0, np.maximum(codes, one(1)), codes)
    read = codes * (scales / one(255))[:, None]
    return codes.ravel()[: values.size].astype(np.uint8), scales, (read * read).ravel()[: values.size]


def _scales_of(blocks):
    """Return a scale for each row: its largest magnitude, rounded up to a finite bfloat16; below 2^-100 it is 0."""
    bits = np.abs(blocks).max(axis=1).view(np.uint32).astype(np.int64)
    found = (np.minimum((bits + 0xFFFF) >> 16, 0x7F7F) << 16).astype(np.uint32).view(np.float32)
    return np.where(found < 2.0**-100, np.float32(0), found)


def _blocks(values):
    padded = np.zeros(-(-values.size // BLOCK) * BLOCK, np.float32)
    padded[: values.size] = values
    return padded.reshape(-1, BLOCK)
