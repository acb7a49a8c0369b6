"""The names and joins of files by the tables of `transformers`, compared with the files that it writes and loads."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.borrowed_toys import meta_model, write_toy
from torchround.hf import HFError, PretrainedWeights
from torchround.hf.export import unstack, write_tensors
from torchround.hf.tensor_folder import read_folder
from torchround.layer import names_in
from torchround.models import ModelConfigError
from torchround.models.borrowed.borrowed_family import ReleasedNames

KINDS = ["qwen2", "qwen2 tied", "gemma2", "phi3", "gpt_neox", "qwen3_moe", "mixtral", "qwen3_next"]
SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp("toy")
            theirs, meta = write_toy(kind, folder), meta_model(kind)
            own = {f"ours {name}": name for name, _ in meta.named_parameters()}
            made[kind] = SimpleNamespace(folder=folder, theirs=theirs, meta=meta, own=own)
        return made[kind]

    return get


def shapes(toy):
    return {stored: toy.meta.get_parameter(name).shape for stored, name in toy.own.items()}


def read(toy, folder=None):
    folder = folder or toy.folder
    found = ReleasedNames(toy.meta, toy.own).in_folder(read_folder(folder))
    return PretrainedWeights(folder, found.names, shapes(toy), found.redundant, carried=found.carried)


def filled(toy, weights):
    views = {name: torch.full(shape, float("nan")) for name, shape in shapes(toy).items()}
    weights.load({name: nullcontext(view) for name, view in views.items()})
    return views


def assert_is_the_model(toy, views):
    for stored, name in toy.own.items():
        assert torch.equal(views[stored], toy.theirs.get_parameter(name)), name


def rewritten(toy, folder, change=lambda name: name, **more):
    tensors = {change(name): tensor for name, tensor in load_file(toy.folder / SINGLE).items()} | more
    tensors.pop(None, None)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_and_exported_under_their_names_and_joins(kind, toys, tmp_path):
    toy = toys(kind)
    views, names = filled(toy, read(toy)), ReleasedNames(toy.meta, toy.own).in_folder(read_folder(toy.folder)).names
    assert_is_the_model(toy, views)
    assert sorted(name for entry in names.values() for name in names_in(entry)) == sorted(read_folder(toy.folder))
    save_file({name: view.contiguous() for name, view in views.items()}, tmp_path / "checkpoint.safetensors")
    stored = read_folder(tmp_path, "checkpoint.safetensors")
    (tmp_path / "export").mkdir()
    write_tensors(tmp_path / "export", unstack(names, stored, lambda name: torch.float32))
    theirs, ours = load_file(toy.folder / SINGLE), load_file(tmp_path / "export" / SINGLE)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    toy.theirs.config.save_pretrained(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, parameter in toy.theirs.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_gates_and_ups_of_experts_are_mapped_from_the_file_in_the_order_of_memory(toys):
    toy = toys("qwen3_moe")
    weights = read(toy)
    mapped = weights.map_tensors(toy.own, torch.float32)
    assert mapped.keys() == toy.own.keys()
    for stored, name in toy.own.items():
        memory = torch.cat([tensor.memory for tensor in mapped[stored]])
        assert torch.equal(memory, toy.theirs.get_parameter(name).flatten()), name


def test_files_without_the_prefix_of_the_body_and_with_the_modules_own_names_are_read(toys, tmp_path):
    toy = toys("qwen2 tied")
    folder = rewritten(toy, tmp_path, lambda name: name.removeprefix("model."))
    assert_is_the_model(toy, filled(toy, read(toy, folder)))
    toy = toys("mixtral")
    tensors = {name: parameter.detach().clone() for name, parameter in toy.theirs.named_parameters()}
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    assert_is_the_model(toy, filled(toy, read(toy, tmp_path)))


def test_tensors_of_old_files_and_those_that_transformers_leaves_out_are_redundant(toys, tmp_path):
    toy = toys("qwen2 tied")
    head = load_file(toy.folder / SINGLE)["model.embed_tokens.weight"].clone()
    old = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    assert_is_the_model(toy, filled(toy, read(toy, rewritten(toy, tmp_path, **old))))
    toy = toys("qwen3_next")  # heads for several tokens
    folder = rewritten(toy, tmp_path, **{"mtp.norm.weight": torch.ones(24)})
    assert_is_the_model(toy, filled(toy, read(toy, folder)))


def test_a_join_that_is_not_read_in_place_is_refused_with_the_parameter_and_the_way_out(toys, tmp_path):
    toy = toys("olmo_hybrid")
    with pytest.raises(ModelConfigError, match=r"conv1d\.weight as .*k_conv1d\.weight.*save_pretrained"):
        read(toy)
    AutoModelForCausalLM.from_pretrained(toy.folder).save_pretrained(tmp_path, save_original_format=False)
    assert_is_the_model(toy, filled(toy, read(toy, tmp_path)))


def test_a_buffer_that_files_fill_is_not_taken_for_redundant(toys):
    toy = toys("deepseek_v3")
    with pytest.raises(HFError, match=r"not part of the model: \S+e_score_correction_bias$"):
        read(toy)
