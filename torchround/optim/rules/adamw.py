"""AdamW: its rule for vectors and for matrices, and the arithmetic of one update.

The arithmetic is `torch.optim.AdamW`'s (decoupled weight decay, bias correction; Loshchilov and Hutter, arXiv
1711.05101). It uses only operations whose rounding IEEE 754 fixes: add, subtract, multiply, divide, square root; no
fused ones. A vectorised body, a scalar tail and a compiled loop then give the same bits. So an element's result does
not depend on where the buffer is cut, on its alignment, on the number of threads or on the compiler, and a run may
use the compiled kernel (`kernel.py`) or not, or both in turn.
"""

from dataclasses import dataclass

from torch import Tensor

from torchround.config.optimizer_tables import AdamWTable
from torchround.optim.formats import StateValue, exact_root
from torchround.optim.optimizer import Optimizer, ParameterFacts, Tensors, UpdateRule

# One element's arithmetic, as `kernel.py` compiles it. Each operation is one of `AdamWRule`, in the same order.
KERNEL_SOURCE = """
inline void update_values(float *values, float gradient, Numbers n) {
    const float scaled = gradient * n[0];
    values[0] = (scaled - values[0]) * n[1] + values[0];
    values[1] = values[1] * n[2] + scaled * n[3] * scaled;
}
inline float next_step(const float *rooted, Numbers n) { return rooted[0] * n[7] / (rooted[1] * n[4] + n[5]); }
inline float updated_weight(float weight, const float *rooted, float, float, Numbers n) {
    return weight * n[6] + next_step(rooted, n);
}
"""


@dataclass(frozen=True)
class AdamWRule(UpdateRule):
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    values = (StateValue("exp_avg"), StateValue("exp_avg_sq", is_signed=False))
    kernel_source = KERNEL_SOURCE
    can_predict = True

    def numbers(self, lr: float, update: int, gradient_scale: float) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        return (
            gradient_scale,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            (1.0 - beta2**update) ** -0.5,
            self.eps,
            1.0 - lr * self.weight_decay,
            -lr / (1.0 - beta1**update),
        )

    def new_values(
        self, weight: Tensor, values: Tensors, gradient: Tensor, numbers: Tensors, direction: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Compute the new weight and moments:

        g = gradient * gradient_scale
        m = exp_avg + (1 - beta1) * (g - exp_avg)
        v = beta2 * exp_avg_sq + (1 - beta2) * g * g
        d = - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        w = (1 - lr * weight_decay) * weight + d
        """
        gradient_scale, new_share, beta2, new_share_of_squares, _, _, decay, _ = numbers
        exp_avg, exp_avg_sq = values
        scaled = gradient.mul(gradient_scale)
        first = scaled.sub(exp_avg).mul_(new_share).add_(exp_avg)
        second = exp_avg_sq.mul(beta2).add_(scaled.mul(new_share_of_squares).mul_(scaled))
        return weight.mul(decay).add_(self.next_step((first, second), numbers)), (first, second)

    def next_step(self, values: Tensors, numbers: Tensors) -> Tensor:
        """Compute -lr * m_hat / (sqrt(v_hat) + eps) of the kept moments."""
        first, second = values
        root_scale, eps, minus_step = numbers[4], numbers[5], numbers[7]
        denominator = exact_root(second).mul_(root_scale).add_(eps)
        return first.mul(minus_step).div_(denominator)


class AdamW(Optimizer[AdamWTable]):
    """AdamW for all parameters; weight decay for those that are decayed."""

    table = AdamWTable

    def rule_of(self, parameter: ParameterFacts) -> UpdateRule:
        decay = self.settings.weight_decay if parameter.is_decayed else 0.0
        return AdamWRule(self.settings.betas, self.settings.eps, decay)
