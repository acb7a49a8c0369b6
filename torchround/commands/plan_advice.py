"""Advice for a run that does not fit: changes of the config, a smaller flavor, and how much memory would do."""

from collections.abc import Iterator
from dataclasses import replace

from torchround.commands.configured_model import build_model, flavors_of
from torchround.commands.machine_lines import fewest_machines, planned_machines
from torchround.commands.plan_run import question_of
from torchround.config import Options
from torchround.pipeline.enough_memory import enough_memory
from torchround.pipeline.plan_report import PlanReport, fits
from torchround.run.hardware import Hardware
from torchround.run.numbers import num_parameters


def advice(options: Options, hardware: Hardware, report: PlanReport) -> Iterator[str]:
    """Yield lines about what would make the run fit; none if it does."""
    if report.plan is not None:
        return
    helps = [change.setting for change in report.changes if change.fits]
    yield from (f"  with {setting}: fits" for setting in helps)
    others = [change.setting for change in report.changes if not change.fits]
    if others:
        yield f"  not enough alone: {', '.join(others)}"
    if flavor := largest_flavor_that_fits(options, hardware):
        yield f'  with model.flavor = "{flavor}": fits'
    if machines := fewest_machines(report.question):
        yield f"  on {machines} such machines: fits"
    if enough := str(enough_memory(report.question)):
        yield f"  as it is, the run fits with {enough}"


def largest_flavor_that_fits(options: Options, hardware: Hardware) -> str | None:
    """Return the largest smaller flavor of the family that fits `hardware`; None if no flavor was asked for, or none fits."""
    table = options.config.model
    if table.flavor is None or table.shape is not None:
        return None
    sizes: dict[str, int] = {}
    for name in flavors_of(table.family):
        sizes[name], _ = num_parameters(build_model(_with_flavor(options, name), warns=False))
    smaller = [name for name in sizes if sizes[name] < sizes[table.flavor] and not name.startswith("debug")]
    for name in sorted(smaller, key=lambda name: -sizes[name]):
        changed = _with_flavor(options, name)
        model, machines = build_model(changed, warns=False), planned_machines(changed.config.machines)
        if fits(replace(question_of(changed.config, model, hardware, (), machines), given=None)):
            return name
    return None


def _with_flavor(options: Options, flavor: str) -> Options:
    model = options.config.model.model_copy(update={"flavor": flavor})
    # The plan of another number of layers says nothing about this one.
    engine = options.config.engine.model_copy(update={"plan": None})
    return replace(options, config=options.config.model_copy(update={"model": model, "engine": engine}))
