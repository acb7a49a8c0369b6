"""Compiled layers: each kind once, the same bits on any number of devices and any partition, and a way out.

Most tests use `aot_eager`, which traces and differentiates as Inductor does but writes no code: it runs the
traced operations themselves.
"""

import logging
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.kernels import CountingMode
from tests.support import toy
from tests.support.faults import engine_threads
from tests.support.rounding import FP32, assert_states_close
from tests.support.small_decoders import decoder
from tests.support.torch_loop import host_engine, moment_free
from tests.support.torch_loop import train as train_by
from tests.support.toy import PARTITIONS, ToyBlock, planted_model, toy_batches, toy_engine, toy_model, train
from torchround.config import EngineTable
from torchround.engine.board import Board
from torchround.engine.compiled import CompiledShape, LayerCompiler
from torchround.engine.errors import DeviceMemoryError, EngineUsageError, PipelineError
from torchround.engine.store.bundles import owner_of
from torchround.layer import with_dropout_seeds
from torchround.optim import HostOptimizer
from torchround.planning.partition import Partition
from torchround.planning.update_modes import ASYNC
from torchround.trainer import layer_compiler

pytestmark = pytest.mark.compiles

BATCHES = toy_batches(4, micro_batches=4)
# A compiler may add up the terms of each sum in another order. Longest path: forward and backward through all
# blocks, whose sums have the widths of the model, its feed-forward and its sequences; then at most four
# updates.
TOY_TERMS = 4 * 3 * 6 * 64
FAMILY_TERMS = 2 * 3 * 2 * (4 * 128 + 2 * 320 + 50)


@pytest.fixture(autouse=True)
def no_warning_unless_expected(caplog, request):
    caplog.set_level(logging.WARNING, "torchround")
    yield
    if "warned" not in request.fixturenames:
        # PyTorch has warnings of its own, such as one on a machine with a CUDA compiler and no card.
        assert not [record for record in caplog.get_records("call") if record.name.startswith("torchround")]


@pytest.fixture
def warned(caplog):
    return lambda: [record.getMessage() for record in caplog.records]


def trained(compiler, partition="forward coarser", devices=2, batches=BATCHES, model=None, **settings):
    model = model or toy_model(tied=True)
    with toy_engine(PARTITIONS[partition], devices, model=model, compiler=compiler, **settings) as engine:
        losses = train(engine, batches)
        losses.append(engine.evaluate(batches[0]).loss())
    return losses, engine.store.named_views()


def assert_close(found, expected, terms=TOY_TERMS):
    assert found[0] == pytest.approx(expected[0], rel=terms * FP32)
    assert_states_close(found[1], expected[1], terms)


def graphs():
    return counters["stats"]["unique_graphs"]


def test_each_kind_is_compiled_once_for_each_size_and_nothing_after_the_second_step():
    compiler, before = LayerCompiler(toy_model(tied=True), "aot_eager"), graphs()
    blocks = [f"block.{index}" for index in range(5)]
    assert [kind.layer_names for kind in compiler.kinds] == [["embedding"], blocks, ["head"]]
    kinds, sizes, heads_of_evaluations = 3, 2, 2
    for steps in (2, 4):
        trained(compiler, devices=3, batches=BATCHES[:steps])
        assert graphs() - before == kinds * sizes + heads_of_evaluations


def test_gradients_of_16_bits_are_added_to_their_fp32_sums_in_one_pass():
    """Autograd's cast in between would read and write each gradient once more; the sums have the same bits."""
    torch.manual_seed(0)
    model = toy_model()
    block = model.layers[1].to_empty(device="cpu")
    for path, parameter in list(block.named_parameters()):
        leaf = torch.nn.Parameter(torch.randn(parameter.shape).bfloat16())
        leaf.grad_dtype, leaf.grad = torch.float32, torch.randn(parameter.shape)
        owner, name = owner_of(block, path)
        setattr(owner, name, leaf)
    micro_batch = BATCHES[0][0]
    shape = (*micro_batch.tokens.shape, len(block.norm))
    compiled = LayerCompiler(model, "aot_eager").compiled(1, block, Board())
    expected = {}
    for layer in (block, compiled):
        hidden = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
        sums = {path: leaf.grad.clone() for path, leaf in block.named_parameters()}
        output = layer(hidden, micro_batch)
        with CountingMode() as mode:
            output.backward(torch.ones_like(output))
        names = [operation.name for operation in mode.counted.operations]
        for path, leaf in block.named_parameters():
            if layer is block:
                expected[path] = leaf.grad.clone()
            else:
                torch.testing.assert_close(leaf.grad, expected[path], rtol=0, atol=0)
            leaf.grad.copy_(sums[path])
    assert "_to_copy" not in names


