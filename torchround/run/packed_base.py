"""The packed frozen weights of a run (`lora.base`): read from the cache, otherwise packed from the pretrained ones.

The cache is a folder `base-<digest>` in `lora.base_cache`, in the format of a checkpoint: its manifest has sizes and
checksums, and a kill leaves no half of it. The digest is of the base, the formats and the places of the parameters, so a
cache may serve runs of several kinds.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from torchround.checkpoint import Checkpointer, CheckpointError, load_checkpoint, verify_checkpoint
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_store import HostStore
from torchround.hf import PretrainedWeights
from torchround.hf.tensor_folder import map_file, read_header
from torchround.layer import FileTensor, LayeredModel
from torchround.optim import Optimizer
from torchround.planning.memory import size_text
from torchround.run.run_folder import RunError
from torchround.untrusted.terminal import Progress, say


@dataclass(frozen=True)
class PackedBase:
    """What the packed weights of `model` are made of: the pretrained `weights`, and the folder of caches if there is one.

    Each `machine` has a cache of its own, because they may share a disk.
    """

    model: LayeredModel
    weights: PretrainedWeights
    cache: str | None
    machine: int = 0

    def fill(self, store: HostStore) -> None:
        """Fill the packed bundles that are in memory. Raises `HFError`, or `RunError` for a damaged or foreign cache."""
        bundles = [bundle for bundle in store.bundles if bundle.packed is not None and not bundle.mapped]
        if not bundles:
            return
        views = {_name(bundle): bundle.device_weights[0].view(torch.uint8) for bundle in bundles}
        caches = self._caches(bundles)
        with nullcontext() if caches is None else _using(caches.folder), store.writing() as places:
            if caches is not None and caches.checkpoints():
                load_checkpoint(caches.named(0), views, lambda name: False)
                return
            self.weights.load({name: places[name] for name in self.model.packed})
            if caches is not None:
                size = sum(view.nbytes for view in views.values())
                progress = Progress(f"writing {caches.folder}", size, size_text)
                caches.save(0, views, {}, advance=progress.advance)

    def map(self, dtype: torch.dtype, optimizer: Optimizer) -> dict[str, tuple[FileTensor, ...]]:
        """Map the files of the cache, by parameter: each has the whole of its bundle. Makes the cache if it is missing.

        Raises as `fill` does.
        """
        # Memory that nothing touches, such as that of the other bundles, is not taken from the system.
        store = HostStore(self.model, dtype, optimizer=optimizer)
        bundles = [bundle for bundle in store.bundles if bundle.packed is not None]
        caches = self._caches(bundles)
        assert caches is not None, "the config checks want lora.base_cache"
        if not caches.checkpoints():
            self.fill(store)
        folder, found = caches.named(0), {}
        with _using(caches.folder):
            verify_checkpoint(folder, Progress(f"verifying {folder}", text=size_text).advance)
        for path in sorted(folder.glob("*.safetensors")):
            whole = map_file(path)
            for name, stored in read_header(path).items():
                memory = whole.memory[stored.begin : stored.begin + stored.nbytes].view(dtype)
                found[name] = FileTensor(memory, path, whole.descriptor, stored.begin)
        return {p.name: (found[_name(bundle)],) for bundle in bundles for p in bundle.parameters}

    def _caches(self, bundles: Sequence[Bundle]) -> Checkpointer | None:
        if self.cache is None:
            return None
        # The last number is that of the packing; adapters of `lora.path` are no part of the base.
        digest = xxhash.xxh3_128(f"{self.weights.fingerprint(with_adapters=False)} 1".encode())
        for bundle in bundles:
            places = [(p.name, p.start, tuple(p.shape)) for p in bundle.parameters]
            digest.update(f"{_name(bundle)} {bundle.numel} {places}".encode())
        machine = f"-{self.machine}" if self.machine else ""
        return Checkpointer(Path(self.cache).expanduser() / f"base-{digest.hexdigest()[:16]}{machine}")


def _name(bundle: Bundle) -> str:
    return f"{bundle.parameters[0].name} {bundle.packed}"


@contextmanager
def _using(folder: Path) -> Iterator[None]:
    """Keep other runs out of a cache; the lock ends with the process. Errors about it name its key and the way out.

    Other errors of the block, such as those of the release that is packed, pass as they are.
    """
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(folder / ".lock", "a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"{folder}: waiting for another run that uses it")
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise RunError(f"lora.base_cache: {folder} cannot be used: {error}") from error
        try:
            yield
        except CheckpointError as error:
            text = f"lora.base_cache: {error}; delete that folder, and the weights are packed anew"
            raise RunError(text) from error
