"""How silence is counted."""

from torchround.machines.liveness import SilenceClock


def test_a_machine_is_silent_for_as_long_as_its_number_stays():
    clock = SilenceClock(2, beat_s=1.0, now_s=100.0)
    for second in range(6):
        clock.observe([second, min(second, 2)], 100.0 + second)
    assert clock.silent_s == [0.0, 3.0]
    clock.observe([6, 3], 106.0)
    assert clock.silent_s == [0.0, 0.0]


def test_time_that_this_machine_slept_through_says_nothing_about_the_others():
    clock = SilenceClock(1, beat_s=1.0, now_s=100.0)
    clock.observe([5], 101.0)
    clock.observe([5], 5000.0)  # this process was stopped, or its computer was
    assert clock.silent_s == [2.0]


def test_numbers_that_start_over_are_signs_of_life():
    clock = SilenceClock(1, beat_s=1.0, now_s=0.0)
    for now_s, beat in enumerate([7, 7, 0]):
        clock.observe([beat], float(now_s))
    assert clock.silent_s == [0.0]
