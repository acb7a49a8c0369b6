"""Ownership of bundles: which machine keeps the fp32 state of each, updates it and saves it.

Every machine assigns the owners by itself, from the bundles alone, and finds the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchround.engine.store.bundles import Bundle
from torchround.planning.machine_shares import assign_owners


@dataclass(frozen=True)
class Ownership:
    """This machine's number among the machines of a run."""

    machine: int
    num_machines: int

    def assign(self, bundles: Sequence[Bundle]) -> None:
        """Give each bundle an owner, balanced by bytes.

        Trained bundles are balanced by themselves, because they decide the memory and the work of an update. The owner
        of a frozen bundle only saves it; a mapped one is in no checkpoint and weighs nothing.
        """
        for trainable in (True, False):
            group = [bundle for bundle in bundles if bundle.trainable is trainable]
            owners = assign_owners(
                [0 if bundle.mapped else bundle.numel for bundle in group], self.num_machines
            )
            for bundle, owner in zip(group, owners, strict=True):
                bundle.owner, bundle.is_owned = owner, owner == self.machine
