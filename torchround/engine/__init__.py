"""The engine: trains a model whose state is in host memory, with devices that keep nothing between stages.

Where to look (`docs/engine.md` explains it):

- Who writes a weight, and when: `program.py` lists every task of a step with the memory that it reads and writes. Writers
  outside steps are listed at `HostStore.derive_device_weights` (`store/host_store.py`).
- Who waits for whom: `tasks.py` derives it from the program. Values that are made once are in `passes.py`, the waits in `board.py`.
- Where a hang is noticed and reported: `watchdog.py`, by the caller's thread while it waits. The error is `HangError` (`errors.py`).
- What a fault does: `board.py` keeps the first one and stops all waits, `Engine._stop` (`engine.py`) ends the threads.
- What a new update mode changes: `planning/update_modes.py` is the one table of modes, for config, planner, simulation and engine.
  A mode of its facts is an entry there. What another fact changes here: `program.py` (the order of tasks), `update.py` (what they do).
- What a device does: `worker/device_worker.py` runs the stages, `worker/transfers.py` moves what they need, `device.py` has the
  streams. The optimizer's work is in `update.py`, saves in `saver.py`, other machines in `exchange.py`.
- What a caller gets back: `StepResult` (`passes.py`) and its figures (`reports.py`).
- Where memory comes from: `store/host_memory.py` on the host, reserved by `buffer_reservation.py`.
"""
