"""Import then export gives back the same tensors, and `transformers` computes the same from what is written."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.released_run import saved_config
from tests.support.rounding import assert_close_in_sums
from tests.support.small_run import flip_last_bit, tensors_in
from torchround.checkpoint import Checkpointer
from torchround.commands import export_hf
from torchround.commands.configured_model import checkpoint_weights
from torchround.engine.store.host_store import HostStore
from torchround.hf import HFError, PretrainedWeights
from torchround.models import FAMILIES

KINDS = ["llama3", "llama3 tied", "qwen3", "qwen3 moe", "gpt_oss"]
SINGLE = "model.safetensors"


def save_run(folder, store, **model_table):
    config = saved_config(model=model_table)
    return Checkpointer(folder / "checkpoints").save(3, store.named_views(), {"config": config})


def imported(release, folder):
    model = release.family.build(release.config)
    names = release.family.hf_names(release.config)
    redundant = release.family.names_in_folder(release.config, ()).redundant
    store = HostStore(model, torch.bfloat16)
    store.initialize(model, 0, PretrainedWeights(release.folder, names, model.stored_shapes(), redundant).load)
    return save_run(folder, store, family=release.family.name, hf_path=str(release.folder))


def assert_same_tensors(ours, theirs):
    mine, expected = tensors_in(ours), tensors_in(theirs)
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name


def export(release, folder, *options, checkpoint=None):
    checkpoint, output = checkpoint or imported(release, folder), folder / "exported"
    assert export_hf.main([str(checkpoint), str(output), f"--model.hf_path={release.folder}", *options]) == 0
    return output


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("torchround.hf.tensor_folder.PIECE_BYTES", 100)


@pytest.mark.parametrize("kind", KINDS)
def test_import_then_export_gives_every_tensor_back_and_transformers_the_same_logits(
    kind, releases, tmp_path, monkeypatch
):
    release = releases(kind)
    monkeypatch.setattr("torchround.hf.export.SHARD_BYTES", 20_000)
    output = export(release, tmp_path)
    assert_same_tensors(output, release.folder)
    shards = sorted(output.glob("*.safetensors"))
    where = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(shards) > 1 and set(where.values()) == {shard.name for shard in shards}
    assert all(name in load_file(output / file) for name, file in where.items())
    tokens = torch.randint(0, 61, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(each).float()(tokens).logits for each in (output, release.folder)
        )
    assert torch.equal(ours, theirs)


def test_tensors_of_mixed_types_and_longer_than_a_piece_keep_each_its_own(hf, tmp_path, small_pieces):
    release = hf.release("qwen3 moe", tmp_path / "release")
    tensors = load_file(release.folder / SINGLE)
    for index, name in enumerate(sorted(tensors)):
        tensors[name] = tensors[name].to((torch.float32, torch.bfloat16)[index % 2])
    save_file(tensors, release.folder / SINGLE)
    output = export(release, tmp_path)
    assert (output / SINGLE).is_file()
    assert_same_tensors(output, release.folder)
    (tmp_path / "half").mkdir()
    half = export(release, tmp_path / "half", "--dtype=float16")
    assert {tensor.dtype for tensor in tensors_in(half).values()} == {torch.float16}


@pytest.mark.parametrize(
    "family, flavor", [("llama3", "debug"), ("qwen3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug")]
)
def test_a_flavor_trained_from_scratch_is_loaded_by_transformers_with_our_logits(family, flavor, tmp_path, tools):
    table = FAMILIES[family]
    model = tools.materialise(table.build(table.config_from_flavor(flavor)))
    store = HostStore(model, torch.float32)
    store.initialize(model, 0)
    weights = tools.stored_parameters(model)
    with torch.no_grad():
        for name, view in store.weights().items():
            weights[name].copy_(view)
    checkpoint = save_run(tmp_path, store, family=family, flavor=flavor)
    assert export_hf.main([str(checkpoint), str(tmp_path / "exported"), "--dtype=float32"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    batch = tools.micro_batch([[40]], 260)
    with torch.no_grad():
        expected = tools.all_logits(model, batch)
        assert_close_in_sums(loaded(batch.tokens).logits, expected, 1000)


def test_quantisation_is_gone_from_the_config_and_tokenizer_files_are_copied(hf, tmp_path):
    release = hf.release("gpt_oss", tmp_path / "release")
    path = release.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names:
        (release.folder / name).write_text(name)
    output = export(release, tmp_path)
    assert "quantization_config" not in json.loads((output / "config.json").read_text())
    assert all((output / name).is_file() for name in names)
    assert (output / "chat_template.jinja").read_text() == "chat_template.jinja"


def test_what_cannot_be_exported_is_said_and_leaves_nothing(releases, tmp_path, capsys):
    release, output = releases("llama3"), tmp_path / "exported"
    checkpoint = imported(release, tmp_path)

    def refusal(*arguments):
        assert export_hf.main([*map(str, arguments)]) == 2
        assert not output.exists() or not any(output.iterdir())
        return capsys.readouterr().err

    base = f"--model.hf_path={release.folder}"
    output.mkdir()
    assert "is there already" in refusal(checkpoint, output, base)
    output.rmdir()
    assert f"legal: one checkpoint, such as {checkpoint}\n" in refusal(checkpoint.parents[1], output)
    assert "but there is no such folder" in refusal(checkpoint, output, f"--model.hf_path={tmp_path / 'gone'}")
    assert "lora.rank = 0" in refusal(checkpoint, output, base, "--adapters")
    damaged = next(checkpoint.glob("tensors-*.safetensors"))
    flip_last_bit(damaged)
    assert damaged.name in refusal(checkpoint, output, base)
    shutil.rmtree(checkpoint)
    refusal(checkpoint, output, base)


def test_links_that_leave_the_model_s_folder_are_refused_but_those_of_a_hub_s_cache_are_not(releases, tmp_path, capsys):
    """A hub's cache has snapshots of links to its blobs, both below one folder `models--*`."""
    release = releases("llama3")
    checkpoint = imported(release, tmp_path)
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "rev"
    shutil.copytree(release.folder, snapshot.parents[1] / "blobs")
    snapshot.mkdir(parents=True)
    for blob in (snapshot.parents[1] / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(blob)
    output = export(SimpleNamespace(folder=snapshot), tmp_path, checkpoint=checkpoint)
    assert_same_tensors(output, release.folder)
    shutil.rmtree(output)
    (tmp_path / "precious").write_text("precious")
    (snapshot / "merges.txt").symlink_to(tmp_path / "precious")
    capsys.readouterr()
    assert export_hf.main([str(checkpoint), str(output), f"--model.hf_path={snapshot}"]) == 2
    assert "merges.txt is a link to" in capsys.readouterr().err and not output.exists()
    (snapshot / "merges.txt").unlink()
    # Weights under a name that the look for links leaves out.
    (snapshot / "weights").symlink_to(tmp_path / "precious")
    index = snapshot / "model.safetensors.index.json"
    index.unlink()
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "weights"}}))
    assert export_hf.main([str(checkpoint), str(output), f"--model.hf_path={snapshot}"]) == 2
    assert "is not the name of a safetensors file" in capsys.readouterr().err and not output.exists()


