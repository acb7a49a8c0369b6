"""`python -m benchmarks gpu` on an accelerator: its own calls of PyTorch's statistics, its rival and all its runs."""

import json
import math

from benchmarks.gpu import GPU


def test_the_benchmark_measures_every_run_on_the_device(kind, tmp_path):
    path = tmp_path / "figures.json"
    shape = ["--flavor", "debug", "--seq-len", "32", "--micro-batch-size", "1", "--micro-batches", "2"]
    runs = ["--steps", "1", "--workers", "1", "2", "--updates", "sync", "--copy-mib", "1"]
    limit = ["--device-memory-gib", "0.05", "--check", "--json", str(path)]
    assert GPU.run("gpu", ["--devices", kind, *shape, *runs, *limit]) == 0
    report = json.loads(path.read_text())
    assert report["cards"]["kind"] == kind and report["copies"]["pinned"]
    assert [(run["workers"], run["compile"]) for run in report["runs"]] == [(1, "auto"), (1, "false"), (2, "auto")]
    for run in [*report["runs"], report["resident"]]:
        assert all(map(math.isfinite, run["losses"])) and run["device_peak_gib"] > 0
    for run in report["runs"]:
        assert run["allocations_after_warm_up"] == 0
