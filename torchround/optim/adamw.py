"""AdamW over flat host memory: one pass per layer, gradient in, fp32 state updated, master weights out.

The arithmetic is `torch.optim.AdamW`'s (decoupled weight decay, bias correction), written with operations
whose every rounding IEEE 754 fixes (add, subtract, multiply, divide, square root) and no fused ones. A
vectorised body, a scalar tail and a compiled loop then give the same bits, so an element's result does not
depend on where the buffer is cut, on its alignment, on the number of threads or on the compiler: a run may
use the compiled kernel (`kernel.py`) or not, or both in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Elements per chunk; a chunk's eight fp32 temporaries (8 MiB) stay in the cache. Measured on 2 cores (AMD
# EPYC, 2 x 1 MiB L2, 32 MiB L3) with the root as 1 / rsqrt, Mparam/s by chunk: 16 Ki 217, 64 Ki 321, 256 Ki
# 350, 1 Mi 211 on one thread; 172, 302, 536, 548 on two.
CHUNK_ELEMENTS = 256 * 1024

NewValues = tuple[Tensor, Tensor, Tensor]

# (weight, exp_avg, exp_avg_sq, gradient, master, factors): a whole update in place, or an exception before it.
UpdateKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]], None]


@dataclass
class UpdateProgress:
    """How far an update of one flat buffer has come, so that a failed one can be finished.

    Elements `[0, done)` hold the new values, the rest the old ones. An exception may also interrupt the
    copies that commit a chunk: its new values are kept here, and the next call copies them again, whole.
    """

    done: int = 0
    _computed: tuple[int, NewValues] | None = None

    @property
    def untouched(self) -> bool:
        return self.done == 0 and self._computed is None

    def computed_at(self, start: int) -> NewValues | None:
        """New values of the chunk at `start` if an earlier call got as far as computing them."""
        return self._computed[1] if self._computed is not None and self._computed[0] == start else None

    def keep(self, start: int, values: NewValues) -> None:
        """Remember the chunk's new values until `done` has moved past it."""
        self._computed = (start, values)


def adamw_update_(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    master: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction_step: int,
    gradient_scale: float | Tensor = 1.0,
    progress: UpdateProgress | None = None,
    kernel: UpdateKernel | None = None,
) -> None:
    """Update `weight`, `exp_avg`, `exp_avg_sq` (fp32) and `master` (= weight, cast) in place from `gradient`.

    All are 1-D of equal length; `gradient` and `master` are of any floating dtype and are left alone or
    written respectively, and `master` may be `weight` itself. The gradient is first multiplied by
    `gradient_scale` in fp32 (clip factor, 1 / loss scale). `bias_correction_step` counts from 1.

    After an exception, calling again with the same arguments and the same `progress` finishes the update
    with the same bits; until then every chunk is either updated or untouched, except one whose commit itself
    was interrupted. Each update takes a fresh `progress`. Raises `ValueError` before touching anything when
    the buffers do not fit together.

    `kernel`, compiled for these dtypes, does the whole buffer at once with the same bits. It is left aside for
    an update that is already under way, and for one element, which compilers treat as a special case.
    """
    _check(weight, exp_avg, exp_avg_sq, gradient, master, bias_correction_step)
    progress = progress if progress is not None else UpdateProgress()
    factors = update_factors(lr, betas, eps, weight_decay, bias_correction_step, float(gradient_scale))
    if kernel is not None and progress.untouched and weight.numel() > 1:
        kernel(weight, exp_avg, exp_avg_sq, gradient, master, factors)
        progress.done = weight.numel()
    while progress.done < weight.numel():
        start = progress.done
        stop = min(start + CHUNK_ELEMENTS, weight.numel())
        old = (weight[start:stop], exp_avg[start:stop], exp_avg_sq[start:stop])
        new = progress.computed_at(start)
        if new is None:
            new = new_values(*old, gradient[start:stop], factors, exact_root)
            progress.keep(start, new)
        commit_(old, master[start:stop], new)
        progress.done = stop


def new_values(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    factors: tuple[Tensor, ...],
    root: Callable[[Tensor], Tensor],
) -> NewValues:
    """New `weight`, `exp_avg`, `exp_avg_sq` as fresh fp32 tensors; a plain function of tensors that compiles.

    `factors` from `update_factors` are `[]` tensors rather than numbers, so that a compiled version is not
    compiled again when the learning rate moves. `root` is an exactly rounded square root.

        g = gradient * gradient_scale
        m = exp_avg + (1 - beta1) * (g - exp_avg)
        v = beta2 * exp_avg_sq + (1 - beta2) * g * g
        w = (1 - lr * weight_decay) * weight - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    """
    gradient_scale, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps, decay, minus_step = factors
    scaled = gradient.float().mul(gradient_scale)
    first = scaled.sub(exp_avg).mul_(one_minus_beta1).add_(exp_avg)
    second = exp_avg_sq.mul(beta2).add_(scaled.mul(one_minus_beta2).mul_(scaled))
    denominator = root(second).mul_(root_scale).add_(eps)
    updated = weight.mul(decay).add_(first.mul(minus_step).div_(denominator))
    return updated, first, second


def exact_root(values: Tensor) -> Tensor:
    """Square root of fp32 values in host memory, correctly rounded, as the processor's own instruction gives it.

    NumPy's, because eager `torch.sqrt` goes through MKL, whose last bit is off for 20 % of the values. Through
    float64 the pass ran at 0.6 times the speed.
    """
    return torch.from_numpy(np.sqrt(values.numpy()))


def commit_(old: NewValues, master: Tensor, new: NewValues) -> None:
    """Copy a chunk's new values over its old ones and cast the new weight into `master`. Can be repeated."""
    for old_part, new_part in zip(old, new, strict=True):
        old_part.copy_(new_part)
    master.copy_(new[0])


def update_factors(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction_step: int,
    gradient_scale: float,
) -> tuple[Tensor, ...]:
    """The eight numbers of an update, computed in float64 and rounded once to `[]` fp32 tensors."""
    beta1, beta2 = betas
    numbers = (
        gradient_scale,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        (1.0 - beta2**bias_correction_step) ** -0.5,
        eps,
        1.0 - lr * weight_decay,
        -lr / (1.0 - beta1**bias_correction_step),
    )
    return tuple(torch.tensor(number, dtype=torch.float32) for number in numbers)


def _check(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    master: Tensor,
    bias_correction_step: int,
) -> None:
    state = {"weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in {**state, "gradient": gradient, "master": master}.items():
        if tensor.shape != (weight.numel(),):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected ({weight.numel()},) like weight"
            )
        if not tensor.is_floating_point() or (name in state and tensor.dtype != torch.float32):
            raise ValueError(f"{name} has dtype {tensor.dtype}; state is float32, the others floating point")
    if bias_correction_step < 1:
        raise ValueError(f"bias_correction_step counts from 1, got {bias_correction_step}")
