"""Split weights in the host store: written, read, refreshed, resumed; and segments for other rules."""

from dataclasses import replace

import pytest
import torch

from tests.support.optimizers import OPTIMIZERS
from tests.support.rounding import ties_up
from tests.support.toy import PARTITIONS, ToyBlock, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.config import AdamWTable
from torchround.config.optimizer_tables import MuonTable
from torchround.engine.errors import EngineUsageError
from torchround.engine.store.bundles import parameter_facts
from torchround.optim.optimizer import make_optimizer
from torchround.optim.rules.muon import Muon
from torchround.planning.update_modes import ASYNC, SYNC

BF16 = torch.bfloat16


def values_with_ties(store):
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name, value in store.weights().items():
        drawn = torch.randn(value.shape, generator=generator)
        flat = drawn.view(-1)
        flat[0::5] = ((flat[0::5].view(torch.int32) & -0x10000) | 0x8000).view(torch.float32)
        flat[1::7], flat[2::7], flat[3::7] = 0.0, -0.0, 1e-41
        flat[4::7] = 3.0e38
        found[name] = drawn
    return found


def bits(values):
    return values.contiguous().view(torch.int32)


@pytest.mark.parametrize(("mode", "step"), [(SYNC, 0), (ASYNC, 3)], ids=["sync", "async"])
def test_written_weights_read_back_bit_for_bit_and_are_rounded_for_devices(mode, step):
    store = toy_store(toy_model(tied=True), BF16, mode=mode)
    store.resume(step, step)
    written = values_with_ties(store)
    store.write_weights(written)
    assert written.keys() == store.weights().keys() and store.splits_weights
    for name, value in store.weights().items():
        assert torch.equal(bits(value), bits(written[name])), name
    for bundle in store.bundles:
        for parameter in bundle.parameters:
            expected = ties_up(written[parameter.name], BF16)
            for device_weights in bundle.device_weights:
                found = parameter.view(device_weights)
                assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), parameter.name


def test_reading_weights_makes_one_copy_at_a_time_and_no_way_to_write():
    store = toy_store(toy_model(), BF16)
    name = "block.1.up.weight"
    before = store.weights()[name].clone()
    store.weights()[name].zero_()
    assert torch.equal(store.weights()[name], before)
    one, other = store.weights()[name], store.weights()[name]
    assert one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["split", "fp32"])
def test_a_writer_of_some_values_leaves_the_others_and_one_that_fails_leaves_all_as_they_were(dtype):
    store = toy_store(toy_model(), dtype)
    name = "block.1.up.weight"
    expected = {key: value.clone() for key, value in store.weights().items()}
    expected[name][3] = 0.7
    with store.writing() as weights, weights[name] as weight:
        weight[3] = 0.7
    if dtype is BF16:  # whole weights are written in place
        with pytest.raises(KeyError), store.writing() as weights, weights[name] as weight:
            weight.zero_()
            raise KeyError
    for key, value in store.weights().items():
        assert torch.equal(value, expected[key]), key


def test_segments_cover_a_bundle_and_their_state_is_found_by_parameter():
    model = toy_model()
    store = toy_store(model, BF16, optimizer=make_optimizer(AdamWTable(state="compact")))
    for bundle in store.bundles:
        ends = [0, *(segment.stop for segment in bundle.segments)]
        assert [segment.start for segment in bundle.segments] == ends[:-1] and ends[-1] == bundle.numel
    views = store.named_views()
    for index, view in enumerate(views.values()):
        view.copy_(torch.full_like(view, index % 100))
    for index, (name, view) in enumerate(views.items()):  # no two views share memory
        assert bool((view == index % 100).all()), name
    name = "block.1.up.weight"
    assert views[f"exp_avg/{name}"].dtype == torch.int8 and views[f"exp_avg_sq/{name}"].dtype == torch.uint8
    numel = views[f"weights/{name}"].numel()
    assert views[f"exp_avg_scale/{name}"].shape == (-(-numel // 128),)
    assert views[f"exp_avg/{name}"].shape == views[f"weights/{name}"].shape


def test_other_hyperparameters_keep_the_state_and_change_the_rules_of_segments():
    """All parameters have equal rules without weight decay; a table with decay then needs two."""
    model = toy_model()
    store = toy_store(model, optimizer=make_optimizer(AdamWTable(weight_decay=0.0, state="compact")))
    assert len({segment.rule for bundle in store.bundles for segment in bundle.segments}) == 1
    for index, view in enumerate(store.named_views().values()):
        view.copy_(torch.full_like(view, index % 100))
    before = {name: view.clone() for name, view in store.named_views().items()}
    store.assign_rules(model, make_optimizer(AdamWTable(weight_decay=0.1, state="compact")))
    assert {len(bundle.segments) for bundle in store.bundles} == {1, 2}
    assert {name: view.data_ptr() for name, view in store.named_views().items()}.keys() == before.keys()
    for name, view in store.named_views().items():
        assert torch.equal(view, before[name]), name
    for bundle in store.bundles:
        for segment in bundle.segments:
            decays = {len(p.shape) >= 2 for p in bundle.parameters if segment.start <= p.start < segment.stop}
            assert decays == {segment.rule.weight_decay > 0}


class BlockWithEmptyParameters(ToyBlock):
    def __init__(self):
        super().__init__()
        self.no_rows = torch.nn.Parameter(torch.empty(0, 16, device="meta"))
        self.nothing = torch.nn.Parameter(torch.empty(0, device="meta"))


@pytest.mark.parametrize("table", [OPTIMIZERS["adamw compact"], OPTIMIZERS["muon"]], ids=["adamw compact", "muon"])
def test_a_parameter_without_elements_is_in_one_segment_and_trains(table):
    model = toy_model()
    model = replace(model, layers=(*model.layers[:2], BlockWithEmptyParameters(), *model.layers[3:]))
    optimizer = make_optimizer(table)
    store = toy_store(model, BF16, optimizer=optimizer)
    rules = {name: optimizer.rule_of(facts) for name, facts in parameter_facts(model).items()}
    for bundle in store.bundles:
        for parameter in bundle.parameters:
            found = [s.rule for s in bundle.segments if s.start <= parameter.start < s.stop]
            assert found == [rules[parameter.name]], parameter.name
    with toy_engine(PARTITIONS["one stage"], 1, model=model, store=store, optimizer=table) as engine:
        losses = train(engine, toy_batches(2, micro_batches=1))
    assert losses[0] != losses[1] and store.step == 2


def test_rules_that_part_what_is_updated_together_are_refused():
    class ByRows(Muon):
        def rule_of(self, parameter):
            return replace(super().rule_of(parameter), lr_ratio=float(parameter.shape[0]))

    model = toy_model()
    store = toy_store(model, optimizer=make_optimizer(MuonTable()))
    with pytest.raises(EngineUsageError, match="with several rules"):
        store.assign_rules(model, ByRows(MuonTable()))


def test_rules_that_keep_other_state_are_refused():
    model = toy_model()
    store = toy_store(model)
    with pytest.raises(EngineUsageError, match="exact.*compact"):
        store.assign_rules(model, make_optimizer(AdamWTable(state="compact")))
    assert {segment.format.name for bundle in store.bundles for segment in bundle.segments} == {"exact"}
