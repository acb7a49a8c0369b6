"""Update policies: how many weight versions are kept, and which one a step reads (DESIGN section 7).

Either way step `t`'s gradient is applied to `v(t)` and gives `v(t+1)`; only where the gradient was computed
differs. The version a pass reads is fixed by its step number, never by timing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdatePolicy:
    """`versions` master buffers; step `t` reads `v(t - versions + 1)`, at the start of a run `v(0)`."""

    name: str
    versions: int

    def version_read(self, step: int) -> int:
        return max(step - (self.versions - 1), 0)


SYNC = UpdatePolicy("sync", 1)
ASYNC = UpdatePolicy("async", 2)
POLICIES = {policy.name: policy for policy in (SYNC, ASYNC)}
