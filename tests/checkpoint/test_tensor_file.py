"""The tensor files: readable by the safetensors library, and written and read without a second copy."""

import resource

import pytest
import safetensors.torch
import torch

from torchround.checkpoint import Checkpointer
from torchround.checkpoint.tensor_file import (
    DTYPE_NAMES,
    Unwatched,
    plan_files,
    read_header,
    read_tensor_file,
    write_tensor_file,
)
from torchround.engine.store.bundles import ASYNC, SYNC
from torchround.engine.store.host_store import HostStore
from torchround.models import FAMILIES


def one_of_each_dtype():
    tensors = {str(dtype): (torch.arange(15).view(3, 5) % 2).to(dtype).view(5, 3).contiguous() for dtype in DTYPE_NAMES}
    return {**tensors, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "odd": torch.ones(3).bool()}


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    tensors = one_of_each_dtype()
    (file,) = plan_files(tensors)
    write_tensor_file(tmp_path / file.name, file, Unwatched())
    theirs = safetensors.torch.load_file(tmp_path / file.name)
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert theirs[name].dtype == tensor.dtype and theirs[name].shape == tensor.shape
        assert torch.equal(theirs[name].float(), tensor.float())


def test_what_the_safetensors_library_writes_is_read(tmp_path):
    tensors = one_of_each_dtype()
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"by": "the library"})
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    found = read_header(tmp_path / "theirs")
    assert found == layout
    read_tensor_file(tmp_path / "theirs", found, target)
    assert all(torch.equal(target[name].float(), tensor.float()) for name, tensor in tensors.items())


def test_tensors_are_spread_over_files_in_order():
    tensors = {f"t{index}": torch.zeros(size) for index, size in enumerate([10, 10, 30, 1, 1, 50, 1])}
    files = plan_files(tensors, file_bytes=80)
    assert [list(file.tensors) for file in files] == [["t0", "t1"], ["t2"], ["t3", "t4", "t5"], ["t6"]]
    assert [file.name for file in files][:2] == ["tensors-00000.safetensors", "tensors-00001.safetensors"]
    assert plan_files({}) == []


@pytest.mark.parametrize(
    ("family", "flavor", "policy"),
    [("llama3", "debug", SYNC), ("qwen3", "debug_moe", ASYNC), ("gpt_oss", "debug", SYNC)],
)
def test_each_bundle_is_released_once_its_share_of_the_file_is_written(tmp_path, family, flavor, policy):
    """Biases and norms, which are last in the file because of their size, delay no update until the whole file is written."""

    class Watch(Unwatched):
        """Records how many bytes are written when a bundle has been read."""

        def __init__(self):
            self.given_bytes = 0
            self.read_at = {}

        def finished_reading(self, name):
            self.read_at[bundle_of[name]] = self.given_bytes

        def advance(self, nbytes):
            self.given_bytes += nbytes

    store = HostStore(FAMILIES[family].build(FAMILIES[family].flavors[flavor]), torch.bfloat16, policy=policy)
    views = {bundle.index: store.bundle_views(bundle, 0) for bundle in store.bundles}
    bundle_of = {name: index for index, of_bundle in views.items() for name in of_bundle}
    watch = Watch()
    (file,) = plan_files(store.named_views())
    write_tensor_file(tmp_path / file.name, file, watch, watch.advance)
    so_far = len(file.header)
    for index, of_bundle in views.items():
        so_far += sum(view.nbytes for view in of_bundle.values())
        assert watch.read_at[index] <= so_far


def save_and_load(folder):
    """Be a process of its own, and print how much memory a save and a load take on top of the state, and the state."""

    def peak_bytes():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    flat = torch.full((40 * 2**20,), 3.0)  # 160 MiB; one tensor takes most of it
    state = dict(zip(("large", "a", "b"), flat.split([30 * 2**20, 5 * 2**20, 5 * 2**20]), strict=True))
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, {"small": torch.zeros(2)}, {})  # what is loaded on first use is not the state's
    before = peak_bytes()
    checkpointer.save(2, state, {})
    flat.zero_()
    checkpointer.load_latest(state)
    assert flat[::4096].eq(3.0).all()
    print(peak_bytes() - before, flat.nbytes)


def test_saving_and_loading_take_no_second_copy_of_the_state(processes, tmp_path):
    child = processes.run("tests.checkpoint.test_tensor_file:save_and_load", str(tmp_path), folder=tmp_path)
    assert child.wait() == 0, child.text()
    extra_bytes, state_bytes = map(int, child.text().split())
    assert extra_bytes < 0.05 * state_bytes
