"""The batches of a run as one machine trains on them: its own micro-batches, and the counts of the whole step.

Every machine reads and cuts the step's whole batch in the same way, and keeps the micro-batches of its share. Once a
step, the machines exchange an error in the data, a digest of the batch, and a flag of the caller. So all of them train
on the same step, or all stop before the same step.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchround.data.document_types import DataError
from torchround.data.loader import Loader
from torchround.data.packing import cut
from torchround.layer import MicroBatch, with_dropout_seeds
from torchround.planning.machine_shares import StepShare, step_share

JSON: TypeAlias = Any
Agree: TypeAlias = Callable[[JSON], list[JSON]]
"""Gives a value to all machines and returns the value of each, in rank order. The same machine's value may come back as a
copy that went through JSON."""


@dataclass(frozen=True)
class StepBatch:
    """One step's batch on one machine: `micro_batches` are those of its `share`, in order, and may be none.

    `num_labels` and `num_tokens` count the whole step, on all machines together; tokens without padding.
    """

    micro_batches: tuple[MicroBatch, ...]
    share: StepShare
    num_labels: int
    num_tokens: int

    def with_seeds(self, seed: int, step: int) -> list[MicroBatch]:
        return with_dropout_seeds(self.micro_batches, seed, step, self.share.micro_batches)


class StepBatches:
    """The steps of a loader, each as `machine` of `num_machines` trains on it.

    `rounds` is the number of rounds that each machine runs. `agree` exchanges values between the machines; one machine
    has none. `names` has the name of each machine for messages. `reading` is a context around this machine's own reading,
    without the wait for the others.
    """

    def __init__(
        self,
        loader: Loader,
        micro_batch_size: int,
        rounds: int,
        agree: Agree | None = None,
        machine: int = 0,
        num_machines: int = 1,
        *,
        names: Sequence[str] = (),
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if (agree is None) != (num_machines == 1):
            raise ValueError(f"{num_machines} machines {'cannot' if agree is None else 'need not'} agree")
        self._loader = loader
        self._micro_batch_size = micro_batch_size
        self._rounds = rounds
        self._agree = agree
        self._machine = machine
        self._num_machines = num_machines
        self._names = names or [f"machine {rank}" for rank in range(num_machines)]
        self._reading = reading

    def next(self, flag: Callable[[], JSON] = lambda: None) -> tuple[StepBatch | None, list[JSON]]:
        """Read the next step's batch, None at the end of the data, and the flags of all machines in rank order.

        There is no batch either once a machine's `flag` is not None. A machine whose flag is set before it reads does not
        read. Raises `DataError` on all machines if one of them meets an error in the data; the steps before it are the
        same on all. One machine's own error is raised as it is.
        """
        error: DataError | None = None
        batch: MicroBatch | None = None
        try:
            if flag() is None:
                with self._reading():
                    batch = next(self._loader, None)
        except DataError as caught:
            if self._agree is None:
                raise
            error = caught
        flags = [flag()]
        if self._agree is not None:
            # The digest tells the end of the data from every batch.
            digest = None if batch is None else [len(batch.tokens), zlib.crc32(batch.tokens.numpy().data)]
            found = self._agree({"error": error and str(error), "digest": digest, "flag": flags[0]})
            raise_agreed([each["error"] for each in found], self._names)
            flags = [each["flag"] for each in found]
            if not any(each is not None for each in flags):
                self._require_the_same([each["digest"] for each in found])
        if batch is None or any(each is not None for each in flags):
            return None, flags
        parts = cut(batch, self._micro_batch_size)
        share = step_share(len(parts), self._rounds, self._machine, self._num_machines)
        own = tuple(parts[number] for number in share.micro_batches)
        return StepBatch(own, share, batch.num_labels(), self._loader.num_tokens(batch)), flags

    def _require_the_same(self, digests: Sequence[JSON]) -> None:
        for name, digest in zip(self._names, digests, strict=True):
            if digest != digests[0]:
                raise DataError(
                    f"{name} reads another batch than {self._names[0]} for the same step: the files of data.sources "
                    "differ between them, although their sizes are the same"
                )


def raise_agreed(texts: Sequence[str | None], names: Sequence[str]) -> None:
    """Raise the same `DataError` on all machines if one has an error; `texts` has each machine's, None without one."""
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if failed:
        text = texts[failed[0]]
        # A record that every machine reads is bad on all of them; otherwise the message needs the machine.
        raise DataError(text if len(set(texts)) == 1 else f"{names[failed[0]]}: {text}")