class AsksForLength(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, hidden, micro_batch):
        return hidden * self.weight * (2 if micro_batch.longest_document is None else 3)


def test_code_for_one_document_is_not_told_its_length():
    """Flash attention takes the length as a number, which compiled code has for a whole sequence alone."""
    model = toy_model()
    layer = AsksForLength()
    model = replace(model, layers=[model.layers[0], layer, *model.layers[2:]])
    compiled = LayerCompiler(model, "eager").compiled(1, layer, Board())
    hidden = torch.ones(1, 8, 4)
    for documents, longest, factor in ((1, 8, 2), (3, None, 2), (3, 5, 3), (1, None, 2)):
        micro_batch = replace(BATCHES[0][0], max_documents=documents, longest_document=longest)
        assert torch.equal(compiled(hidden, micro_batch), hidden * factor)


class OfThread(dict):
    """Compiled code under keys of each device thread, as cards have them."""

    def get(self, key):
        return super().get((threading.get_ident(), key))

    def __contains__(self, key):
        return super().__contains__((threading.get_ident(), key))

    def __setitem__(self, key, value):
        super().__setitem__((threading.get_ident(), key), value)


def test_devices_that_compile_each_for_itself_do_not_disturb_each_other():
    """A compiler's flags are the process's: compiled layers raised, uncompiled ones kept nothing and took other kernels."""

    def trace_for_long(graph, inputs):
        make_fx(lambda x: (time.sleep(0.3), x + 1)[1])(torch.ones(1))
        return graph if is_block(graph) else slow(graph)

    def slow(function):
        return lambda *arguments: (time.sleep(0.1), function(*arguments))[1]

    def run(compiler, devices):
        kept = (*((),) * 2, ("gate_up", "down"), *((),) * 4)
        partition = PARTITIONS["one layer a stage"]
        with toy_engine(partition, devices, model=model, compiler=compiler, kept=kept) as engine:
            return train(engine, batches), engine.store.named_views()

    class SlowBlock(ToyBlock):
        never_compiled = True
        forward = slow(ToyBlock.forward)

    # While the second device compiles a block, the first one runs the embedding, and then that one compiles while the third
    # one runs an uncompiled block.
    batches = [toy_batches(1, micro_batches=11)[0][1:]]
    model = toy_model()
    model.layers[2].__class__ = SlowBlock
    compiler = LayerCompiler(model, trace_for_long)
    for kind in compiler.kinds:
        kind.shapes = OfThread()
    found, expected = run(compiler, 3), run(None, 1)
    assert len({thread for kind in compiler.kinds for thread, _ in kind.shapes}) == 3
    assert found[0] == expected[0]
    toy.assert_same_state(found[1], expected[1])


def test_no_layer_is_compiled_during_the_step_of_a_torch_optimizer():
    """While a compiler is at work, `torch.optim` computes with tensors in the place of numbers, which gives other bits."""
    compiling, disturbed = threading.Event(), []

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            compiling.clear()
            if not disturbed:  # the second step's batch has another shape, which a device wants to compile now
                disturbed.append(compiling.wait(1.5))
            return super().step(closure)

    def backend(graph, inputs):
        compiling.set()
        return graph

    model = toy_model()
    optimizer = HostOptimizer(lambda named: Slow([p for _, p in named], lr=0.1))
    compiler = LayerCompiler(model, backend)
    first, second = toy_batches(2, micro_batches=2)
    with host_engine(model, moment_free(model, mode=ASYNC), optimizer, compiler=compiler) as engine:
        train_by(engine, [first[1:], second])
    assert disturbed == [False]


@pytest.mark.nightly
def test_inductors_code_gives_the_same_bits_on_any_devices_and_agrees_with_uncompiled_layers():
    batches = [micro_batches[1:] for micro_batches in BATCHES]  # of one size
    compiler = LayerCompiler(toy_model(tied=True))
    found = [
        trained(compiler, partition, devices, batches)
        for devices, partition in enumerate(("forward coarser", "one layer a stage", "one stage"), start=1)
    ]
    for losses, state in found[1:]:
        assert losses == found[0][0]
        toy.assert_same_state(state, found[0][1])
    assert_close(found[0], trained(None, batches=batches))
    assert [len(kind.shapes) for kind in compiler.kinds] == [1, 1, 2]


CASES = {
    "adapters with dropout": ("llama3", "debug", {}, ("q_proj", "down_proj")),
    "norms of heads": ("qwen3", "debug", {}, ()),
    "experts": ("qwen3", "debug_moe", {}, ()),
    "adapters on experts": ("qwen3", "debug_moe", {}, ("o_proj", "up_proj")),
    "sinks, windows and biases": ("gpt_oss", "debug", {"window": 4}, ()),
    "adapters beside biases": ("gpt_oss", "debug", {}, ("gate_up_proj", "down_proj")),
    "magnitudes beside dropout": ("llama3", "debug", {}, ("q_proj", "down_proj"), {"dora": True}),
}


