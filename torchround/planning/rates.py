"""The rates that layers reach on a card, by kind of work, and the costs that follow from them before any step has run.

A layer takes the FLOPs of each kind over the share of the card's peak that this kind reaches, and the bytes of its
activations over the card's memory bandwidth, several times. `python scripts/fit_rates.py` fits the constants on RoundPipe's
layer times and throughputs (RTX 4090, fp16 accumulation). Other cards scale by their peak and bandwidth. docs/planning.md
has how far these predictions were from the models that the fit did not see.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchround.layer_work import LayerWork, Products
from torchround.planning.cards import DeviceSpec, UnknownPeakError
from torchround.planning.costs import Costs, KeptCost, LayerCost


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
      forward, recomputation and backward of a micro-batch. Timed once on one slow core, without kernels of any length, when
      blocks launched Triton kernels that exist no more. No source allows a fit for today's: they hold to a factor of
      about two, for `python -m benchmarks kernels` counts 265 launches of a dense block, and 327 to 638 of one of experts.
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


@dataclass(frozen=True)
class CardRates:
    """The rates of one card: its peak in FLOP/s for the run's dtype, and the shares of it that work reaches."""

    device: DeviceSpec
    flops_per_s: float
    rates: Rates = RATES

    @staticmethod
    def of(
        device: DeviceSpec, dtype: str, fp16_accumulation: bool = False, rates: Rates = RATES
    ) -> "CardRates":
        """Read a card's peak for a dtype. Raises `UnknownPeakError`."""
        if (peak := device.flops_per_s(dtype, fp16_accumulation)) is None:
            known = sorted(device.peak_flops)
            raise UnknownPeakError(f"no {dtype} peak is known for {device.name}; known: {known}")
        return CardRates(device, peak, rates)

    def product_s(self, flops: float, kind: str = "dense") -> float:
        share: float = getattr(self.rates, kind)
        return flops / (self.flops_per_s * share)

    def layer_seconds(self, work: LayerWork, gradient_bytes: float) -> tuple[float, float]:
        """Estimate the seconds of forward and backward, without recomputation. A frozen weight needs no gradient."""
        moved = work.activation_bytes + work.unkept_bytes
        forward_s = sum(self.product_s(p.flops, p.kind) for p in work.products)
        backward_s = sum(self.product_s(2 * p.flops - p.frozen_flops, p.kind) for p in work.products)
        # An embedding moves few bytes, and the head's share contains its own.
        moves = any(part.flops and part.kind != "head" for part in work.products)
        passes = self.rates.passes if moves else 0.0
        bytes_per_s = self.device.memory_bytes_per_s(self.flops_per_s)
        forward_s += passes * moved / bytes_per_s
        backward_s += passes * (2 * moved + gradient_bytes) / bytes_per_s
        return forward_s, backward_s

    def unpacking(self, layer: LayerCost, unpacked_bytes: int, scratch_bytes: int) -> LayerCost:
        """Add the packed weights of a layer: at most a pass over them before each forward, recomputation and backward.

        A bound: what ran last stays unpacked, so a stage of one layer unpacks it once. What a layer keeps saves no pass.
        """
        if not unpacked_bytes:
            return layer
        unpack_s = (layer.weight_bytes + unpacked_bytes) / self.device.memory_bytes_per_s(self.flops_per_s)
        layer = replace(layer, forward_s=layer.forward_s + unpack_s, backward_s=layer.backward_s + unpack_s)
        workspace_bytes = max(layer.workspace_bytes, scratch_bytes)
        return replace(layer, unpacked_bytes=unpacked_bytes, workspace_bytes=workspace_bytes)


def costs_from_work(
    names: Sequence[str],
    works: Sequence[LayerWork],
    numels: Sequence[tuple[int, int]],
    card: CardRates,
    element_bytes: int = 2,
    accumulate_bytes: int = 4,
    update_bytes: Sequence[float] = (),
) -> Costs:
    """Estimate costs before any step has run.

    `numels` are the trained and frozen parameters of each layer. `update_bytes` is each layer's host memory traffic of an
    update (`UpdateCosts.traffic_bytes`); without it an update takes no time.
    """
    layers = []
    moved = update_bytes or [0.0] * len(names)
    for name, work, (trained, frozen), moved_bytes in zip(names, works, numels, moved, strict=True):
        gradient_bytes = trained * accumulate_bytes
        forward_s, backward_s = card.layer_seconds(work, gradient_bytes)
        layers.append(
            LayerCost(
                name=name,
                forward_s=forward_s,
                backward_s=backward_s,
                weight_bytes=(trained + frozen) * element_bytes,
                gradient_bytes=gradient_bytes,
                activation_bytes=work.activation_bytes,
                boundary_bytes=work.boundary_bytes,
                workspace_bytes=work.workspace_bytes,
                optimizer_s=moved_bytes / card.rates.update_bytes_per_s,
                keepable=tuple(
                    KeptCost(p.name, p.nbytes, card.product_s(p.flops, p.kind)) for p in work.keepable
                ),
                keeps_whole=work.keeps_whole,
            )
        )
    return Costs(tuple(layers), card.device.hop_s(max(layer.boundary_bytes for layer in layers)))


def launch_seconds(products_of_layers: Sequence[Sequence[Products]], rates: Rates = RATES) -> float:
    """Estimate the host time to launch all kernels of a micro-batch; embedding and head are not counted."""
    kinds = [{part.kind for part in products if part.flops} for products in products_of_layers]
    experts = sum("grouped" in found for found in kinds)
    blocks = sum("dense" in found for found in kinds if "grouped" not in found)
    return blocks * rates.block_launch_s + experts * rates.experts_launch_s
