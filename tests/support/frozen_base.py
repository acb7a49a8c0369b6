"""The toy model with frozen layers whose weights stay in a file, and a ring of readers that is small for it."""

from tests.support.toy import toy_model, toy_store
from torchround.checkpoint.tensor_file import Unwatched, plan_files, write_tensor_file
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker import transfers
from torchround.hf.tensor_folder import map_file, read_header, view_of

FROZEN = (0, 1, 2, 4)


def shrink_ring(monkeypatch):
    """Let each upload go through the ring several times, in buffers that end inside parameters."""
    monkeypatch.setattr(transfers, "READER_BUFFER_BYTES", 1000)
    monkeypatch.setattr(transfers, "READER_BUFFERS", 3)


def frozen_model():
    model = toy_model()
    for layer in FROZEN:
        model.layers[layer].requires_grad_(False)
    return model


def write_base(path):
    store = toy_store(frozen_model())
    trained = {parameter.name for bundle in store.trained for parameter in bundle.parameters}
    (file,) = plan_files({name: view for name, view in store.weights().items() if name not in trained})
    write_tensor_file(path, file, Unwatched())
    return path


def mapped_store(model, base, **options):
    mapped = {}
    if base is not None:
        whole = map_file(base)
        mapped = {name: (view_of(whole, stored),) for name, stored in read_header(base).items()}
    store, source = HostStore(model, mapped=mapped, **options), toy_store(frozen_model()).weights()

    def read(views):
        for name, filling in views.items():
            with filling as view:
                view.copy_(source[name])

    store.initialize(model, 0, read)
    return store
