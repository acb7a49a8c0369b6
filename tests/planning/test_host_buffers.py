"""The pool's size against every order of progress of the devices: never too small, and never larger than needed."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from torchround.planning.costs import Costs, LayerCost
from torchround.planning.host_buffers import HeldPass, HostBatch, kept_cuts, most_buffers
from torchround.planning.partition import Partition, StageKind, evaluation_tasks, step_tasks

FORWARD, BACKWARD = StageKind.FORWARD, StageKind.BACKWARD
UNIT_COSTS = {n: Costs((LayerCost("layer", 1.0, 2.0, boundary_bytes=1),) * n) for n in (3, 4)}


def alive_after(alive, number, task, m, kept_cuts, kept_layers, last_layer):
    stage = task.stage
    own = set(range(stage.start, stage.stop))
    readers = Counter(dict(alive))
    readers.subtract(
        (number, "input", cut, m) for cut in (kept_cuts & own if stage.kind is BACKWARD else {stage.start}) - {0}
    )
    if stage.kind is BACKWARD:
        readers[number, "gradient", stage.stop, m] -= 1
        readers.subtract((number, "kept", layer, m) for layer in kept_layers & own)
    if stage.kind is FORWARD:
        readers.update((number, "kept", layer, m) for layer in kept_layers & own)
        for cut in range(stage.start + 1, min(stage.stop, last_layer - 1) + 1):
            readers[number, "input", cut, m] += (cut in kept_cuts) + (cut == stage.stop)
    elif stage.start > 0:
        readers[number, "gradient", stage.start, m] += 1
    assert all(count >= 0 for count in readers.values())
    return frozenset((key, count) for key, count in readers.items() if count)


def most_alive(passes, num_devices, ahead, kept_layers=(), counted=None, stale_layers=None):
    """Find the most boundaries and kept activations alive at once, by trying every order of single micro-batches.

    `passes` are lists of stage tasks. A device takes its slots in order, a slot its micro-batches; a micro-batch
    needs the stage before it; only `ahead` stages of a pass may begin before the pass before it is done. `kept_layers`
    keep activations from their forward stage to their backward stage. With `counted`, things of this kind count alone.
    With `stale_layers` (`bounded`) a stage waits instead for the gradients of its own layers, except a forward stage
    for those of stale layers, whose inputs are all kept.
    """
    tasks = [(number, task) for number, tasks in enumerate(passes) for task in tasks]
    first = {number: next(i for i, (n, _) in enumerate(tasks) if n == number) for number, _ in tasks}
    kept = [{t.stage.start for t in of_pass if t.stage.kind is BACKWARD} - {0} for of_pass in passes]
    split = max((task.stage.stop for _, task in tasks if task.stage.kind is BACKWARD), default=0)
    for cuts in kept:
        cuts |= {cut for cut in range(1, (stale_layers or 0) + 1) if cut < split}
    again = [
        {layer for t in of_pass if t.stage.kind is BACKWARD for layer in range(t.stage.start, t.stage.stop)}
        for of_pass in passes
    ]
    last_layer = max(task.stage.stop for _, task in tasks)

    def may_run(state, i):
        number, task = tasks[i]
        if state[i] == len(task.micro_batches):
            return False
        mine = (j for j in range(i) if tasks[j][1].device == task.device)
        if any(state[j] < len(tasks[j][1].micro_batches) for j in mine):
            return False
        if task.stage_index and state[i - 1] <= state[i]:
            return False
        waits = number and task.stage_index >= ahead
        before = [j for j in range(first[number])]
        if stale_layers is not None and number:
            stale = stale_layers if task.stage.kind is FORWARD else 0
            layers = set(range(max(task.stage.start, stale), task.stage.stop))
            before = [j for j in before if tasks[j][1].stage.kind is not FORWARD]
            before = [j for j in before if layers & set(range(tasks[j][1].stage.start, tasks[j][1].stage.stop))]
            waits = bool(layers)
        return not waits or all(state[j] == len(tasks[j][1].micro_batches) for j in before)

    start = (0,) * len(tasks)
    seen, found, most = {start: frozenset()}, [start], 0
    while found:
        state = found.pop()
        most = max(most, sum(counted in (None, key[1]) for key, _ in seen[state]))
        for i in range(len(tasks)):
            if may_run(state, i):
                after = (*state[:i], state[i] + 1, *state[i + 1 :])
                if after not in seen:
                    number, task = tasks[i]
                    held = kept[number], again[number] & set(kept_layers), last_layer
                    seen[after] = alive_after(seen[state], number, task, task.micro_batches[state[i]], *held)
                    found.append(after)
    return most


PARTITIONS = [
    Partition((), 3, ()),
    Partition((2,), 1, (2,)),
    Partition((1, 1), 1, (2,)),
    Partition((2,), 1, (1, 1)),
    Partition((1, 1), 1, (1, 1)),
    Partition((3,), 1, (1, 2)),
]


@given(
    partition=st.sampled_from(PARTITIONS),
    num_devices=st.integers(1, 3),
    batches=st.sampled_from([(1, 2), (2, 1), (3, 1), (3, 2)]),
    ahead=st.integers(0, 3),
    kept=st.sets(st.integers(0, 3)),
)
def test_the_pool_is_as_large_as_the_worst_order_of_the_devices_needs(partition, num_devices, batches, ahead, kept):
    """Kept activations come once in buffers of the boundaries' size, of which both take some, once in their own."""
    num_micro_batches, rounds = batches
    rounds = min(rounds, num_micro_batches)
    one = step_tasks(partition, num_micro_batches, rounds, num_devices)
    two = step_tasks(partition, num_micro_batches, rounds, num_devices, len(one))
    parts = tuple((0,) * len(task.micro_batches) for task in one if task.stage_index == 0)
    held = HeldPass(partition.stages(), parts, min(ahead, partition.num_stages))
    for nbytes, counted in ((1, None), (2, "kept")):
        planned = most_buffers(
            [held, held], num_devices, lambda cut, size: 1, lambda layer, size, n=nbytes: n * (layer in kept)
        )
        assert planned[nbytes] == most_alive([one, two], num_devices, ahead, kept, counted)


