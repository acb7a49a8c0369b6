"""What AdamW and Muon keep on the host, as numbers for tests that know no optimizer."""

from torchround.planning.update_costs import RuleCosts, UpdateCosts

# Two values of each parameter in 8 bits, with a 16-bit scale for 128 of them.
COMPACT_VALUE = 1 + 2 / 128
ADAMW, COMPACT_ADAMW = RuleCosts(8.0), RuleCosts(2 * COMPACT_VALUE)
MUON, COMPACT_MUON = RuleCosts(4.0, 2.0), RuleCosts(COMPACT_VALUE, 2.0)

# fp32 weights, as in float32 and float16.
FULL = UpdateCosts((ADAMW,))
SPLIT = UpdateCosts((ADAMW,), splits_weights=True)
