"""AdamW over flat host memory: one pass per layer reads the gradient, updates fp32 state, writes device weights.

The arithmetic is `torch.optim.AdamW`'s (decoupled weight decay, bias correction; Loshchilov and Hutter, arXiv
1711.05101). It uses only operations whose rounding IEEE 754 fixes: add, subtract, multiply, divide, square root; no
fused ones. A vectorised body, a scalar tail and a compiled loop then give the same bits. So an element's result does
not depend on where the buffer is cut, on its alignment, on the number of threads or on the compiler, and a run may
use the compiled kernel (`kernel.py`) or not, or both in turn.

The fp32 `weight` is the authority. The `device_weight` is its copy in the training dtype, which devices compute with.
A step of `async` applies its gradient to weights that are one update newer than those that it computed with. With
`predicts` the copy is therefore taken one update ahead, from the moments alone (`new_values`).
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

# weight, exp_avg, exp_avg_sq, and what is rounded to the device weight.
NewValues = tuple[Tensor, Tensor, Tensor, Tensor]

# (weight, exp_avg, exp_avg_sq, gradient, device_weight, factors): does a whole update in place, or raises before it
# has touched anything.
UpdateKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]], None]


@dataclass
class UpdateProgress:
    """The progress of an update of one flat buffer, so that an interrupted one can be finished.

    Elements `[0, done)` hold the new values, the rest the old ones. An exception may also interrupt the
    copies that commit a chunk. The chunk's new values are kept here, and the next call copies all of them again.
    """

    done: int = 0
    _computed: tuple[int, NewValues] | None = None

    @property
    def untouched(self) -> bool:
        return self.done == 0 and self._computed is None

    def computed_at(self, start: int) -> NewValues | None:
        """Return the new values of the chunk at `start` if an earlier call has computed them."""
        return self._computed[1] if self._computed is not None and self._computed[0] == start else None

    def keep(self, start: int, values: NewValues) -> None:
        """Remember the chunk's new values until `done` has moved past it."""
        self._computed = (start, values)


def adamw_update_(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    device_weight: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction_step: int,
    gradient_scale: float | Tensor = 1.0,
    progress: UpdateProgress | None = None,
    kernel: UpdateKernel | None = None,
    predicts: bool = False,
) -> None:
    """Update `weight`, `exp_avg`, `exp_avg_sq` (fp32) and `device_weight` (= weight, cast) in place from `gradient`.

    All are 1-D of equal length. `gradient` and `device_weight` may have any floating dtype; the gradient is only
    read, and `device_weight` may be `weight` itself. The gradient is first multiplied by `gradient_scale` in fp32
    (clip factor, 1 / loss scale). `bias_correction_step` counts from 1.

    With `predicts`, `device_weight` receives the new weight moved once more along the update's own direction, rounded
    once; it cannot be `weight` itself then.

    After an exception, calling again with the same arguments and the same `progress` finishes the update
    with the same bits; until then every chunk is either updated or untouched, except one whose commit itself
    was interrupted. Each update takes a fresh `progress`. Raises `ValueError` before touching anything when
    the buffers do not fit together.

    `kernel`, compiled for these dtypes and this `predicts`, updates the whole buffer at once with the same bits. It
    is not used to finish an interrupted update, nor for a single element, which compilers treat as a special case.
    """
    _check(weight, exp_avg, exp_avg_sq, gradient, device_weight, bias_correction_step)
    if predicts and weight.numel() and device_weight.data_ptr() == weight.data_ptr():
        raise ValueError("device_weight is weight itself, which a prediction would overwrite")
    progress = progress if progress is not None else UpdateProgress()
    factors = update_factors(lr, betas, eps, weight_decay, bias_correction_step, float(gradient_scale))
    if kernel is not None and progress.untouched and weight.numel() > 1:
        kernel(weight, exp_avg, exp_avg_sq, gradient, device_weight, factors)
        progress.done = weight.numel()
    while progress.done < weight.numel():
        start = progress.done
        stop = min(start + CHUNK_ELEMENTS, weight.numel())
        old = (weight[start:stop], exp_avg[start:stop], exp_avg_sq[start:stop])
        # Values of an interrupted chunk are reused: its old ones may be half overwritten.
        new = progress.computed_at(start)
        if new is None:
            new = new_values(*old, gradient[start:stop], factors, exact_root, predicts)
            progress.keep(start, new)
        commit_(old, device_weight[start:stop], new)
        progress.done = stop