def test_everything_is_on_the_disk_before_the_folder_has_its_name(releases, tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def recorded(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    release = releases("llama3")
    checkpoint = imported(release, tmp_path)
    monkeypatch.setattr(os, "fsync", recorded)
    output = export(release, tmp_path, checkpoint=checkpoint)
    unfinished = tmp_path / "exported.tmp"
    written = [unfinished / path.relative_to(output) for path in output.rglob("*")]
    assert synced[-2:] == [unfinished, tmp_path] and set(written) == set(synced[:-2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_weights_are_exported_with_all_their_bits_or_rounded_as_pytorch_does(
    releases, tmp_path, small_pieces, dtype
):
    release = releases("qwen3 moe")
    model, generator = release.family.build(release.config), torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator) for name, shape in model.stored_shapes().items()}
    exports = []
    for split in (True, False):
        store = HostStore(model, torch.bfloat16 if split else torch.float32)
        store.write_weights(values)
        assert ("residual/head.norm.weight" in store.named_views()) == split
        path = save_run(tmp_path / str(split), store, family=release.family.name, hf_path=str(release.folder))
        exports.append(tmp_path / f"exported-{split}")
        name = str(dtype).removeprefix("torch.")
        assert (
            export_hf.main([str(path), str(exports[-1]), f"--model.hf_path={release.folder}", f"--dtype={name}"]) == 0
        )
    assert_same_tensors(*exports)
    head = tensors_in(exports[0])["model.norm.weight"]
    assert torch.equal(head, values["head.norm.weight"].to(dtype))


@pytest.mark.parametrize(
    "forged",
    [
        {"residual/a": torch.zeros(3, 2).short()},
        {"weights/a": torch.zeros(2, 3).bfloat16(), "residual/a": torch.zeros(3, 2).short()},
        {"weights/a": torch.zeros(2, 3), "residual/a": torch.zeros(2, 3).short()},
        {"weights/a": torch.zeros(2, 3).bfloat16(), "residual/a": torch.zeros(2, 3).int()},
    ],
    ids=["no weight", "another shape", "a whole weight", "another type"],
)
def test_a_residual_that_fits_no_weight_is_refused(tmp_path, forged):
    checkpoint = Checkpointer(tmp_path).save(1, forged, {})
    with pytest.raises(HFError, match="residual/a fits no weight"):
        checkpoint_weights(checkpoint)
