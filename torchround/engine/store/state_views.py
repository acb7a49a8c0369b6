"""The names on disk: a bundle's part of a checkpoint, as views that it is written from and read into."""

from collections.abc import Iterator

from torch import Tensor

from torchround.engine.store.bundles import Bundle
from torchround.engine.store.segments import FlatParameter

WEIGHTS = "weights"
RESIDUAL = "residual"
# Checkpoints name versions of the device weights older than the newest `master_<age>_old/..`.
# The word is from an early release: these are not the float32 weights. It stays, so that
# checkpoints already written load.
OLDER_WEIGHTS = "master_"


def state_views(bundle: Bundle, version: int, lags: bool) -> dict[str, Tensor]:
    """Return views of a bundle's weights and optimizer state by `<kind>/<parameter>`; `version` is the newest one.

    Device weights are among them if nothing else gives them: the upper halves of split weights, older versions, and
    device weights that lag. The newest ones of fp32 weights follow from those.
    """
    decisive = bundle.version(version) if bundle.weight is None else bundle.weight
    kinds = {WEIGHTS: decisive}
    if bundle.residual is not None:
        kinds[RESIDUAL] = bundle.residual
    older = {
        f"{OLDER_WEIGHTS}{age}_old": bundle.version(version - age)
        for age in range(1, len(bundle.device_weights))
    }
    if lags:
        older[f"{OLDER_WEIGHTS}1_old"] = bundle.device_weights[0]
    views = _named(bundle, kinds)
    for parameter, part, view in _parts(bundle):
        views[f"{part}/{parameter.name}"] = view
    return views | _named(bundle, older)


def older_views(bundle: Bundle) -> dict[str, Tensor]:
    """Return views of the device weights under the names that they have if they lag."""
    return _named(bundle, {f"{OLDER_WEIGHTS}1_old": bundle.device_weights[0]})


def _named(bundle: Bundle, kinds: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{kind}/{parameter.name}": parameter.view(flat)
        for kind, flat in kinds.items()
        for parameter in bundle.parameters
    }


def _parts(bundle: Bundle) -> Iterator[tuple[FlatParameter, str, Tensor]]:
    """Yield each parameter's parts of state, one kind of part after the other, as they are in files."""
    for segment in bundle.segments:
        if not segment.parts:
            continue
        inside = [p for p in bundle.parameters if segment.start <= p.start < segment.stop]
        for part in segment.kinds():
            for parameter in inside:
                yield parameter, part.name, segment.view(part, parameter)
