"""Losses and weights on one card equal a plain CUDA loop's bit for bit, for any number of workers that share it.

The tests set deterministic mode and switch TF32 off. Both are the caller's settings, which the engine leaves
alone.
"""

import pytest
import torch

from tests.support.cuda_toy import DeviceLoop, cuda_engine
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_model, toy_store, train
from torchround.engine.store.bundles import ASYNC
from torchround.layer import MicroBatch
from torchround.models import FAMILIES
from torchround.pipeline.partition import Partition

pytestmark = pytest.mark.gpu

STEPS = 6
LR = 1e-2
WORKERS = [1, 2, 4]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = [
    ("one stage", False, "float32"),
    ("one layer a stage", False, "float32"),
    ("one layer a stage", True, "bfloat16"),
    ("forward coarser", True, "float32"),
    ("forward coarser", False, "bfloat16"),
    ("backward coarser", False, "float32"),
]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """PyTorch's deterministic algorithms, with the cuBLAS workspace that they demand."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = tf32


def device_loop(model, store, tied, dtype):
    weights = {name: view.float().clone() for name, view in store.weights().items()}
    return DeviceLoop(model, weights, tied, "cuda", dtype)


@pytest.mark.parametrize(("partition", "tied", "dtype"), CASES)
@pytest.mark.parametrize("workers", WORKERS)
def test_sync_training_is_bitwise_that_of_a_plain_cuda_loop(workers, partition, tied, dtype):
    model, batches = toy_model(tied), toy_batches(STEPS, micro_batches=4)
    store = toy_store(model, DTYPES[dtype], pinned=True)
    loop = device_loop(model, store, tied, DTYPES[dtype])
    with cuda_engine(model, store, PARTITIONS[partition], workers) as engine:
        losses = train(engine, batches, LR)
    assert losses == loop.train(batches, LR)
    assert_same_state(store.named_views(), loop.state())
    store.close()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", WORKERS)
def test_async_training_is_bitwise_a_plain_cuda_loop_that_applies_gradients_one_step_late(
    workers, dtype, tied
):
    model, batches = toy_model(tied), toy_batches(STEPS, micro_batches=4)
    store = toy_store(model, DTYPES[dtype], policy=ASYNC, pinned=True)
    loop = device_loop(model, store, tied, DTYPES[dtype])
    with cuda_engine(model, store, PARTITIONS["backward coarser"], workers) as engine:
        losses = train(engine, batches, LR)
    expected, waiting = [], None
    for micro_batches in batches:
        loss, gradients = loop.gradients(micro_batches)  # at the weights before the last update
        expected.append(loss)
        if waiting is not None:
            loop.update(waiting, LR)
        waiting = gradients
    loop.update(waiting, LR)
    assert losses == expected
    views = store.named_views()
    assert_same_state({name: views[name] for name in loop.state()}, loop.state())
    store.close()


@pytest.mark.parametrize("options", [{"rounds": 2}, {"layerwise_recompute": True}], ids=str)
def test_rounds_and_layerwise_recompute_do_not_depend_on_the_number_of_workers(options):
    states = []
    for workers in WORKERS:
        model = toy_model(tied=True)
        store = toy_store(model, torch.bfloat16, pinned=True)
        with cuda_engine(model, store, PARTITIONS["forward coarser"], workers, **options) as engine:
            train(engine, toy_batches(STEPS, micro_batches=5), LR)
        states.append(store.named_views())
    for state in states[1:]:
        assert_same_state(state, states[0])


@pytest.mark.parametrize("workers", WORKERS)
def test_workers_that_take_turns_to_upload_give_the_same_bits(workers):
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=4)
    store = toy_store(model, pinned=True)
    loop = device_loop(model, store, False, torch.float32)
    turns = [range(workers)]
    with cuda_engine(model, store, PARTITIONS["one layer a stage"], workers, turns=turns) as engine:
        losses = train(engine, batches, LR)
    assert losses == loop.train(batches, LR)
    assert_same_state(store.named_views(), loop.state())
    store.close()


def test_micro_batches_that_grow_and_shrink_give_the_same_bits():
    """Staging buffers are outgrown and replaced while other streams still use the old ones."""
    model = toy_model()
    generator = torch.Generator().manual_seed(1)
    batches = [[tokens(size, length, generator) for size in (1, 4, 2)] for length in (4, 24, 8, 48, 16)]
    store = toy_store(model, pinned=True)
    loop = device_loop(model, store, False, torch.float32)
    with cuda_engine(model, store, PARTITIONS["forward coarser"], 2) as engine:
        losses = []
        for micro_batches in batches:
            losses += train(engine, [micro_batches], LR)
            assert engine.evaluate(micro_batches[:1]).loss() > 0
    assert losses == loop.train(batches, LR)
    assert_same_state(store.named_views(), loop.state())


def tokens(size, length, generator):
    drawn = torch.randint(37, (size, length + 1), generator=generator)
    positions = torch.arange(length).expand(size, length).contiguous()
    return MicroBatch(
        drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), positions, torch.zeros_like(positions)
    )


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_real_model_gives_the_same_bits_on_any_number_of_workers(family):
    config = FAMILIES[family].config_from_flavor("debug", vocab_size=37)
    losses, states = [], []
    for workers, partition in ((1, Partition((), 8, ())), (2, Partition((3, 3), 2, (2, 2, 2))), (4, None)):
        model = FAMILIES[family].build(config)
        store = toy_store(model, torch.bfloat16, pinned=True)
        partition = partition or Partition((1,) * 7, 1, (1,) * 7)
        with cuda_engine(model, store, partition, workers) as engine:
            losses.append(train(engine, toy_batches(STEPS, micro_batches=4), 1e-3))
        states.append(store.named_views())
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][-1] < losses[0][0]
    assert_same_state(states[1], states[0])
    assert_same_state(states[2], states[0])


def test_the_callers_settings_and_streams_are_left_alone():
    torch.backends.cuda.matmul.allow_tf32 = True
    stream, before = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    model = toy_model()
    store = toy_store(model, pinned=True)
    with cuda_engine(model, store, PARTITIONS["one stage"], 2) as engine:
        train(engine, toy_batches(2, micro_batches=2), LR)
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.cuda.current_stream() == stream and torch.cuda.current_device() == 0
    assert torch.equal(torch.cuda.get_rng_state(), before)
