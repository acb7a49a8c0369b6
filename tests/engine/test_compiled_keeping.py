"""What a compiled layer keeps: all that its compiled forward returns, with the same bits after a replay.

`aot_eager` traces, differentiates and cuts into forward and backward as Inductor does, and runs the traced operations.
"""

from contextlib import nullcontext

import pytest
import torch

from tests.support.small_decoders import decoder
from tests.support.toy import toy_batches
from torchround import keeping
from torchround.engine.board import Board
from torchround.engine.compiled import KeptForward, LayerCompiler
from torchround.engine.worker.slots import flatten
from torchround.layer import KEEPABLE, with_dropout_seeds

pytestmark = pytest.mark.compiles

CASES = {
    "dense": ("llama3", "debug", {}, (), torch.float32),
    "dense, bfloat16": ("qwen3", "debug", {}, (), torch.bfloat16),
    "float16": ("llama3", "debug", {}, (), torch.float16),
    "adapters with dropout": ("llama3", "debug", {}, ("q_proj", "down_proj"), torch.bfloat16),
    "magnitudes": ("llama3", "debug", {}, ("q_proj", "down_proj"), torch.bfloat16, {"dora": True}),
    "experts": ("qwen3", "debug_moe", {}, (), torch.float32),
    "adapters on experts": ("qwen3", "debug_moe", {}, ("o_proj", "up_proj"), torch.float32),
    "sinks and windows": ("gpt_oss", "debug", {"window": 4}, (), torch.bfloat16),
}


class Case:
    """A block of a family in one slot of memory, as a stage binds it, plain and compiled, and a micro-batch for it."""

    def __init__(self, case, backend="aot_eager"):
        family, flavor, changes, adapters, dtype, *settings = CASES[case]
        model = decoder(family, flavor, adapters, (4, 8.0, 0.25), *settings, vocab_size=50, num_layers=2, **changes)
        self.block = model.layers[1]
        self.dtype, self.width = dtype, self.block.hidden_size
        parameters = dict(self.block.named_parameters())
        memory = torch.empty(sum(p.numel() for p in parameters.values()), dtype=dtype)
        memory.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
        start = 0
        for path, parameter in parameters.items():
            owner, _, name = path.rpartition(".")
            value = memory[start : start + parameter.numel()].view(parameter.shape)
            leaf = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(self.block.get_submodule(owner), name, leaf)
            start += parameter.numel()
        [micro_batches] = toy_batches(1, micro_batches=2)
        self.micro_batch = with_dropout_seeds(micro_batches, seed=7, step=3)[1].for_layer(1)
        self.compiled = LayerCompiler(model, backend).compiled(1, self.block, Board())

    def hidden(self, seed=1):
        shape = (*self.micro_batch.tokens.shape, self.width)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def recorded(self, names=KEEPABLE, seed=1):
        with torch.no_grad(), keeping.recording(names) as record:
            self.compiled(self.hidden(seed), self.micro_batch)
        return [tensor.clone() for tensor in record.tensors]

    def results(self, context=None, seed=1):
        self.block.zero_grad()
        hidden = self.hidden(seed).requires_grad_()
        with context or nullcontext():
            outputs = flatten(self.compiled(hidden, self.micro_batch))[0]
        numbers = torch.Generator().manual_seed(2)
        gradients = [torch.randn(output.shape, generator=numbers).to(output.dtype) for output in outputs]
        torch.autograd.backward(outputs, gradients)
        trained = [parameter.grad for parameter in self.block.parameters() if parameter.requires_grad]
        return [*(output.detach() for output in outputs), hidden.grad, *trained]


@pytest.fixture
def runs(monkeypatch):
    count, made = [0], KeptForward.__init__

    def counting(self, code):
        def run(inputs):
            count[0] += 1
            return code(inputs)

        made(self, run)

    monkeypatch.setattr(KeptForward, "__init__", counting)
    return count


def assert_equal(found, expected):
    assert len(found) == len(expected) > 2
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("case", CASES)
def test_a_replayed_layer_has_the_same_bits_and_runs_no_forward(case, runs):
    case = Case(case)
    expected = case.results()
    kept = case.recorded()
    before = runs[0]
    assert_equal(case.results(keeping.replaying(KEEPABLE, kept)), expected)
    assert runs[0] == before > 0


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["dense, bfloat16", "adapters with dropout", "experts"])
def test_inductors_code_has_the_same_bits_after_a_replay(case, runs):
    case = Case(case, "inductor")
    expected, other = case.results(), case.results(seed=5)
    kept, of_other = case.recorded(), case.recorded(seed=5)
    before = runs[0]
    assert_equal(case.results(keeping.replaying(KEEPABLE, of_other), seed=5), other)
    assert_equal(case.results(keeping.replaying(KEEPABLE, kept)), expected)
    assert runs[0] == before > 0


def test_a_layer_keeps_its_memory_once_and_no_weight():
    """Counted: the output, the norms' sums, and what products and attention read, but no weight and nothing twice."""
    case = Case("dense")
    kept = case.recorded()
    addresses = [tensor.data_ptr() for tensor in kept]
    assert len(set(addresses)) == len(kept) > 5
    total = sum(tensor.nbytes for tensor in kept)
    batch, tokens = case.micro_batch.tokens.shape
    work = case.block.work(batch, tokens, case.dtype.itemsize, "cpu")
    assert case.micro_batch.tokens.numel() * case.width * 4 < total <= work.activation_bytes + work.boundary_bytes


@pytest.mark.parametrize("names", [(), ("qkv",), KEEPABLE[1:]])
def test_a_compiled_layer_keeps_nothing_unless_all_is_asked_for(names):
    case = Case("dense")
    expected = case.results()
    assert case.recorded(names) == []
    assert_equal(case.results(keeping.replaying(names, [])), expected)


def test_the_first_call_may_replay_what_another_device_kept():
    """Each device compiles for itself, and one may hold backward stages of this kind of layer alone."""
    expected, kept = Case("dense").results(), Case("dense").recorded()
    assert_equal(Case("dense").results(keeping.replaying(KEEPABLE, kept)), expected)


def test_tensors_of_another_layer_are_an_error_with_both_sizes():
    case = Case("dense")
    kept = case.recorded()
    with pytest.raises(keeping.KeptActivationError, match=rf"{kept[0].nbytes}.*its code returns"):
        case.results(keeping.replaying(KEEPABLE, kept[:-1]))


def test_a_layer_that_cannot_be_compiled_keeps_nothing():
    """Another device may have run it compiled before its compiler failed here."""
    kept = Case("dense").recorded()

    def fails(graph, inputs):
        raise RuntimeError("no such kernel")

    case = Case("dense", fails)
    expected = case.results()
    assert case.recorded() == []
    assert_equal(case.results(keeping.replaying(KEEPABLE, kept)), expected)
