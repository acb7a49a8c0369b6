"""The optimizer of a run in numbers for the planner: bytes that it keeps and moves, and what devices do for its updates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch

from torchround.config import AdamWTable, EngineTable, OptimizerTable
from torchround.engine.store.segments import parameter_facts
from torchround.engine.worker.orthogonalise import STEPS, scratch_bytes, slot_bytes
from torchround.layer import LayeredModel
from torchround.optim.formats import StateFormat
from torchround.optim.optimizer import UpdateRule, make_optimizer
from torchround.pipeline.update_costs import (
    JOB_ELEMENT_BYTES,
    JobWork,
    RuleCosts,
    UpdateCosts,
    newton_schulz_flops,
)

COMPACT_STATE = 'optimizer.state = "compact"'


@dataclass(frozen=True)
class OptimizerNumbers:
    """What the planner has to know of a run's optimizer.

    - `updates`: bytes of each rule. Rules that keep and move the same are one.
    - `rule_of`: by stored name of a trained parameter, its place in `updates.rules`.
    - `jobs`: by layer, what a device does for its update; empty if devices do nothing.
    """

    updates: UpdateCosts
    rule_of: Mapping[str, int]
    jobs: tuple[JobWork, ...] = ()


def optimizer_numbers(
    model: LayeredModel, table: OptimizerTable, engine: EngineTable, dtype: torch.dtype
) -> OptimizerNumbers:
    """Ask the optimizer of `table` for its numbers in a run of `model` with weights of `dtype`."""
    trained, others = trained_names(model), _smaller_settings(table, engine)
    facts_of = {name: facts for name, facts in parameter_facts(model).items() if name in trained}
    optimizers = [make_optimizer(settings) for settings in (table, *others.values())]
    kept = {
        name: tuple(_costs(optimizer.rule_of(facts), optimizer.format) for optimizer in optimizers)
        for name, facts in facts_of.items()
    }
    distinct = list(dict.fromkeys(kept.values())) or [(RuleCosts(0.0),) * len(optimizers)]
    own, *smaller = (
        UpdateCosts(
            rules,
            splits_weights=optimizer.splits_weights and dtype == torch.bfloat16,
            predicts=engine.delay_correction != "none" and table.can_predict,
        )
        for optimizer, rules in zip(optimizers, zip(*distinct, strict=True), strict=True)
    )
    updates = replace(own, smaller=tuple(zip(others, smaller, strict=True)))
    rules = {name: optimizers[0].rule_of(facts) for name, facts in facts_of.items()}
    return OptimizerNumbers(
        updates, {name: distinct.index(costs) for name, costs in kept.items()}, _jobs(model, rules)
    )


def _smaller_settings(table: OptimizerTable, engine: EngineTable) -> dict[str, OptimizerTable]:
    """Return settings that keep less for some parameters at least, by the change of the config that makes them."""
    changes = {}
    if table.state != "compact":
        changes[COMPACT_STATE] = table.model_copy(update={"state": "compact"})
    if not isinstance(table, AdamWTable):
        keys = ['optimizer.name = "adamw"', *([COMPACT_STATE] if changes else [])]
        if engine.update == "async" and engine.delay_correction != "none" and not table.can_predict:
            keys.append(
                'engine.delay_correction = "none"'
            )  # AdamW would correct the delay, which takes 2 bytes
        changes[" and ".join(keys)] = AdamWTable(state="compact")
    return changes


def trained_names(model: LayeredModel) -> frozenset[str]:
    """Return the stored names of trained parameters."""
    return frozenset(
        f"{name}.{path}"
        for name, layer in zip(model.names, model.layers, strict=True)
        for path, parameter in layer.named_parameters()
        if parameter.requires_grad
    )


def _costs(rule: UpdateRule, state_format: StateFormat) -> RuleCosts:
    values = sum(state_format.element_bytes(value) for value in rule.values)
    return RuleCosts(values, JOB_ELEMENT_BYTES if rule.uses_direction else 0.0)


def _jobs(model: LayeredModel, rules: Mapping[str, UpdateRule]) -> tuple[JobWork, ...]:
    """Return each layer's work for its update; empty if no rule has any."""
    if not any(rule.uses_direction for rule in rules.values()):
        return ()
    return tuple(
        reduce(
            add,
            (
                job_work(parameter.shape)
                for path, parameter in layer.named_parameters()
                if f"{name}.{path}" in rules and rules[f"{name}.{path}"].uses_direction
            ),
            JobWork(),
        )
        for name, layer in zip(model.names, model.layers, strict=True)
    )


def job_work(shape: Sequence[int]) -> JobWork:
    """Count the orthogonalisation of a matrix, or of a stack of them."""
    return JobWork(
        flops=newton_schulz_flops(shape, STEPS),
        copied_bytes=JOB_ELEMENT_BYTES * math.prod(shape),
        slot_bytes=slot_bytes(shape),
        scratch_bytes=scratch_bytes(shape),
    )
