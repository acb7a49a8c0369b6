"""The engine: trains a model whose state is in host memory, with devices that keep nothing between stages.

Where to look (`docs/engine.md` explains it):

- Who writes a weight, and when: only the methods of `HostStore` that the table of `store/host_store.py` lists. `program.py`
  orders those of a step, in its section "Tasks that write weights", and `update.py` calls them on the optimizer's thread.
- Who waits for whom: `tasks.py` derives it from the program. Values that are made once are in `passes.py`, the waits in `board.py`.
- Where a hang is noticed and reported: `Watchdog` in `board.py`, by the caller's thread while it waits. The call in progress
  raises its `HangError` (`errors.py`).
- What a fault does: `board.py` keeps the first one and stops all waits, `Engine._stop` (`engine.py`) ends the threads.
- What a new mode changes, in the engine: its policy (`store/bundles.py`), its place in `program.py`, what its tasks do (`update.py`)
  and what it cannot do (`settings.py`). `passes.py` and `worker/device_worker.py` ask which version a stage reads, `host_store.py` what
  a checkpoint of it holds. Outside: its name and its conflicts (`config/tables.py`, `config/validate.py`), `run/engine_parts.py`, and
  what plans know of it: search `planning/` for the name of a mode, which is its key there (`stage_times.py` has most).
- What a device does: `worker/device_worker.py` runs the stages, `worker/transfers.py` moves what they need, `device.py` has the
  streams. The optimizer's work is in `update.py`, saves in `saver.py`, other machines in `exchange.py`.
- What a caller gets back: `StepResult` (`passes.py`) and its figures (`reports.py`).
- Where memory comes from: `store/host_memory.py` on the host, reserved by `buffer_reservation.py`.
"""
