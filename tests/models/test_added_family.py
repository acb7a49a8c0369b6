"""A family that a user's own module adds: the one of docs/models.md ("Adding a family"), with a block of its own."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support import transformers_loop
from tests.support.pages import example, example_text
from tests.support.small_run import SmallRuns, small_runs  # noqa: F401  (a fixture)
from tests.support.toy_decoders import toy_config, toy_decoder
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import export_hf, try_model
from torchround.layer import LayerWork
from torchround.planning.partition import Partition

PAGE = "docs/models.md", "class SquaredReLU"
PLAN = "--engine.plan={ forward = [4, 3], fused = 1, backward = [3, 4], rounds = 1 }"
MINE = ("--model.module=my_family", "--model.family=arcee", "--model.flavor=debug", PLAN)


@pytest.fixture
def arcee():
    return example(*PAGE).ARCEE


class LayerNorm(nn.LayerNorm):
    """A norm with a bias, by the protocol of norms."""

    def __init__(self, size):
        super().__init__(size, device="meta")

    def init_weights(self):
        with torch.no_grad():
            self.weight.fill_(1.0)
            self.bias.fill_(0.5)

    def work(self, num_tokens, element_bytes, device=""):
        return LayerWork(activation_bytes=2 * num_tokens * self.weight.numel() * element_bytes)


def test_it_computes_what_transformers_computes(arcee, tools, monkeypatch):
    monkeypatch.setattr(transformers_loop, "FAMILIES", {"arcee": arcee})
    pair = transformers_loop.pair_of(
        tools, toy_decoder(toy_config("arcee", intermediate_size=52, pad_token_id=None)), "arcee"
    )
    transformers_loop.compare(pair)
    assert arcee.config_from_hf(arcee.config_to_hf(pair.config)) == pair.config
    assert pair.names.keys() == tools.stored_parameters(pair.ours).keys()


def test_the_engine_trains_it_as_a_plain_loop_does_with_another_norm_too(arcee, train_as_a_loop):
    def with_another_norm(config):
        return [replace(block, norm=LayerNorm) for block in arcee.blocks(config)]

    config = arcee.config_from_flavor("debug", num_layers=2, hidden_size=16, head_dim=4, ffn_size=24, vocab_size=50)
    for family in (arcee, replace(arcee, blocks=with_another_norm)):
        train_as_a_loop(family.build(config), Partition((2,), 2, (2,)), [[[3, 5]], [[8]]])
    model = family.build(config)
    assert isinstance(model.layers[-1].norm, LayerNorm)
    assert family.hf_names(config)["head.norm.bias"] == "model.norm.bias"


@pytest.fixture
def runs(small_runs, monkeypatch):  # noqa: F811
    monkeypatch.syspath_prepend(str(small_runs.folder))
    (small_runs.folder / "my_family.py").write_text(example_text(*PAGE))
    return small_runs


def test_a_family_of_a_users_module_trains_resumes_and_is_exported(runs):
    assert runs("run", *MINE, "--training.steps=2") == 0
    assert runs("run", *MINE, "--training.steps=3", "--checkpoint.export=weights") == 0
    assert list((runs.folder / "outputs" / "run" / "export").glob("*/model*.safetensors"))


def test_a_module_that_only_a_run_s_folder_names_is_not_imported(runs, capsys, monkeypatch):
    assert runs("run", *MINE, "--training.steps=1") == 0
    monkeypatch.delitem(sys.modules, "my_family")
    run = runs.folder / "outputs" / "run"
    exporting = [str(run / "checkpoints" / checkpoint_name(1)), str(runs.folder / "exported")]
    trying = ["--run", str(run), "--prompt=a", "--max-tokens=1", "--engine.devices=cpu"]
    for command, arguments in ((export_hf, exporting), (try_model, trying)):
        assert command.main(arguments) == 2
        assert "importing it would run it" in capsys.readouterr().err and "my_family" not in sys.modules
    assert export_hf.main([*exporting, f"--config={run / 'config.toml'}"]) == 0
    assert try_model.main([*trying, "--model.module=my_family"]) == 0


def test_a_module_without_families_or_without_a_writer_is_one_message(runs, capsys):
    assert runs("run", "--model.module=json", "--model.family=mine") == 2
    assert "model.module: json gives no FAMILIES" in capsys.readouterr().err
    assert runs("run", *MINE, "--metrics.module=json") == 2
    assert "metrics.module: json gives no make_writer" in capsys.readouterr().err
