"""The page of a run and the picture of its losses: their figures are the metrics', and a failure is only a warning."""

import base64
import hashlib
import json
import logging
import os
import re
import sys
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from tests.support.step_records import ENGINE, write_run
from torchround.commands.draw_page import main
from torchround.observe import run_page
from torchround.observe.record import PromptSample
from torchround.observe.run_page import MOST_POINTS, Curve, draw_losses, draw_pictures, read_run, write_page


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.texts, self._ended = [], {}, True
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._ended = False
        self.found.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")

    def handle_data(self, data):
        if not self._ended:
            self.texts[self.found[-1][0]][-1] += data

    def handle_endtag(self, tag):
        self._ended = True


def page_of(*folders):
    output = folders[0].parent / "page-of-test.html"
    write_page(folders, output)
    return Elements(output.read_text(encoding="utf-8"))


def figures(page):
    return json.loads(page.texts["script"][0])


def curve(run, panel, label=""):
    (found,) = [one["points"] for one in run["curves"][panel] if one["label"] == label]
    return found


def add(folder, *records):
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_a_page_has_the_figures_of_the_metrics(tmp_path):
    write_run(tmp_path / "run", range(1, 7), validated=(3, 6), **ENGINE)
    (run,) = figures(page_of(tmp_path / "run"))["runs"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for panel, label, key in (("loss", "training", "loss"), ("lr", "", "lr"), ("tokens_per_s", "", "tokens_per_s")):
        expected = [[line["step"], pytest.approx(line[key], rel=1e-5)] for line in lines]  # six digits
        assert curve(run, panel, label) == expected
    assert [step for step, _ in curve(run, "loss", "validation")] == [3, 6]
    # The devices of `ENGINE` compute for 0.25 and 0.5 of a step of 0.5 s.
    assert curve(run, "bubble", "device 0")[0] == [1, 0.5] and curve(run, "bubble", "device 1")[0] == [1, 0.0]
    assert curve(run, "device_memory", "device 1")[0] == [1, 2.0]
    assert curve(run, "host_memory", "resident")[0] == [1, 1.5]
    assert (run["step"], run["best"][1]) == (6, 6)
    # Without devices the bubble is that of the whole line.
    assert curve(read_run(write_run(tmp_path / "plain", range(1, 3)), "run"), "bubble") == [[1, 0.1], [2, 0.1]]


@pytest.mark.parametrize(
    "name",
    [
        "</script><script>document.title = 'taken'</script>",
        "[[figures]] [[script]] a & b <i>",
        "]]> --> <!-- <script>",
        "' onclick='alert(1)",
        "line\nbreak \x1b[31m \u202e",
    ],
)
def test_no_name_of_a_run_becomes_a_part_of_the_page(tmp_path, name):
    plain, named = (write_run(tmp_path / folder, range(1, 3)) for folder in ("plain", name.replace("/", "")))
    expected, found = page_of(plain), page_of(named)
    # A folder's name cannot have a slash; the name of a run may.
    for page in (found, Elements(run_page.page_text([{**read_run(plain, name)}]))):
        assert [tag for tag, _ in page.found] == [tag for tag, _ in expected.found]
        (run,) = figures(page)["runs"]
        assert page.texts["title"][0] == run["name"] and page.texts["script"][1] == expected.texts["script"][1]
    assert found.found == expected.found and figures(found)["runs"][0]["name"].isprintable()


def test_a_page_asks_no_network_and_runs_no_script_but_its_own(tmp_path):
    page = page_of(write_run(tmp_path / "run", range(1, 3)))
    (policy,) = [a["content"] for tag, a in page.found if tag == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(page.texts["script"][1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none';") and f"script-src 'sha256-{digest}'" in policy
    assert [value for _, a in page.found for key, value in a.items() if key in ("src", "href")] == ["data:,"]
    text = (tmp_path / "page-of-test.html").read_text()
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 3, "lo',
        "[1]",
        '{"loss": 1.0}',
        '{"step": 3, "loss": NaN}',
        '{"step": 3, "loss": [1], "engine": 5, "lr": "high"}',
        '{"step": true, "loss": 9.0}',
        '{"step": 1e400, "loss": 9.0}',
        f'{{"step": {10**30}, "loss": 9.0}}',
        f'{{"step": {10**400}, "loss": 9.0}}',
        f'{{"step": 3, "loss": {10**400}}}',
        '{"step": 3, "engine": {"busy_s": [null, {}], "device_peak_gib": "x"}}',
        "[" * 10_000,
        "\udcff",
    ],
    ids=lambda line: line[:30],
)
def test_lines_that_are_cut_off_or_hold_something_else_draw_nothing(tmp_path, line):
    write_run(tmp_path / "run", range(1, 3))
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(line.encode("utf-8", "surrogateescape"))
    (run,) = figures(page_of(tmp_path / "run"))["runs"]
    assert [step for step, _ in curve(run, "loss", "training")] == [1, 2]


@pytest.mark.parametrize("values", [1, MOST_POINTS, 25 * MOST_POINTS + 3])
def test_a_long_curve_keeps_its_ends_its_mean_and_every_spike(values):
    samples = Curve()
    given = [1000.0 if step == values // 2 else float(step % 7) for step in range(1, values + 1)]
    for step, value in enumerate(given, start=1):
        samples.add(step, value)
    points = samples.points()
    assert len(points) <= MOST_POINTS and (len(points) > MOST_POINTS // 2 or values == len(points))
    assert points[-1][0] == values and all(before[0] < after[0] for before, after in pairwise(points))
    ends = [0, *(int(point[0]) for point in points)]
    means = [sum(given[begin:end]) / (end - begin) for begin, end in pairwise(ends)]
    assert [point[1] for point in points] == pytest.approx(means, rel=1e-5)
    assert (max(max(p[1:]) for p in points), min(min(p[1:]) for p in points)) == (max(given), min(given))


def test_a_run_has_a_picture_and_a_page_if_it_has_a_step(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").touch()
    draw_pictures(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"] and not caplog.messages
    draw_pictures(write_run(tmp_path, range(1, 4)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl", "page.html"]
    (tmp_path / "page.html").unlink()
    (tmp_path / "page.html").mkdir()
    with caplog.at_level(logging.WARNING):
        draw_pictures(tmp_path)
    (warning,) = caplog.messages
    assert "page.html" in warning and "directory" in warning


def test_a_page_of_several_runs_has_the_settings_that_differ_and_each_run_s_name_and_duration(tmp_path, capsys):
    folders = []
    for parent, lr, last_s in (("a", 1e-3, 90.0), ("b", 2e-3, 30.0)):
        folders.append(write_run(tmp_path / parent / "run", range(1, 3), elapsed_s=60.0))
        add(folders[-1], {"step": 3, "loss": 1.0, "elapsed_s": last_s})
        config = f'[run]\nname = "{lr}"\n[optimizer]\nlr = {lr}\n[training]\nsteps = 3\n'
        (folders[-1] / "config.toml").write_text(config)
    page = tmp_path / "both.html"
    assert main([*map(str, folders), "--output", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    found = figures(Elements(page.read_text()))
    assert [run["name"] for run in found["runs"]] == [str(folder) for folder in folders], "of one name: by their paths"
    assert found["settings"] == ["optimizer.lr"]
    assert [run["settings"] for run in found["runs"]] == [["0.001"], ["0.002"]]
    # The second was resumed after 60 s.
    assert [run["duration"] for run in found["runs"]] == ["1 min 30 s", "1 min 30 s"]
    (folders[1] / "config.toml").write_text("[" * 10_000)
    assert figures(page_of(*folders))["settings"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "missing/metrics.jsonl"),
        (["run", "--output", "no/page.html"], "no/page.html"),
        (["run", "--output", "empty"], "directory"),
        (["empty"], "empty/metrics.jsonl"),
        (["pipe"], "not an ordinary file"),  # a run's folder may come from a stranger
    ],
)
def test_a_mistake_is_one_message_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", range(1, 3))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "metrics.jsonl")
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["page.html", "loss.png"])
def test_what_is_drawn_into_a_stranger_s_run_goes_through_no_link(name, tmp_path):
    folder, precious = write_run(tmp_path / "run", range(1, 5)), tmp_path / "precious"
    precious.write_text("precious")
    for link in ("page.html", "loss.png", "page.html.tmp", "loss.png.tmp"):
        (folder / link).symlink_to(precious)
    drawn = folder / name
    assert main([str(folder), f"--output={drawn}"]) == 0
    assert precious.read_text() == "precious"
    assert drawn.is_file() and not drawn.is_symlink() and drawn.stat().st_size > 1000
    assert not list(folder.glob(".*")), "a temporary file was left"
    os.mkfifo(pipe := tmp_path / f"pipe{drawn.suffix}")
    assert main([str(folder), f"--output={pipe}"]) == 2 and pipe.is_fifo()


def test_a_page_has_the_newest_continuations_of_each_run(tmp_path):
    folder = write_run(tmp_path / "run", range(1, 3), samples=(PromptSample("a", " b"),))
    add(folder, {"step": 3, "loss": 1.0, "samples": [{"prompt": "a", "text": "\x1b"}, {}, 5]})
    add(folder, {"step": 4, "loss": 1.0, "samples": 7})
    (run,) = figures(page_of(folder))["runs"]
    assert run["samples"] == [3, [["a", "\\x1b"]]], "what is no continuation is left out"


PNG = b"\x89PNG"


def test_the_curve_of_a_resumed_run_has_all_its_parts_and_no_step_twice(tmp_path):
    write_run(tmp_path, range(1, 8))
    write_run(tmp_path, range(5, 11))  # resumed from the checkpoint after step 4
    add(tmp_path, {"step": 11, "loss": 2.0, "validation_loss": 2.5})
    run = read_run(tmp_path, "run")
    expected = [[step, pytest.approx(10.0 / step, rel=1e-5)] for step in range(1, 11)]
    assert curve(run, "loss", "training") == [*expected, [11, 2.0]]
    assert curve(run, "loss", "validation") == [[11, 2.5]]


@pytest.mark.parametrize(("steps", "name"), [(300, "costs $5 and _more_"), (1, "_hidden")])
def test_a_run_that_has_ended_has_a_picture(tmp_path, steps, name):
    folder = write_run(tmp_path / name, range(1, steps + 1), validation_loss=1.0)
    (folder / "loss.png").write_text("the picture before")
    draw_losses([folder], folder / "loss.png")
    assert (folder / "loss.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_a_run_without_a_loss_that_is_finite_has_a_page_and_no_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null, "lr": 1.0}\n')
    draw_pictures(tmp_path)
    assert (tmp_path / "page.html").exists() and not (tmp_path / "loss.png").exists()


def test_a_machine_without_matplotlib_gets_one_warning_and_no_failure(tmp_path, monkeypatch, caplog):
    write_run(tmp_path, range(1, 4))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    draw_pictures(tmp_path)
    (warning,) = caplog.messages
    assert "loss.png was not drawn: ModuleNotFoundError" in warning and (tmp_path / "page.html").exists()
