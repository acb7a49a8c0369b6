"""The engine: trains a model whose state is in host memory, with devices that keep nothing between stages.

Read `program.py` first: the tasks of a step in order, with the memory that each reads and writes. `tasks.py` derives from
it who waits for whom. `engine.py` is the controller, whose calls emit tasks. Their work is in `worker/` (one thread for each
device), `update.py` (the optimizer's thread), `saver.py` and `exchange.py` (other machines). Values that are made once
belong to a pass, and so does what a caller gets back (`passes.py`). The memory itself: `store/` on the host, `device.py`
on devices. `watchdog.py` notices hangs.
"""
