"""`engine.compile = "auto"`: layers are compiled on accelerators that Inductor writes code for, and nowhere else."""

from dataclasses import replace

import pytest
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.toy import toy_model
from torchround import accelerators, trainer
from torchround.accelerators import AcceleratorKind
from torchround.commands.train_model import with_kept_choices
from torchround.config import Config, EngineTable, RunTable, TrainingTable
from torchround.engine.compiled import LayerCompiler
from torchround.layer import MicroBatch
from torchround.models import FAMILIES
from torchround.planning.cards import find_device
from torchround.planning.memory import GIB
from torchround.planning.plan import Plan
from torchround.planning.plan_report import missing_bytes, plan_for
from torchround.run.hardware import Hardware
from torchround.run.numbers import compiles_layers, layer_works, run_question
from torchround.run.run_folder import RunFolder

pytestmark = pytest.mark.compiles


class WithCompiler(AcceleratorKind):
    """A kind that Inductor writes code for, which stands for the CPU here."""

    compiles = True


@pytest.fixture
def compiling_kind(monkeypatch):
    monkeypatch.setitem(accelerators.kinds(), "cpu", WithCompiler("cpu"))


def test_auto_compiles_layers_on_kinds_that_inductor_writes_code_for(compiling_kind):
    def compiles(setting, kind):
        return trainer.layer_compiler(toy_model(), EngineTable(compile=setting), kind) is not None

    assert compiles("auto", "cpu") and compiles("auto", "cuda") and not compiles("auto", "npu")
    assert not compiles(False, "cpu") and compiles(True, "npu")


def test_auto_compiles_no_layer_on_the_cpu():
    assert trainer.layer_compiler(toy_model(), EngineTable(), "cpu") is None


@pytest.mark.parametrize(("family", "flavor"), [("llama3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug")])
@pytest.mark.parametrize("setting", ["auto", True, False])
def test_a_plan_counts_the_gradients_of_a_compiled_layer_where_layers_are_compiled(family, flavor, setting):
    """They leave a compiled layer all at once, in the weights' number format."""
    model = FAMILIES[family].build(FAMILIES[family].config_from_flavor(flavor))
    block = model.layers[1]
    gradients = 2 * sum(parameter.numel() for parameter in block.parameters())
    table = EngineTable(compile=setting)
    for kind, compiled in (("cuda", setting in (True, "auto")), ("cpu", setting is True)):
        counted = layer_works(model, 2, kind, compiles_layers(table, kind), 64, 2)[1].workspace_bytes
        assert counted - block.work(2, 64, 2, kind).workspace_bytes == compiled * gradients


@pytest.mark.parametrize("setting", ["auto", True])
def test_auto_leaves_layers_uncompiled_if_a_run_fits_only_then_and_its_plan_keeps_that(setting, caplog, tmp_path):
    model = FAMILIES["llama3"].build(FAMILIES["llama3"].config_from_flavor("debug"))
    config = Config.model_construct(training=TrainingTable(seq_len=16), engine=EngineTable(compile=setting))

    def asked(device_bytes):
        return run_question(model, config, Hardware("cuda", 1, device_bytes, spec=find_device("h100")))

    compiled = asked(GIB)
    both = (compiled, compiled.uncompiled())
    needed, without = (1 + missing_bytes(replace(each, device_bytes=1))[0] for each in both)
    assert (without < needed) == (setting == "auto") and not caplog.messages
    for device_bytes, falls_back in ((needed, False), (needed - 1, True), (without, True), (without - 1, False)):
        caplog.clear()
        question = asked(device_bytes)
        assert question.stays_uncompiled == len(caplog.messages) == (falls_back and setting == "auto")
        assert all("layers run uncompiled" in message for message in caplog.messages)
        if question.stays_uncompiled:
            plan = Plan.from_json(plan_for(question).to_json())
            assert plan.stays_uncompiled and plan.device_bytes <= device_bytes
            folder = RunFolder(RunTable(folder=str(tmp_path)))
            folder.path.mkdir(exist_ok=True)
            (folder.path / "plan.json").write_text(plan.to_json())
            assert with_kept_choices(compiled, None, folder).stays_uncompiled
    assert "stays_uncompiled" not in plan_for(compiled).to_json()
    assert trainer.layer_compiler(model, config.engine, "cuda", stays_uncompiled=True) is None