@given(st.sampled_from(PARTITIONS), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))
def test_no_order_of_bounded_steps_needs_more_than_the_pool_has(partition, num_devices, micro_batches, stale_layers):
    """Two steps overlap as far as each layer's own update allows; the inputs of stale layers wait for their backward."""
    stale_layers = min(stale_layers, partition.num_layers - partition.fused)
    one = step_tasks(partition, micro_batches, 1, num_devices)
    two = step_tasks(partition, micro_batches, 1, num_devices, len(one))
    needed = most_alive([one, two], num_devices, 0, stale_layers=stale_layers)
    batch = HostBatch((0,) * micro_batches, (UNIT_COSTS[partition.num_layers],))
    assert batch.boundary_bytes(partition, 1, num_devices, "bounded", stale_layers) >= needed
    inner = [cut for cut in range(1, stale_layers + 1) if cut < partition.num_layers - partition.fused]
    assert needed >= micro_batches * len(inner), "after the forward every micro-batch holds them"
    stages = partition.stages()
    assert kept_cuts(stages, stale_layers) == kept_cuts(stages).union(inner)


def test_a_forward_only_pass_holds_one_boundary_for_each_micro_batch():
    partition = Partition((1, 1), 1, (2,))
    tasks = evaluation_tasks(partition, 4, 2)
    assert most_alive([tasks], 2, 0) == 4
    held = HeldPass(tuple(task.stage for task in tasks), ((0,) * 4,))
    assert most_buffers([held], 2, lambda cut, size: 1) == {1: 4}
    # Two of them may overlap. A step in four rounds needs fewer buffers.
    steps, validated = (HostBatch((0,) * 4, (UNIT_COSTS[3],), validates=v) for v in (False, True))
    needed = most_alive([tasks, evaluation_tasks(partition, 4, 2, len(tasks))], 2, len(tasks))
    assert steps.boundary_bytes(partition, 4, 2, "sync") < needed == validated.boundary_bytes(partition, 4, 2, "sync")


def test_uneven_micro_batches_and_boundaries_get_buffers_of_their_own():
    """The micro-batches: two of size 3 and one of size 2; the input of layer 1 is twice as large as that of layer 2."""
    stages = Partition((1, 1), 1, (2,)).stages()
    held = HeldPass(stages, ((3, 3, 2),))
    buffers = most_buffers([held], 2, lambda cut, size: 10 * cut * size)
    assert buffers == {30: 2, 60: 2, 20: 1, 40: 1}