def packed_batches(steps):
    return [
        with_dropout_seeds([replace(part, max_documents=4) for part in packed(micro_batches)], seed=7, step=step)
        for step, micro_batches in enumerate(toy_batches(steps, micro_batches=3))
    ]


def packed(micro_batches):
    for part in micro_batches[1:]:
        tokens = part.tokens.shape[1]
        ids = (torch.arange(tokens) >= tokens // 3).long().expand_as(part.tokens).contiguous()
        yield replace(part, document_ids=ids)


def family_run(case, compiles):
    family, flavor, changes, adapters, *settings = CASES[case]
    model = decoder(family, flavor, adapters, (4, 8.0, 0.25), *settings, vocab_size=50, num_layers=2, **changes)
    compiler = LayerCompiler(model, "aot_eager") if compiles else None
    partition = Partition((1, 1), 2, (1, 1)) if compiles else Partition((2,), 2, (2,))
    with toy_engine(partition, 1 + compiles, model=model, compiler=compiler) as engine:
        losses = train(engine, packed_batches(2), lr=1e-3)
    return losses, engine.store.named_views(), compiler


@pytest.mark.parametrize("case", CASES)
def test_every_family_compiles_and_agrees_with_itself_uncompiled(case):
    found, expected = family_run(case, True), family_run(case, False)
    assert_close(found, expected, FAMILY_TERMS)
    compiled = [bool(kind.shapes) for kind in found[2].kinds]
    assert compiled == [*[True] * (len(compiled) - 1), False]  # the head adds to its weight's gradient itself


def test_only_layers_of_equal_settings_are_of_one_kind():
    model = toy_model()
    model.layers[2].depth = 2
    names = [kind.layer_names for kind in LayerCompiler(model, "eager").kinds]
    assert names == [["embedding"], ["block.0", "block.2", "block.3", "block.4"], ["block.1"], ["head"]]
    settings = {"dora": True, "alpha_pattern": {"layers.0.self_attn.q_proj": 3.0}}
    targets = ("q_proj", "k_proj")
    model = decoder("llama3", "debug", targets, (4, 8.0, 0.0), settings, vocab_size=50, num_layers=3)
    names = [kind.layer_names for kind in LayerCompiler(model, "eager").kinds]
    assert names == [["embedding"], ["block.0"], ["block.1", "block.2"], ["head"]]
    stacks = decoder("gpt_oss", "debug", ("down_proj",), vocab_size=50, num_layers=3)  # every other one has a window
    assert ["block.0", "block.2"] in [kind.layer_names for kind in LayerCompiler(stacks, "eager").kinds]


def test_a_kind_that_cannot_be_compiled_runs_as_it_is_with_one_warning(warned):
    def looks_at_values(hidden, micro_batch):
        assert hidden.isfinite().all().item(), "the hidden state is not finite"
        return hidden

    model = planted_model(looks_at_values)
    compiler = LayerCompiler(model, "aot_eager")
    assert_close(trained(compiler, model=model), trained(None, model=model))
    [message] = warned()
    assert "engine.compile: block.0 .. block.4 cannot be compiled (UserError" in message
    assert [len(kind.shapes) for kind in compiler.kinds] == [2, 0, 4]


def test_compile_options_reach_inductor(warned):
    table = EngineTable(compile=True, compile_options={"_raise_error_for_testing": True})
    model, options = toy_model(), table.compile_options
    assert layer_compiler(model, table, "cpu").options == options
    assert len(trained(LayerCompiler(model, options=options), model=model)[0]) == len(BATCHES) + 1
    assert warned() and all("_raise_error_for_testing is set" in message for message in warned())


def test_an_option_that_inductor_lacks_is_named_and_the_hundreds_that_it_has_are_not():
    with pytest.raises(EngineUsageError, match=r"engine.compile_options: Unexpected .* option triton.cudagraph$"):
        LayerCompiler(toy_model(), options={"triton.cudagraph": True})


class OutOfRoomError(torch.OutOfMemoryError):
    pass


@pytest.fixture
def planted(monkeypatch):
    left = [0]

    # PyTorch reads the schema of an operation from its annotations.
    @torch.library.custom_op("tests::allocate", mutates_args=())
    def allocate(hidden: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise OutOfRoomError("8 GiB were asked for")
        return hidden.clone()

    @allocate.register_fake
    def _(hidden):
        return torch.empty_like(hidden)

    class Allocate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            return allocate(hidden)

        @staticmethod
        def backward(ctx, grad):
            return grad

    forward = ToyBlock.forward

    def allocating(self, hidden, micro_batch):
        hidden = Allocate.apply(hidden) if self.allocates else hidden
        return forward(self, hidden, micro_batch)

    monkeypatch.setattr(ToyBlock, "forward", allocating)
    return left


def allocating_model():
    model = toy_model()
    for index, layer in enumerate(model.layers[1:-1]):
        layer.allocates = index == 3
    return model


@pytest.mark.parametrize(("compiles", "call"), [(False, 1), (True, 6)])
def test_out_of_memory_inside_a_layer_is_the_same_error_compiled_or_not(planted, compiles, call):
    model = allocating_model()
    planted[0] = call
    compiler = LayerCompiler(model, "aot_eager") if compiles else None
    engine = toy_engine(PARTITIONS["one layer a stage"], 2, model=model, compiler=compiler)
    with pytest.raises(PipelineError, match=r"OutOfRoomError: 8 GiB were asked for") as raised:
        train(engine, BATCHES)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert raised.value.location.layers == ("block.3",)
    assert not engine_threads()


def is_block(graph):
    return any("silu" in str(node.target) for node in graph.graph.nodes)


def test_compiling_for_longer_than_the_hang_limit_is_no_hang():
    def slow(graph, inputs):
        if is_block(graph):
            time.sleep(7.0)  # the limit is so long that no other wait of a loaded machine passes it
        return graph

    compiler = LayerCompiler(toy_model(tied=True), slow)
    batches = [micro_batches[1:2] for micro_batches in BATCHES]
    trained(compiler, "one stage", devices=1, batches=batches, hang_timeout_s=5.0)


def test_threads_that_wait_for_a_compiler_end_with_the_engine():
    """Block 0 is compiled for its first micro-batch, and the embedding waits for its second one, of another size."""
    compiling, left_behind = threading.Event(), []

    def slow(graph, inputs):
        if is_block(graph):
            compiling.set()
            give_up_s = time.monotonic() + 30.0
            while "torchround cpu:0" in engine_threads() and time.monotonic() < give_up_s:
                time.sleep(0.01)
            left_behind.extend(engine_threads())
        return graph

    model = toy_model()
    compiler = LayerCompiler(model, slow)
    engine = toy_engine(PARTITIONS["one layer a stage"], 2, model=model, compiler=compiler)
    with pytest.raises(KeyboardInterrupt), engine:
        engine.forward_backward(BATCHES[0])
        assert compiling.wait(30.0)
        raise KeyboardInterrupt
    assert "torchround cpu:1" in left_behind and "torchround cpu:0" not in left_behind
    assert not engine_threads()


@pytest.mark.parametrize("wraps", [False, True], ids=["as it is", "as a compiler's error"])
def test_too_little_memory_to_compile_is_an_error_because_bits_must_not_depend_on_free_memory(
    planted, wraps, monkeypatch
):
    model, rehearse = allocating_model(), CompiledShape.rehearse
    planted[0] = 1

    def wrapping(*arguments):
        try:
            rehearse(*arguments)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("the compiler failed") from error

    if wraps:
        monkeypatch.setattr(CompiledShape, "rehearse", wrapping)
    compiler = LayerCompiler(model, "aot_eager")
    engine = toy_engine(PARTITIONS["one layer a stage"], 1, model=model, compiler=compiler)
    with pytest.raises(PipelineError, match=r"no memory to compile block.3 .*engine.compile = false") as raised:
        train(engine, BATCHES)
    assert isinstance(raised.value.__cause__, DeviceMemoryError)


def test_a_shape_that_cannot_be_compiled_decides_nothing_for_another_one(warned):
    """Otherwise results would depend on which of two devices meets its shape first."""
    model = toy_model()

    def backend(graph, inputs):
        if any(tensor.shape[:1] == (3,) for tensor in inputs if isinstance(tensor, torch.Tensor) and tensor.ndim == 3):
            raise ValueError("not this one")
        return graph

    compiler = LayerCompiler(model, backend)
    block = model.layers[1].to_empty(device="cpu")
    compiled = compiler.compiled(1, block, Board())
    for size in (3, 3, 2):
        part = toy_batches(1, micro_batches=2)[0][1]
        part = replace(part, tokens=part.tokens[:1].repeat(size, 1), labels=part.labels[:1].repeat(size, 1))
        compiled(torch.randn(size, part.tokens.shape[1], toy.WIDTH), part)
    assert len(compiler.kinds[1].shapes) == 1
    [message] = warned()
    assert "cannot be compiled" in message