@pytest.mark.parametrize(
    ("family", "flavor"),
    [("llama3", "3.1-8B"), ("qwen3", "1.7B"), ("qwen3", "4B"), ("qwen3", "30B-A3B"), ("gpt_oss", "20B")],
)
def test_a_compiled_block_keeps_no_more_for_its_backward_than_the_plan_counts(family, flavor, monkeypatch):
    """By the compiler's own cut between forward and backward, of shapes that need no memory."""
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    model = FAMILIES[family].build(FAMILIES[family].config_from_flavor(flavor))
    block, (batch, tokens) = model.layers[2], (4, 2048)  # one without a window
    names = [name for name, _ in block.named_parameters()]
    kept = []

    def forward_graph(graph, inputs):
        nodes = list(graph.graph.nodes)
        given = {storage(node) for node in nodes if node.op == "placeholder"}
        output, *saved = nodes[-1].args[0]
        tensors = [node for node in saved if isinstance(node.meta.get("val"), torch.Tensor)]
        found = {storage(node) for node in tensors} - given - {storage(output)}
        kept.append(sum(nbytes for _, nbytes in found))
        return graph

    def storage(node):
        memory = node.meta["val"].untyped_storage()
        return StorageWeakRef(memory), memory.nbytes()

    def run(hidden, integers, *parameters):
        micro_batch = MicroBatch(integers, integers, integers, integers, max_documents=1)
        return functional_call(block, dict(zip(names, parameters, strict=True)), (hidden, micro_batch))

    with FakeTensorMode():
        hidden = torch.empty(batch, tokens, block.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        integers = torch.zeros(batch, tokens, dtype=torch.int64)
        parameters = [torch.empty(p.shape, dtype=torch.bfloat16, requires_grad=True) for p in block.parameters()]
        compiled = aot_function(
            run,
            fw_compiler=forward_graph,
            bw_compiler=lambda graph, inputs: graph,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        compiled(hidden, integers, *parameters)
    planned = block.work(batch, tokens, 2, "cuda").activation_bytes
    [found] = kept
    # The plan counts the block's input, which another layer made.
    assert 0.97 * planned < found + hidden.nbytes <= planned


@pytest.mark.parametrize(
    "adapters",
    [
        pytest.param((), id="full", marks=pytest.mark.nightly),
        pytest.param(("--lora.rank=4", "--lora.alpha=8", "--lora.dropout=0.25"), id="LoRA"),
    ],
)
def test_a_run_with_auto_compiles_evaluates_and_resumes_to_the_same_bits(
    small_runs, monkeypatch, compiling_kind, adapters
):
    """The whole command, with the compiler's tracing but without its code, on a kind with a compiler."""
    made = []

    def traced(model, options):
        made.append(LayerCompiler(model, "aot_eager", options))
        return made[-1]

    monkeypatch.setattr(trainer, "LayerCompiler", traced)
    validation = ("--validation.interval_steps=2", "--data.validation_fraction=0.1")
    planning = ("--engine.plan=none", "--engine.measure_steps=2", "--lr_schedule.decay=none")
    settings = (*validation, *planning, *adapters)
    assert small_runs("whole", *settings) == 0
    assert small_runs("parts", *settings, "--training.steps=3") == 0
    assert small_runs("parts", *settings) == 0
    small_runs.assert_same("parts", "whole")
    # One compiler for a run's two engines: the one that measures and the one after it.
    # The head is never compiled.
    assert len(made) == 3 and all(kind.shapes for compiler in made for kind in compiler.kinds[:-1])
