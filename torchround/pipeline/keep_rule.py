"""What a run may keep of its forward stages for its backward stages: the planner's choice, or a setting by name."""

from dataclasses import dataclass

from torchround.pipeline.costs import Costs, CostsError, LayerCost
from torchround.pipeline.partition import KeptNames, PlanError
from torchround.pipeline.simulation.kept_link import KeptLink


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
        """Return what is kept by name; nothing if the planner chooses.

        Raises `PlanError` for names that a layer lacks, and for a setting that no layer can follow.
        """
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
