"""Dynamic loss scaling for float16, as a function of the step number.

The scale of step t is fixed by the results of steps up to t - 2, because step t may be dispatched while step t - 1
is still computing. Timing plays no part, so a run repeats, and a resumed one goes on bit for bit.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Powers of two: scaling and its undoing are exact.
INITIAL_SCALE = 2.0**16
LOWEST_SCALE, HIGHEST_SCALE = 1.0, 2.0**24
GROWTH_INTERVAL_STEPS = 2000
DELAY_STEPS = 2


@dataclass(frozen=True)
class ScaleState:
    """The scale after some step, and how many steps without an overflow it has seen since it last moved."""

    scale: float
    good_steps: int = 0

    def after(self, used_scale: float, overflowed: bool) -> "ScaleState":
        """The state after one more step, which used `used_scale`.

        An overflow halves what that step used: of two steps under way with the same scale, the second one's
        overflow is no further news.
        """
        if overflowed:
            return ScaleState(max(min(self.scale, used_scale / 2), LOWEST_SCALE))
        if self.good_steps + 1 < GROWTH_INTERVAL_STEPS:
            return ScaleState(self.scale, self.good_steps + 1)
        return ScaleState(min(self.scale * 2, HIGHEST_SCALE))


class LossScaling:
    """The loss scale of each step. Without `dynamic` it is 1 throughout and nothing moves.

    `record` is called for every step in order; `scale_of(t)` needs the records up to step t - 2.
    """

    def __init__(self, dynamic: bool, initial_scale: float = INITIAL_SCALE) -> None:
        self.dynamic = dynamic
        self._initial = ScaleState(initial_scale if dynamic else 1.0)
        self.load_state_dict(0, {})

    def scale_of(self, step: int) -> float:
        """The factor on step `step`'s loss."""
        return self._after[step - DELAY_STEPS].scale

    def can_fall(self, scale: float) -> bool:
        """Whether an overflow under `scale` is answered by a lower one: a step as usual, not a fault."""
        return self.dynamic and scale > LOWEST_SCALE

    def record(self, step: int, overflowed: bool) -> None:
        """Whether step `step`'s gradient was not finite."""
        before = self._after[step - 1]
        self._after[step] = before.after(self.scale_of(step), overflowed) if self.dynamic else before
        self._after.pop(step - DELAY_STEPS - 1, None)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a run that goes on at `step` needs, JSON-able; every earlier step is recorded."""
        if not self.dynamic:
            return {}
        return {"after": [asdict(self._after[step - back]) for back in (2, 1)]}

    def load_state_dict(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on at `step` with a `state_dict(step)`; with an empty one (no scaling before), at the initial scale.

        Raises `ValueError` for a scale that no step has.
        """
        after = [self._initial] * 2
        if self.dynamic and state:
            after = [ScaleState(**values) for values in state["after"]]
            for given in after:
                if not (0 < given.scale <= HIGHEST_SCALE and 0 <= given.good_steps < GROWTH_INTERVAL_STEPS):
                    raise ValueError(f"{given} is above {HIGHEST_SCALE}, or none at all")
        self._after = {step - back: values for back, values in zip((2, 1), after, strict=True)}
