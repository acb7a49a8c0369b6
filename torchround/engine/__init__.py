"""The engine: trains a model whose state is in host memory, with devices that keep nothing between stages.

Read `engine.py` first: the controller, which cuts a batch into stage jobs (`passes.py`) and hands them to one
thread for each device (`worker/device_worker.py`). One more thread turns gradients into weights
(`optimizer_worker.py`), one saves (`saver.py`). `ordering.py` says who may read or write which memory when,
and lists all that threads hand to each other through the `board.py`. The memory itself: `store/` on the host,
`device.py` on devices. What a caller gets back: `results.py`. `watch/` notices hangs and, in tests, races.
"""