def new_values(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    factors: tuple[Tensor, ...],
    root: Callable[[Tensor], Tensor],
    predicts: bool = False,
) -> NewValues:
    """Compute new `weight`, `exp_avg`, `exp_avg_sq` and device weight as fp32 tensors; a plain function that compiles.

    `factors` from `update_factors` are `[]` tensors rather than numbers, so that a compiled version is not
    compiled again when the learning rate moves. `root` is an exactly rounded square root.

        g = gradient * gradient_scale
        m = exp_avg + (1 - beta1) * (g - exp_avg)
        v = beta2 * exp_avg_sq + (1 - beta2) * g * g
        d = - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        w = (1 - lr * weight_decay) * weight + d
        device weight = w + d if it predicts, otherwise w
    """
    gradient_scale, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps, decay, minus_step = factors
    scaled = gradient.float().mul(gradient_scale)
    first = scaled.sub(exp_avg).mul_(one_minus_beta1).add_(exp_avg)
    second = exp_avg_sq.mul(beta2).add_(scaled.mul(one_minus_beta2).mul_(scaled))
    direction = _direction(first, second, (root_scale, eps, minus_step), root)
    updated = weight.mul(decay).add_(direction)
    return updated, first, second, direction.add_(updated) if predicts else updated


def predict_(
    device_weight: Tensor,
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    bias_correction_step: int,
) -> None:
    """Write the device weight that `adamw_update_` with `predicts` wrote, bit for bit, from the state that it left.

    All are 1-D of equal length. The numbers are the arguments of that update. Takes 2 MiB of scratch.
    """
    factors = update_factors(lr, betas, eps, 0.0, bias_correction_step, 1.0)
    numbers = (factors[4], factors[5], factors[7])
    for start in range(0, weight.numel(), CHUNK_ELEMENTS):
        chunk = slice(start, start + CHUNK_ELEMENTS)
        direction = _direction(exp_avg[chunk], exp_avg_sq[chunk], numbers, exact_root)
        device_weight[chunk].copy_(direction.add_(weight[chunk]))


def _direction(
    first: Tensor, second: Tensor, numbers: tuple[Tensor, ...], root: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the step that the moments ask for, weight decay apart, as a fresh tensor."""
    root_scale, eps, minus_step = numbers
    denominator = root(second).mul_(root_scale).add_(eps)
    return first.mul(minus_step).div_(denominator)


def exact_root(values: Tensor) -> Tensor:
    """Return the correctly rounded square root of fp32 values in host memory.

    NumPy uses the processor's own instruction. Eager `torch.sqrt` goes through MKL, whose last bit is off for 20 %
    of the values; through float64 the whole pass ran at 0.6 times the speed.
    """
    return torch.from_numpy(np.sqrt(values.numpy()))


def commit_(old: tuple[Tensor, Tensor, Tensor], device_weight: Tensor, new: NewValues) -> None:
    """Copy a chunk's new values over its old ones and cast the last one into `device_weight`. Can be repeated."""
    *state, for_devices = new
    for old_part, new_part in zip(old, state, strict=True):
        old_part.copy_(new_part)
    device_weight.copy_(for_devices)


def update_factors(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction_step: int,
    gradient_scale: float,
) -> tuple[Tensor, ...]:
    """Compute the eight numbers of an update in float64 and round each once to a `[]` fp32 tensor."""
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
    device_weight: Tensor,
    bias_correction_step: int,
) -> None:
    state = {"weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in {**state, "gradient": gradient, "device_weight": device_weight}.items():
        if tensor.shape != (weight.numel(),):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected ({weight.numel()},) like weight"
            )
        if not tensor.is_floating_point() or (name in state and tensor.dtype != torch.float32):
            raise ValueError(f"{name} has dtype {tensor.dtype}; state is float32, the others floating point")
    if bias_correction_step < 1:
        raise ValueError(f"bias_correction_step counts from 1, got {bias_correction_step}")
