"""The data of a pass on the host: its micro-batches, checked and copied to the pool, and its losses or outputs."""

from collections.abc import Callable, Sequence

from torchround.engine.board import Observer, WaitForHandOver
from torchround.engine.device import Event, PastEvent
from torchround.engine.passes import Pass
from torchround.engine.store.host_memory import HostPool
from torchround.engine.worker.activation_transfers import LOSS, HostTensors
from torchround.engine.worker.slots import FLAT, Packing, fill, unflatten
from torchround.layer import Batch, Hidden, MicroBatch
from torchround.planning.partition import StageTask


def host_micro_batch(
    micro_batch: Batch,
    pool: HostPool,
    observer: Observer,
    readers: int,
    synchronize: Callable[[Event], None],
) -> HostTensors:
    """Copy a micro-batch's tensors into one pool buffer, for `readers` devices to upload.

    `synchronize` waits for the device events after which the buffer may be written.
    """
    tensors = micro_batch.tensors()
    packing = Packing.laid_out(tensors, FLAT)
    buffer = pool.take(packing.nbytes)
    for event in buffer.busy:
        synchronize(event)
    observer.touched(reads=(), writes=[buffer.memory])
    fill(packing.views(buffer.memory), tensors)
    return HostTensors(buffer, packing, PastEvent(), readers, micro_batch.rebuild())


def host_micro_batches(
    micro_batches: Sequence[Batch],
    tasks: Sequence[StageTask],
    pool: HostPool,
    observer: Observer,
    synchronize: Callable[[Event], None],
) -> tuple[HostTensors, ...]:
    """Copy the tensors of a pass's micro-batches to the pool, each for the devices that work on it in `tasks`."""
    # Each of these devices uploads them; the last one gives the host buffer back.
    readers: dict[int, set[int]] = {}
    for task in tasks:
        for index in task.micro_batches:
            readers.setdefault(index, set()).add(task.device)
    return tuple(
        host_micro_batch(micro_batch, pool, observer, len(readers[index]), synchronize)
        for index, micro_batch in enumerate(micro_batches)
    )


def read_loss(boundary: HostTensors, pool: HostPool) -> float:
    """Return the sum of a micro-batch's token losses, as one of the boundary's readers. Waits until it has landed."""
    boundary.landed.synchronize()
    [loss_sum] = boundary.packing.views(boundary.memory)
    value = float(loss_sum)  # read before the buffer is given back
    boundary.reader_ends(PastEvent(), pool)
    return value


def read_losses(pass_: Pass, wait: WaitForHandOver, pool: HostPool) -> list[float]:
    """Return the sum of the token losses of each micro-batch of a pass, in their order. Waits until all have landed."""
    return [read_loss(wait(LOSS(pass_.index, m)), pool) for m in range(len(pass_.micro_batches))]


def read_output(boundary: HostTensors, pool: HostPool) -> Hidden:
    """Return a copy of a micro-batch's output, as its only reader. Waits until it has landed."""
    boundary.landed.synchronize()
    packing = boundary.packing
    copies = [view.clone() for view in packing.views(boundary.memory)]
    boundary.reader_ends(PastEvent(), pool)
    return unflatten(copies, packing.structure)


def check_micro_batches(micro_batches: Sequence[Batch], is_compiled: bool = False) -> str | None:
    """Return what is wrong with the micro-batches of a pass, or None. `is_compiled` says that layers have to be compiled."""
    if not micro_batches:
        return "a pass needs at least one micro-batch"
    if is_compiled and (others := {type(part).__name__ for part in micro_batches} - {MicroBatch.__name__}):
        return (
            f"compiled layers take a MicroBatch, not {', '.join(sorted(others))}; give the engine no compiler"
        )
    for index, micro_batch in enumerate(micro_batches):
        problem = micro_batch.problem()
        if problem is not None:
            return f"micro-batch {index}: {problem}"
    bounds = {part.max_documents for part in micro_batches if isinstance(part, MicroBatch)}
    if len(bounds) > 1:
        return (
            "all micro-batches of a pass must have the same max_documents, "
            f"but these have {sorted(map(str, bounds))}"
        )
    return None
