"""The engine: trains a model whose state is in host memory, with devices that keep nothing between stages.

Where to look (`docs/engine.md` explains it):

- Who writes a weight, and when: only the methods of `HostStore` that the table of `store/host_store.py` lists. `program.py`
  orders those of a step, in its section "Tasks that write weights", and `update.py` calls them on the optimizer's thread.
- Who waits for whom: `tasks.py` derives it from the program. Values that are made once are in `passes.py`, the waits in `board.py`.
- Where a hang is noticed and reported: `Watchdog` in `board.py`, by the caller's thread while it waits. The call in progress
  raises its `HangError` (`errors.py`). Another machine that is gone is noticed by `machines/liveness.py`.
- What a fault does: `board.py` keeps the first one and stops all waits, `Engine._stop` (`engine.py`) ends the threads.
- What a new update mode changes: `planning/update_modes.py` is the one table of modes, for config, planner, simulation and engine.
  A mode of its facts is an entry there. What another fact changes here: `program.py` (the order of tasks), `update.py` (what they do).
- What a device does: `worker/device_worker.py` runs the stages, `worker/transfers.py` moves what they need, `device.py` has the
  streams. The optimizer's work is in `update.py`, saves in `saver.py`, other machines in `exchange.py`.
- What a caller gets back: `StepResult` (`passes.py`) and its figures (`reports.py`).
- Where memory comes from: `store/host_memory.py` on the host, reserved by `buffer_reservation.py`.
"""
