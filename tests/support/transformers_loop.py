"""A decoder of `transformers` beside the same decoder in layer form, and the loop in which `transformers` trains it.

Every document of a packed batch runs alone through the reference: it has no masks, positions or states of others that
could be wrong.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support import model_tools
from tests.support.rounding import assert_close_in_sums
from tests.support.toy_decoders import VOCAB, toy_config, toy_decoder
from torchround.engine.store.host_store import HostStore
from torchround.layer import IGNORED_LABEL, HFNames, LayeredModel
from torchround.models import FAMILIES, ModelConfigError

# eps well above the rounding of gradients: AdamW would turn the rounding of a vanishing one into a full step.
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-3}
DECAY, LR, MAX_NORM = 0.1, 1e-3, 1.0


@dataclass(frozen=True)
class Pair:
    """The reference, ours with the same weights in memory of its own, and the names of the tensors in its files."""

    theirs: nn.Module
    ours: LayeredModel
    names: HFNames
    config: Any
    family: str

    def build(self):
        return FAMILIES[self.family].build(self.config)


def make_pair(tools, model_type, family_name="transformers", **overrides):
    return pair_of(tools, toy_decoder(toy_config(model_type, **overrides)), family_name)


def pair_of(tools, theirs, family_name="transformers"):
    family = FAMILIES[family_name]
    config = family.config_from_hf(theirs.config.to_dict())
    ours, names = tools.materialise(family.build(config)), family.hf_names(config)
    with suppress(ModelConfigError):  # its files join tensors in a way that is not read in place
        names = family.names_in_folder(config, tools.released_tensors(theirs)).names
    tools.load_hf_weights(ours, names, theirs)
    return Pair(theirs, ours, names, config, family_name)


def document_logits(theirs, batch):
    """Return the logits `[B, T, V]` of a packed batch, each document by itself."""
    rows = []
    for tokens, ids in zip(batch.tokens, batch.document_ids, strict=True):
        documents = tokens.split(torch.unique_consecutive(ids, return_counts=True)[1].tolist())
        rows.append(torch.cat([theirs(input_ids=one[None], use_cache=False).logits[0] for one in documents]))
    return torch.stack(rows)


def loss_sum(theirs, batch):
    logits = document_logits(theirs, batch).float().flatten(0, 1)
    return F.cross_entropy(logits, batch.labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)


def compare(pair):
    batch = model_tools.micro_batch([[13, 1, 10], [24]], VOCAB)
    with torch.no_grad():
        # The same sums in other orders, through four blocks: some hundred terms each on the path of a logit.
        expected = document_logits(pair.theirs, batch)
        assert_close_in_sums(model_tools.all_logits(pair.ours, batch), expected, 1000, "logits")
    loss = loss_sum(pair.theirs, batch)
    ours = model_tools.loss_sum(pair.ours, batch)
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)
    pair.theirs.zero_grad()
    for layer in pair.ours.layers:
        layer.zero_grad()
    loss.backward()
    ours.backward()
    in_model = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    expected_gradients = {**in_model, **model_tools.released_gradients(pair.theirs)}
    for name, parameter in model_tools.stored_parameters(pair.ours).items():
        if not parameter.requires_grad:  # a constant that files hold
            continue
        assert_close_in_norm(parameter.grad, model_tools.gather(pair.names[name], expected_gradients), name)


def assert_close_in_norm(found, expected, name):
    error = (expected if found is None else found - expected).norm()
    # 1700 roundings of 2^-24 would be 1e-4; in the norm of a tensor most of them cancel. The second term is for
    # gradients that vanish but for rounding, such as that of a bias that a softmax does not see.
    assert error <= 1e-4 * expected.norm() + 1e-6 * expected.numel() ** 0.5, f"{name}: differs by {error}"


def reference_training(theirs, steps):
    theirs.train()
    groups = [[], []]
    for name, parameter in theirs.named_parameters():
        # Matrices decay. A stack of the experts' biases looks like one.
        groups[parameter.ndim > 1 and not name.endswith("_bias")].append(parameter)
    decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.0, DECAY), strict=True)]
    optimizer = torch.optim.AdamW(decays, lr=LR, **ADAMW)
    losses = []
    for batches in steps:
        mean = sum(loss_sum(theirs, batch) for batch in batches) / sum(b.num_labels() for b in batches)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean.detach()))
    return losses


def store_of(model, weights, dtype=torch.float32):
    store = HostStore(model, dtype)
    store.write_weights({name: weights[name].detach() for name in store.weights()})
    return store


def packed_steps(tools, num_steps, micro_batches=2, sequences=2):
    """The reference runs each document by itself, so one of the two `sequences` takes it little more than half as long."""
    cuts = ([[13, 1, 10], [24]], [[5, 19], [12, 12]])
    return [
        [
            replace(
                tools.micro_batch(cuts[index % 2][:sequences], VOCAB, seed=micro_batches * step + index),
                max_documents=3,
            )
            for index in range(micro_batches)
        ]
        for step in range(num_steps)
    ]
