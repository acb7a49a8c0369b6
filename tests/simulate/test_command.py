"""torchround simulate as a user runs it: table, files, and one message for each mistake."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from matplotlib import rc_context

from tests.support.published_models import PARTITIONS
from torchround.simulate.command import main
from torchround.simulate.schedules import SCHEDULES

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[2]
COSTS = ROOT / "docs" / "costs" / f"rtx4090_{next(iter(PARTITIONS))}.json"
FIGURE_1 = ROOT / "docs" / "costs" / "figure1.json"
PARTITION = {"forward": [7] * 4, "fused": 1, "backward": [3] * 8 + [2, 2]}
PUBLISHED = ["--costs", str(COSTS), "--devices", "8", "--microbatches", "16"]


@pytest.fixture
def small_costs(tmp_path):
    layer = {"name": "block", "forward_s": 0.01, "backward_s": 0.02, "activation_bytes": 100, "boundary_bytes": 10}
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"hop_s": 0.001, "layers": [layer] * 7}))
    return path


def test_a_fixed_partition_gives_the_published_step_and_the_agreed_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "partition.json").write_text(json.dumps(PARTITION))
    arguments = ["--partition", "partition.json", "--schedules", "looped_bfs,roundpipe_sync", "--json", "out.json"]
    assert main([*PUBLISHED, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "roundpipe_sync" in printed and "2286.0" in printed
    schedules = json.loads((tmp_path / "out.json").read_text())["schedules"]
    assert set(schedules) == {"looped_bfs", "roundpipe_sync"}
    assert schedules["roundpipe_sync"]["makespan_s"] == pytest.approx(2.286017, abs=1e-6)
    assert schedules["roundpipe_sync"]["partition"] == {**PARTITION, "rounds": 2}
    assert schedules["roundpipe_sync"]["bubble"] == pytest.approx(0.190676, abs=6e-5)
    assert schedules["looped_bfs"]["bubble"] == pytest.approx(0.2501, abs=1e-4)
    assert {"makespan_s", "peak_activation_bytes", "drift"} < set(schedules["looped_bfs"])


def test_all_schedules_run_on_a_costs_file_without_bytes_or_a_device(small_costs, tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--costs", str(small_costs), "--devices", "2", "--microbatches", "4", "--json", str(out)]
    assert main(arguments) == 0
    assert list(json.loads(out.read_text())["schedules"]) == list(SCHEDULES)


def test_costs_of_a_model_are_counted_for_a_card(tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--model", "llama3/3.2-1B", "--device", "rtx4090", "--schedules", "1f1b,mobius", "--json", str(out)]
    assert main([*arguments, "--devices", "4", "--microbatches", "8"]) == 0
    schedules = json.loads(out.read_text())["schedules"]
    # Each of 8 micro-batches of 8192 tokens costs at least 6 FLOP per parameter and token on 165 TFLOP/s. Cards reach half of it.
    at_least_s = 8 * 8192 * 6 * 1.2e9 / (4 * 165.2e12)
    assert at_least_s < schedules["1f1b"]["makespan_s"] < 6 * at_least_s


def test_files_are_written_through_no_link_and_a_missing_folder_is_one_message(small_costs, tmp_path, capsys):
    (tmp_path / "precious").write_text("precious")
    files = {"json": tmp_path / "out.json", "trace": tmp_path / "out.trace", "plot": tmp_path / "out.svg"}
    for file in files.values():
        file.symlink_to("precious")
    arguments = ["--costs", str(small_costs), "--devices", "2", "--microbatches", "4", "--schedules", "1f1b"]
    assert main([*arguments, *(f"--{kind}={file}" for kind, file in files.items())]) == 0
    assert (tmp_path / "precious").read_text() == "precious"
    assert json.loads(files["json"].read_text()) and "<svg" in files["plot"].read_text()
    for kind in files:
        assert main([*arguments, f"--{kind}={tmp_path}/no/file.svg"]) == 2
        assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["roundpipe_sync", pytest.param("roundpipe_async", marks=pytest.mark.nightly)])
def test_work_of_devices_for_an_update_is_in_picture_and_trace_and_has_no_micro_batch(small_costs, tmp_path, schedule):
    """Layers 1 to 5 have such work; the devices take it in turn, the deepest layer first."""
    costs = json.loads(small_costs.read_text())
    costs["layers"] = [dict(layer) for layer in costs["layers"]]
    for layer in costs["layers"][1:6]:
        layer |= {"job_s": 0.03, "job_link_s": 0.002}
    small_costs.write_text(json.dumps(costs))
    (tmp_path / "partition.json").write_text(json.dumps({"forward": [6], "fused": 1, "backward": [3, 3]}))
    files = ["--plot", str(tmp_path / "picture.svg"), "--trace", str(tmp_path / "trace.json")]
    files += ["--partition", str(tmp_path / "partition.json")]
    arguments = ["--costs", str(small_costs), "--devices", "2", "--microbatches", "4", *files]
    with rc_context({"svg.fonttype": "none"}):
        assert main([*arguments, "--schedules", schedule]) == 0
    picture = (tmp_path / "picture.svg").read_text()
    assert ">orthogonalisation</text>" in picture
    # One number for each micro-batch in each of four stages and two recomputations.
    numbers = re.findall(r'<text style="font-size: 5px[^>]*>(\d+)</text>', picture)
    assert Counter(numbers) == dict.fromkeys("0123", 6)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    jobs = [event for event in events if event.get("cat") == "orthogonalise"]
    jobs = [event for event in jobs if event["args"]["step"] == jobs[0]["args"]["step"]]
    assert [event["name"] for event in jobs] == ["O 5", "O 4", "O 3", "O 2", "O 1"]
    devices = [event["pid"] for event in jobs]
    assert devices == [devices[0], 1 - devices[0]] * 2 + devices[:1]


def test_a_schedule_that_cannot_be_built_is_left_out_and_says_why(small_costs, capsys):
    arguments = ["--costs", str(small_costs), "--devices", "2", "--microbatches", "4", "--device-memory-gib", "1e-9"]
    arguments += ["--group", "3", "--offload-ratio", "1.5", "--offload-chunks", "5"]
    assert main([*arguments, "--schedules", "gis,gis_h,po_f,roundpipe_sync"]) == 0
    captured = capsys.readouterr()
    reasons = ("gis left out: a group of 3", "po_f left out: offload_chunks = 5", "roundpipe_sync left out: ")
    assert all(reason in captured.err for reason in reasons)
    assert "gis_h" in captured.out and not re.search(r"^(gis|po_f|roundpipe_sync) ", captured.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--costs", "missing.json"], "missing.json: No such file"),
        (["--costs", str(COSTS), "--schedules", "gpip"], "nearest: gpipe"),
        (["--costs", str(COSTS), "--device", "rtx9999"], "'rtx9999' is not a known card; known: rtx3060"),
        (["--costs", str(ROOT / "LICENSE")], "LICENSE: costs are not valid JSON"),
        (["--model", "llama3/3.2-1B"], "--model needs --device"),
        (["--model", "llama3/nope", "--device", "rtx4090"], "unknown llama3 flavor 'nope'"),
        (["--costs", str(COSTS), "--chunks", "0"], "chunks = 0 must be at least 1"),
        (["--costs", str(COSTS), "--partition", str(COSTS)], f"{COSTS.name}: the plan's forward: "),
        (["--costs", str(COSTS), "--partition", "wrong.json"], "wrong.json: the plan's rounds: "),
        (["--costs", str(FIGURE_1), "--partition", "partition.json"], "the partition holds 29 layers, the costs 13"),
        (["--costs", str(COSTS), "--rounds", "17"], "17 rounds of only 16 micro-batches"),
    ],
)
def test_a_mistake_ends_with_code_2_and_one_message(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("partition.json").write_text(json.dumps(PARTITION))
    Path("wrong.json").write_text(json.dumps({**PARTITION, "rounds": "2"}))
    assert main([*arguments, "--devices", "8", "--microbatches", "16"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
