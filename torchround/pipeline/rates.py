"""The rates that layers reach on a card, by kind of work: the only constants behind counted seconds.

A layer takes the FLOPs of each kind over the share of the card's peak that this kind reaches, and the bytes of its
activations over the card's memory bandwidth, several times. `python scripts/fit_rates.py` fits the constants on RoundPipe's
layer times and throughputs (RTX 4090, fp16 accumulation). Other cards scale by their peak and bandwidth. docs/planning.md
has how far these predictions were from the models that the fit did not see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torchround.pipeline.cards import DeviceSpec


@dataclass(frozen=True)
class Rates:
    """Shares of a card's rates, and rates of the host.

    - `dense`, `grouped`, `head`: the share of the dense peak that each kind of product reaches. Dense products contain
      attention. The head's share contains its loss and its gradient.
    - `passes`: how often a block's activations travel between a device's memory and its cores in a forward. In a
      backward they travel twice as often, and the gradients of trained weights as often as in a forward.
    - `update_bytes_per_s`: memory traffic of the host's processors in an update.
    - `host_bytes_per_s`: bandwidth of the host's memory, which updates and the copies of all devices share. Twice eight
      channels of DDR4-2933, as in servers with eight cards like RoundPipe's; not fitted, because no published run met it.
    - `block_launch_s`, `experts_launch_s`: seconds of one thread that launching a block's kernels takes, for the
      forward, recomputation and backward of a micro-batch. Timed without kernels of any length, on one slow core.
    """

    dense: float = 0.88
    grouped: float = 0.31
    head: float = 0.7
    passes: float = 6.1
    update_bytes_per_s: float = 130e9
    host_bytes_per_s: float = 375e9
    block_launch_s: float = 1.6e-3
    experts_launch_s: float = 4.9e-3


RATES = Rates()


class CountedProducts(Protocol):
    """The attributes of `torchround.layer.Products` that this room reads."""

    @property
    def kind(self) -> str: ...
    @property
    def flops(self) -> float: ...
    @property
    def frozen_flops(self) -> float: ...


@dataclass(frozen=True)
class CardRates:
    """The rates of one card for one dtype: FLOP/s by kind of product, and bytes/s of activations."""

    flops_per_s: float
    bytes_per_s: float
    rates: Rates = RATES

    @staticmethod
    def of(
        device: DeviceSpec, dtype: str, fp16_accumulation: bool = False, rates: Rates = RATES
    ) -> "CardRates":
        """Read a card's peaks. Raises `UnknownPeakError`."""
        peak = device.flops_per_s(dtype, fp16_accumulation)
        return CardRates(peak, device.memory_bytes_per_s(peak), rates)

    def product_s(self, flops: float, kind: str = "dense") -> float:
        share: float = getattr(self.rates, kind)
        return flops / (self.flops_per_s * share)

    def forward_s(self, products: Sequence[CountedProducts], activation_bytes: float) -> float:
        """Estimate the seconds of a layer's forward."""
        seconds = sum(self.product_s(part.flops, part.kind) for part in products)
        return seconds + self._moving_s(products, activation_bytes)

    def backward_s(
        self, products: Sequence[CountedProducts], activation_bytes: float, gradient_bytes: float
    ) -> float:
        """Estimate the seconds of a layer's backward without recomputation.

        A product has two gradients, but a frozen weight needs none of its own.
        """
        seconds = sum(self.product_s(2 * part.flops - part.frozen_flops, part.kind) for part in products)
        return seconds + self._moving_s(products, 2 * activation_bytes + gradient_bytes)

    def _moving_s(self, products: Sequence[CountedProducts], nbytes: float) -> float:
        """Estimate the seconds of moving bytes. An embedding moves few, and the head's share contains its own."""
        moves = any(part.flops and part.kind != "head" for part in products)
        return self.rates.passes * nbytes / self.bytes_per_s if moves else 0.0


def launch_seconds(products_of_layers: Sequence[Sequence[CountedProducts]], rates: Rates = RATES) -> float:
    """Estimate the host time to launch all kernels of a micro-batch; embedding and head are not counted."""
    kinds = [{part.kind for part in products if part.flops} for products in products_of_layers]
    experts = sum("grouped" in found for found in kinds)
    blocks = sum("dense" in found for found in kinds if "grouped" not in found)
    return blocks * rates.block_launch_s + experts * rates.experts_launch_s
