"""A frozen base that stays in its files: trained as if copied, read when used, never written."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.toy import assert_same_state, toy_engine, train
from torchround.engine.store.host_store import HostStore
from torchround.hf import PretrainedWeights
from torchround.hf.tensor_folder import map_file, read_header, view_of
from torchround.models import FAMILIES, LoraShape, add_adapters
from torchround.planning.partition import Partition

PARTITION = Partition((1, 2), 1, (1, 1, 1))  # embedding; two blocks; head, and back one by one
BF16 = torch.bfloat16
ATTENTION = ("q_proj", "o_proj")
KINDS = ["llama3", "llama3 tied", "qwen3 moe", "gpt_oss"]


def with_adapters(family, config):
    model = family.build(config)
    add_adapters(model, family.hf_names(config), LoraShape(4, 8.0, 0.0, ATTENTION))
    return model


def open_weights(release, model):
    names = release.family.hf_names(release.config)
    redundant = release.family.names_in_folder(release.config, ()).redundant
    return PretrainedWeights(release.folder, names, model.stored_shapes(), redundant)


def frozen_names(model):
    return [
        f"{name}.{path}"
        for name, layer in zip(model.names, model.layers, strict=True)
        for path, parameter in layer.named_parameters()
        if not parameter.requires_grad and f"{name}.{path}" in model.stored_shapes()
    ]


def opened(release, mapped):
    model = with_adapters(release.family, release.config)
    weights = open_weights(release, model)
    in_files = weights.map_tensors(frozen_names(model), BF16) if mapped else {}
    store = HostStore(model, BF16, mapped=in_files)
    store.initialize(model, 0, weights.load)
    return model, store, in_files


def batches(tools, steps=2):
    return [
        [tools.micro_batch([[12, 20], [32]], 61, seed=seed) for seed in (2 * step, 2 * step + 1)]
        for step in range(steps)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bitwise_that_of_a_copied_base(kind, releases, tools):
    release, runs = releases(kind), []
    before = {path: path.read_bytes() for path in release.folder.glob("*.safetensors")}
    for mapped in (False, True):
        model, store, in_files = opened(release, mapped)
        with toy_engine(PARTITION, model=model, store=store, num_devices=2) as engine:
            runs.append((train(engine, batches(tools)), store.named_views()))
        assert len(in_files) == (len(frozen_names(model)) if mapped else 0)
    assert runs[0][0] == runs[1][0]
    adapters = {name: view for name, view in runs[0][1].items() if "lora_" in name}
    assert_same_state(runs[1][1], adapters)
    assert {path: path.read_bytes() for path in before} == before


def test_what_does_not_lie_in_the_file_as_it_is_used_is_copied(hf, tmp_path):
    release = hf.release("llama3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    wide = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
    tensors |= {name: tensors[name].float() for name in wide}
    save_file(tensors, path)
    model, store, in_files = opened(release, mapped=True)
    weights, copied = store.weights(), {"head.norm.weight", "block.0.mlp.up.weight"}
    assert set(frozen_names(model)) - in_files.keys() == {n for n in weights if "lora_" not in n} == copied
    assert torch.equal(weights["block.0.mlp.up.weight"], tensors[wide[1]].bfloat16())
    content = path.read_bytes()  # and now all tensors begin at an odd byte
    header_bytes = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + header_bytes] + b" "  # legal: a header may end in spaces
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + header_bytes :])
    model, store, in_files = opened(release, mapped=True)
    assert in_files == {} and len(store.weights()) == len(model.stored_shapes())


def uses_mappings():
    path = Path("replaced.safetensors")
    numbers = view_of(map_file(path), read_header(path)["numbers"])
    path.rename("deleted")
    path.write_bytes(b"another file of the same name")
    Path("deleted").unlink()
    assert numbers.memory[-1].item() == 3.0
    print("still there", flush=True)
    path = Path("cut.safetensors")
    numbers = view_of(map_file(path), read_header(path)["numbers"])
    os.truncate(path, 4096)
    print(numbers.memory[-1].item())


def test_a_deleted_file_is_there_until_the_end_and_one_cut_short_ends_the_process(processes, tmp_path):
    for name in ("replaced", "cut"):
        save_file({"numbers": torch.full((100_000,), 3.0)}, tmp_path / f"{name}.safetensors")
    done = processes.run("tests.hf.test_mapping:uses_mappings", folder=tmp_path)
    assert (done.returncode, done.text()) == (-signal.SIGBUS, "still there\n")


def resident_bytes(path):
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    sizes = [re.search(r"^Rss: +(\d+) kB", block, re.MULTILINE) for block in blocks if str(path) in block]
    return sum(int(size[1]) * 1024 for size in sizes)


def test_nothing_of_a_mapped_base_is_read_before_the_first_step(tmp_path, tools):
    family = FAMILIES["llama3"]
    sizes = {"num_layers": 8, "hidden_size": 256, "ffn_size": 1400, "tied_embeddings": True}
    config = family.config_from_flavor("debug", vocab_size=4000, **sizes)
    names, shapes = family.hf_names(config), family.build(config).stored_shapes()
    path = tmp_path / "model.safetensors"
    save_file({names[name]: torch.full(shape, 0.01, dtype=BF16) for name, shape in shapes.items()}, path)
    model = with_adapters(family, config)
    weights = PretrainedWeights(tmp_path, names, model.stored_shapes())
    store = HostStore(model, BF16, mapped=weights.map_tensors(frozen_names(model), BF16))
    store.initialize(model, 0, weights.load)
    file_bytes = path.stat().st_size
    assert file_bytes > 20e6 and store.nbytes() < 0.1 * file_bytes
    with toy_engine(Partition((5,), 5, (5,)), model=model, store=store, num_devices=1) as engine:
        assert resident_bytes(path) < 0.01 * file_bytes
        engine.forward_backward([tools.micro_batch([[4]], 4000)]).loss()
        engine.drain()
    assert resident_bytes(path) > 0.9 * file_bytes
