"""A run to be planned: all that the planner has to know of its config, its model and its machine, in numbers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torchround.layer_work import aligned
from torchround.planning.cards import DeviceSpec
from torchround.planning.costs import Costs, ParameterCounts
from torchround.planning.host_buffers import HostBatch
from torchround.planning.keep_rule import KeepRule
from torchround.planning.memory import HostMemory, MemoryLimits, host_state
from torchround.planning.partition import KeptNames, Partition, split_evenly
from torchround.planning.stage_times import KeptLink
from torchround.planning.update_costs import UpdateCosts
from torchround.planning.update_modes import SYNC, UpdateMode, mode_of

# Tensors of a micro-batch's integers: tokens, labels, positions and document ids. Each takes 8 bytes per token, `aligned`.
INTEGER_TENSORS = 4


@dataclass(frozen=True)
class PlannedMachines:
    """The machines of a run.

    - `count`: their number. All of them have the devices and the memory that the question names.
    - `bytes_per_s`: the rate of each machine's network link, each way; None if it is not known.
    """

    count: int = 1
    bytes_per_s: float | None = None


ONE_MACHINE = PlannedMachines()


@dataclass(frozen=True)
class RunQuestion:
    """A run to be planned.

    - `costs_for(tokens, sequences, accumulate_bytes)`: the layers' costs for micro-batches of so many
      sequences of so many tokens, with gradients accumulated in so many bytes per element.
    - `updates`: what the optimizer keeps and moves.
    - `given`: a partition and its number of rounds, in place of the planner's choice.
    - `device_bytes`, `host_bytes`: memory that the run may use; None is no limit.
    - `reader_bytes`: host memory through which weights in files go up to the devices.
    - `loader_bytes_for(tokens, batch)`: host memory of the data loader, for batches of so many sequences of so many
      tokens.
    - `constant_bytes`: buffers of the layers, on each device.
    - `devices_on_host`: whether the devices are virtual, so that their memory is host memory.
    - `validates`: whether validations come between steps.
    - `stale_layers`: their number in `bounded`; None lets the planner choose.
    - `keep_activations`: the setting; `"auto"` lets the planner choose.
    - `given_kept`: the names of what each layer keeps, if `given` comes with them.
    - `uncompiled_costs_for`: the costs if the layers that `costs_for` counts as compiled are not, None if that is no choice.
    - `stays_uncompiled`: whether that choice was made, because the run fits in no other way.
    - `machines`: a plan is that of the machine with the largest share of the step; `global_batch_size` is of all.
    """

    costs_for: Callable[[int, int, int], Costs]
    parameters: ParameterCounts
    updates: UpdateCosts
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    num_devices: int
    device: DeviceSpec | None
    device_bytes: int | None
    host_bytes: int | None = None
    update: str = SYNC.name
    rounds: int | str = 1
    recompute: str = "stage"
    element_bytes: int = 2
    gradient_bytes: int = 2
    accumulate_bytes: int = 4
    float16_gradients: bool = False
    reader_bytes: int = 0
    loader_bytes_for: Callable[[int, int], int] = field(default=lambda tokens, batch: 0, compare=False)
    constant_bytes: int = 0
    devices_on_host: bool = False
    validates: bool = False
    given: tuple[Partition, int] | None = None
    stale_layers: int | None = None
    keep_activations: str | tuple[str, ...] = "none"
    given_kept: KeptNames | None = None
    machines: PlannedMachines = ONE_MACHINE
    uncompiled_costs_for: Callable[[int, int, int], Costs] | None = None
    stays_uncompiled: bool = False

    @property
    def mode(self) -> UpdateMode:
        return mode_of(self.update)

    @property
    def step_micro_batches(self) -> int:
        """Micro-batches of a step on all machines together."""
        return -(-self.global_batch_size // self.micro_batch_size)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step on the machine with the largest share."""
        return -(-self.step_micro_batches // self.machines.count)

    @property
    def longest_micro_batch(self) -> int:
        """Sequences of the first micro-batch. If the batch does not divide evenly, the first ones get one more."""
        return -(-self.global_batch_size // self.step_micro_batches)

    def uncompiled(self) -> "RunQuestion":
        """Return the question without compiled layers, if that is a choice, otherwise as it is."""
        if self.uncompiled_costs_for is None:
            return self
        return replace(
            self, costs_for=self.uncompiled_costs_for, uncompiled_costs_for=None, stays_uncompiled=True
        )

    def costs(self) -> Costs:
        return self.costs_for(self.seq_len, self.longest_micro_batch, self.accumulate_bytes)

    def keep_rule(self) -> KeepRule:
        """Return what may be kept.

        `"auto"` keeps nothing if it is not known how long the copies take, or how much host memory there is: it would fill
        any amount of it for a shorter step.
        """
        setting, link = self.keep_activations, None
        if self.device is not None and not self.devices_on_host:
            link = KeptLink(self.device.link_bytes_per_s, self.gradient_bytes / self.accumulate_bytes)
        if setting == "auto" and (link is None or self.host_bytes is None):
            setting = "none"
        return KeepRule(setting, link, None if self.given is None else self.given_kept)

    def without_choice(self) -> "RunQuestion":
        """Return the question without a choice of what to keep: quick to answer, and if it fits, so does this one."""
        return replace(self, keep_activations="none") if self.keep_rule().is_open else self

    @property
    def fixed_rounds(self) -> int | None:
        """Rounds of the given plan, otherwise of the config; None lets the planner choose."""
        if self.given is not None:
            return self.given[1]
        if self.mode.updates_by_layer:
            return 1
        return self.rounds if isinstance(self.rounds, int) else None

    def state(self) -> HostMemory:
        """Count the host memory that any plan needs."""
        return self.state_of(self.fixed_rounds or 1)

    def state_of(self, rounds: int) -> HostMemory:
        state = host_state(
            self.parameters,
            self.update,
            rounds,
            self.element_bytes,
            self.gradient_bytes,
            self.updates,
            self.machines.count,
        )
        loader_bytes = self.loader_bytes_for(self.seq_len, self.global_batch_size)
        return replace(state, reader_bytes=self.reader_bytes, loader_bytes=loader_bytes)

    def integer_bytes(self, sequences: int) -> int:
        return INTEGER_TENSORS * aligned(8 * sequences * self.seq_len)

    def host_batch(self) -> HostBatch:
        # The first machine has the first micro-batch, which is one of the longest, and most of them.
        sequences = [len(part) for part in split_evenly(self.global_batch_size, self.step_micro_batches)]
        sequences = sequences[: self.num_micro_batches]
        sizes = sorted(set(sequences), reverse=True)
        costs = tuple(self.costs_for(self.seq_len, size, self.accumulate_bytes) for size in sizes)
        gradients = [layer.gradient_bytes for layer in costs[0].layers]
        return HostBatch(
            sizes=tuple(sizes.index(size) for size in sequences),
            costs=costs,
            integer_bytes=tuple(self.integer_bytes(size) for size in sizes),
            frozen_layers=next((index for index, size in enumerate(gradients) if size), len(gradients)),
            validates=self.validates,
        )

    def limits(self) -> MemoryLimits:
        """Return the limits of a plan: the host memory that the state leaves, and what the plan itself is counted with."""
        state_bytes = self.state().state_bytes
        # Without a fixed number, `state()` counts one round; a plan of several also keeps their sums.
        is_open = self.fixed_rounds is None
        # Devices never add up in float16, so sums that travel as float16 are always converted.
        rounded = self.gradient_bytes != self.accumulate_bytes or self.float16_gradients
        return MemoryLimits(
            self.device_bytes,
            None if self.host_bytes is None else self.host_bytes - state_bytes,
            self.integer_bytes(self.longest_micro_batch),
            self.recompute,
            self.accumulate_bytes,
            self.gradient_bytes if rounded else 0,
            batch=self.host_batch(),
            devices_on_host=self.num_devices if self.devices_on_host else 0,
            rounds_bytes=self.state_of(2).state_bytes - state_bytes if is_open else 0,
            constant_bytes=self.constant_bytes,
            state_bytes=state_bytes,
        )
