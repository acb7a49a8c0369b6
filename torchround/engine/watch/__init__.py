"""Everything that watches an engine: the watchdog in every run, the race checker in tests and a benchmark."""
