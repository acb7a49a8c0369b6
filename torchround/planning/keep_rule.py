"""What a run may keep of its forward stages for its backward stages: the planner's choice, or a setting by name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from torchround.layer_work import LayerWork
from torchround.planning.costs import Costs, CostsError, LayerCost
from torchround.planning.partition import KeptNames, PlanError
from torchround.planning.stage_times import KeptLink

# Parts whose seconds per byte differ by less than this share count as equal: measured times of equal layers differ.
ALIKE = 0.1
# Multiples of this number modulo 1 are spread evenly, however many there are.
GOLDEN = (sqrt(5) - 1) / 2


@dataclass(frozen=True)
class KeepRule:
    """What may be kept.

    - `setting`: `"auto"`, `"none"`, `"attention"`, `"half"`, `"all"`, or names of parts that every layer keeps.
    - `given`: the names by layer if they are given, whatever the setting; empty keeps nothing.
    - `link`: the link of each device to the host; None takes all transfers as hidden.
    """

    setting: str | tuple[str, ...] = "none"
    link: KeptLink | None = None
    given: KeptNames | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the planner chooses."""
        return self.setting == "auto" and self.given is None

    def fixed(self, costs: Costs) -> KeptNames:
        """Return what is kept by name, nothing if the planner chooses. Raises `PlanError` if a layer cannot follow."""
        if self.given is not None:
            try:
                return costs.keeping(self.given).kept
            except CostsError as error:
                raise PlanError(f"the given plan keeps what it cannot: {error}") from error
        if self.setting in ("auto", "none"):
            return ()
        keeping = [index for index, layer in enumerate(costs.layers) if layer.keepable]
        if self.setting == "half":
            keeping = keeping[1::2]
        kept = tuple(
            self._names(layer) if index in keeping else () for index, layer in enumerate(costs.layers)
        )
        if not any(kept):
            raise PlanError(self._nothing_to_keep(costs))
        return kept

    def _names(self, layer: LayerCost) -> tuple[str, ...]:
        """Return the names that a layer keeps; a layer that keeps all or nothing keeps no part alone."""
        known = tuple(part.name for part in layer.keepable)
        wanted = (self.setting,) if isinstance(self.setting, str) else self.setting
        if self.setting in ("half", "all"):
            return known
        names = tuple(name for name in known if name in wanted)
        return () if layer.keeps_whole and names != known else names

    def _nothing_to_keep(self, costs: Costs) -> str:
        shown = f'"{self.setting}"' if isinstance(self.setting, str) else f"{list(self.setting)}"
        if any(layer.keeps_whole for layer in costs.layers):
            return (
                f"engine.keep_activations = {shown}: compiled layers keep all or nothing; legal: "
                '"auto", "none", "half" or "all", or engine.compile = false'
            )
        return f"engine.keep_activations = {shown}: no layer of this model has such a part; legal: " + (
            '"auto" or "none"'
        )


@dataclass(frozen=True)
class KeptItem:
    """Parts of one layer that are kept together or not at all."""

    layer: int
    names: tuple[str, ...]
    nbytes: int
    seconds: float

    @property
    def gain(self) -> float:
        """Seconds saved per byte."""
        return self.seconds / max(self.nbytes, 1)


def items_by_gain(costs: Costs, first_layer: int = 0) -> list[KeptItem]:
    """List what layers from `first_layer` on can keep, the most seconds per byte first.

    Items of equal gain come in an order whose every beginning is spread evenly over the layers: a stage whose layers
    all keep something waits for the link before another one does.
    """
    kinds: dict[tuple[str, ...], list[KeptItem]] = {}
    for index, layer in enumerate(costs.layers[first_layer:], start=first_layer):
        parts = [part for part in layer.keepable if part.seconds > 0]
        together = [parts] if layer.keeps_whole else [[part] for part in parts]
        for group in together:
            names = tuple(part.name for part in group)
            nbytes, seconds = sum(part.nbytes for part in group), sum(part.seconds for part in group)
            if group:
                kinds.setdefault(names, []).append(KeptItem(index, names, nbytes, seconds))
    groups = [group for items in kinds.values() for group in _alike(items)]
    groups.sort(key=lambda group: -sum(item.gain for item in group) / len(group))
    return [
        group[place]
        for group in groups
        for place in sorted(range(len(group)), key=lambda place: (place + 1) * GOLDEN % 1)
    ]


def _alike(items: list[KeptItem]) -> list[list[KeptItem]]:
    """Cut items of one kind into groups of about equal gain, each in the order of its layers."""
    groups: list[list[KeptItem]] = []
    for item in sorted(items, key=lambda item: -item.gain):
        if groups and item.gain >= groups[-1][0].gain * (1 - ALIKE):
            groups[-1].append(item)
        else:
            groups.append([item])
    return [sorted(group, key=lambda item: item.layer) for group in groups]


def kept_names(costs: Costs, items: Sequence[KeptItem]) -> KeptNames:
    chosen = {(item.layer, name) for item in items for name in item.names}
    return tuple(
        tuple(part.name for part in layer.keepable if (index, part.name) in chosen)
        for index, layer in enumerate(costs.layers)
    )


def kept_whole(work: LayerWork) -> LayerWork:
    """Count the work of a layer that keeps all that its compiled code returns: its output and what its backward reads.

    The layer's last part includes what its other parts do not count.
    """
    if not work.keepable:
        return work
    *parts, last = work.keepable
    rest = work.activation_bytes + work.boundary_bytes - sum(part.nbytes for part in parts)
    return replace(work, keepable=(*parts, replace(last, nbytes=max(last.nbytes, rest))))
