"""The memory figure of reading weights, scaled down to a model of 33 M parameters."""

from benchmarks.host_memory import LOADING


def test_reading_weights_takes_no_second_copy_of_the_model() -> None:
    figures = LOADING.measure(LOADING.parse("loading-memory", ["--parameters", "30e6"]))
    # Less than the store would mean that its pages were not resident, and that a second copy could hide there.
    assert 1 <= figures["peak_over_store"] < 1.15
    # Pieces of 8 MiB and what a process uses besides; a second copy would be the file's 66 MB.
    assert figures["beyond_store_bytes"] < 32e6 < figures["file_bytes"] / 2
