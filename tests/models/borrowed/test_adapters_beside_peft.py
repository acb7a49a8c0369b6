"""Adapters on borrowed models against the package peft, on the same model of `transformers`."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.support.toy_decoders import VOCAB
from tests.support.transformers_loop import engine_of, loss_sum, make_pair, packed_steps, reference_training, train
from torchround.engine.store.host_store import HostStore
from torchround.models import FAMILIES, LoraShape, adapter_names, add_adapters
from torchround.pipeline.partition import Partition

RANK, ALPHA = 3, 12.0
CASES = [
    ("gemma2", ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    pytest.param("phi3", ("qkv_proj", "gate_up_proj"), marks=pytest.mark.nightly),
    pytest.param("qwen3_next", ("q_proj", "in_proj_qkvz", "out_proj"), marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("model_type", "targets"), CASES)
def test_training_of_adapters_equals_that_of_peft(model_type, targets, tools):
    pair = make_pair(tools, model_type)
    model, names = pair.build(), FAMILIES["transformers"].module_names(pair.config)
    add_adapters(model, names, LoraShape(RANK, ALPHA, 0.0, targets))
    peft = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), lora_dropout=0.0)
    theirs = get_peft_model(copy.deepcopy(pair.theirs), peft)
    by_name = {name.replace(".default.", "."): parameter for name, parameter in theirs.named_parameters()}
    weights = {name: parameter.detach() for name, parameter in tools.stored_parameters(pair.ours).items()}
    ours = adapter_names(model, names)
    assert set(ours.values()) == {name for name in by_name if "lora_" in name}
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in ours.items():  # `lora_B` is not zero
            weights[name] = by_name[tensor].normal_(std=0.1, generator=generator).clone()
    store, steps = HostStore(model), packed_steps(tools, 3, sequences=1)
    store.write_weights({name: weights[name] for name in store.weights()})
    frozen = {name: view.clone() for name, view in store.weights().items() if name not in ours}
    batch = tools.micro_batch([[13, 1, 10], [24]], VOCAB)
    with engine_of(model, store, Partition((1, 2), 3, (2, 1)), num_devices=2) as engine:
        losses = train(engine, steps)
        evaluated = engine.evaluate([batch]).loss()
    assert losses == pytest.approx(reference_training(theirs, steps), rel=1e-5)
    with torch.no_grad():
        assert evaluated == pytest.approx(float(loss_sum(theirs, batch) / batch.num_labels()), rel=1e-5)
    # As for whole models: an update changes a weight by at most lr / eps = 1 per unit of gradient.
    for name, tensor in ours.items():
        torch.testing.assert_close(store.weights()[name], by_name[tensor].detach(), rtol=0, atol=1e-5)
    for name, before in frozen.items():
        assert torch.equal(store.weights()[name], before), name
