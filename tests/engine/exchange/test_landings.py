"""The landing window: its places, who had them before, and the host memory of each of several machines."""

import random

from torchround.engine.exchange.landings import overlapped_places, ring_places
from torchround.pipeline.machine_memory import landing_window_bytes


def test_a_part_waits_for_exactly_the_parts_that_had_its_memory():
    """Let parts land one after the other for three rounds, and write down who was the last on each byte."""
    generator = random.Random(0)
    for _ in range(200):
        sizes = [generator.randrange(1, 9) for _ in range(generator.randrange(1, 12))]
        window = landing_window_bytes(sizes) + generator.randrange(3)
        starts = ring_places(sizes, window)
        overlapped = overlapped_places(sizes, starts)
        last_on: dict[int, tuple[int, int]] = {}
        for round_index in range(3):
            for position, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                assert start >= 0 and start + size <= window
                seen = {last_on[byte] for byte in range(start, start + size) if byte in last_on}
                if round_index:  # the first round finds memory that no part had
                    assert seen == {(at, round_index - back) for at, back in overlapped[position]}
                last_on |= dict.fromkeys(range(start, start + size), (position, round_index))
