"""The reference loop, which every row of the table is compared with, follows PyTorch alone."""

import pytest
import torch
from torch import nn

from tests.support.reference import Reference
from tests.support.rounding import FP32, assert_close_in_sums
from tests.support.small_decoders import small_decoder
from tests.support.toy import MAX_NORM, OPTIMIZER, toy_batches, toy_model, toy_store
from torchround.layer import with_dropout_seeds

STEPS, LR = 4, 1e-2


def test_a_tied_weight_follows_ordinary_autograd_and_torch_adamw_to_rounding():
    """One shared `nn.Parameter`, clip_grad_norm_ and torch.optim.AdamW."""
    model, batches = toy_model(tied=True), toy_batches(STEPS, micro_batches=4)
    loop = Reference.of(model, toy_store(model))
    module = nn.Sequential(*toy_model(tied=True).layers).to_empty(device="cpu")
    module[-1].weight = module[0].weight  # to_empty unties
    by_name = {
        f"{name}.{path}": parameter
        for name, layer in reversed(list(zip(model.names, module, strict=True)))
        for path, parameter in layer.named_parameters()
    }
    for name, value in loop.weights.items():
        by_name[name].data.copy_(value)
    losses = loop.train(batches, LR)
    # The tied gradient has two terms, and torch's update rounds elsewhere: about ten roundings a step.
    terms = 12 * STEPS
    assert losses == pytest.approx(torch_training(module, batches), rel=terms * FP32)
    for name, value in loop.weights.items():
        assert_close_in_sums(value, by_name[name].data, terms, name)
    assert min(loop.norms) > MAX_NORM, "the test must clip"


def torch_training(module, batches):
    decayed = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    numbers = {"betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps, "weight_decay": OPTIMIZER.weight_decay}
    optimizer = torch.optim.AdamW(groups, lr=LR, **numbers)
    losses = []
    for micro_batches in batches:
        labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        total = 0.0
        for micro_batch in micro_batches:
            hidden = None
            for layer in module:
                hidden = layer(hidden, micro_batch)
            (hidden / labels).backward()
            total += hidden.item()
        torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / labels)
    return losses


def test_each_setting_is_a_part_of_it():
    """Otherwise a row could not tell whether the engine heeds it."""
    plain = toy_batches(STEPS, 4)
    seeded = [with_dropout_seeds(batch, 7, step) for step, batch in enumerate(plain)]

    def losses(model, batches=plain, **options):
        return tuple(Reference(model, toy_store(model).weights(), OPTIMIZER, **options).train(batches, LR))

    late = {"update": "bounded", "clip": "layer"}
    of_toy = [{}, {"clip": "layer"}, {"max_norm": 0.0}, {"update": "async"}, {"update": "predict"}, {"rounds": 2}]
    of_toy += [late | {"stale": 1}, late | {"stale": 6}, {"dtype": torch.bfloat16}, {"accumulate": torch.bfloat16}]
    assert len({losses(toy_model(), **options) for options in of_toy}) == len(of_toy)
    assert losses(toy_model(), **late) == losses(toy_model(), clip="layer"), "without stale layers bounded is sync"
    adapters = small_decoder("llama3", "debug", ("q_proj", "down_proj"))
    assert losses(adapters) != losses(adapters, seeded)
