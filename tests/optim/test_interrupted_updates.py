"""An update that is interrupted anywhere and tried again gives the bits of one that was not, in every form of the state.

The interruption comes from a trace function, before the first, second, .. line that the pass executes, whatever the lines
are.
"""

import sys
from pathlib import Path

import pytest
import torch

from tests.support.kernel_kinds import BF16, F32, example_buffers, kind_of, written_in_place
from tests.support.optimizers import OPTIMIZERS
from torchround.optim import ParameterFacts, UpdateProgress, make_optimizer, update_, update_pass

ELEMENTS, CHUNK = 384, 256  # the last chunk is half full
FOLDER = str(Path(update_pass.__file__).parent)


class InterruptedAtLineError(Exception):
    """The planted fault."""


class AtLine:
    """A trace function that raises before the `hit`-th line of the optimizer's room, once."""

    def __init__(self, hit):
        self.left, self.has_raised = hit, False

    def __call__(self, frame, event, _):
        if self.has_raised or not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.has_raised = True
                raise InterruptedAtLineError
        return self


def buffers(name, form):
    """Make a segment with some state: `form` is "split", "split, two versions", "predicts" or "fp32"."""
    optimizer = make_optimizer(OPTIMIZERS[name])
    rule = optimizer.rule_of(ParameterFacts("block.w", torch.Size((32, 12)), True, True))
    written = F32 if form == "fp32" else BF16
    is_split, predicts = form.startswith("split"), form == "predicts"
    kind = kind_of(rule, optimizer.format, written=written, splits=is_split, predicts=predicts)
    made = example_buffers(kind, ELEMENTS)
    return made if form == "split, two versions" else written_in_place(made, predicts)


def content(made):
    kept = [made.weight, made.residual, made.current, made.written, *made.parts.values()]
    return [tensor for tensor in kept if tensor is not None]


def run(made, form, progress):
    update_(made, lr=1e-2, update=3, gradient_scale=0.5, progress=progress, predicts=form == "predicts")


BY_DAY = [("muon compact", "split, two versions"), ("adamw compact", "predicts"), ("adamw", "split"), ("adamw", "fp32")]
FORMS = [
    pytest.param(name, form, marks=() if (name, form) in BY_DAY else pytest.mark.nightly)
    for name in OPTIMIZERS
    for form in ("split", "split, two versions", "predicts", "fp32")
    if form != "predicts" or name.startswith("adamw")
]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_an_update_that_is_interrupted_at_any_line_can_be_finished(monkeypatch, name, form):
    monkeypatch.setattr(update_pass, "CHUNK_ELEMENTS", CHUNK)
    expected = buffers(name, form)
    run(expected, form, UpdateProgress())
    start, before, hit = content(buffers(name, form)), sys.gettrace(), 0
    while True:
        hit += 1
        made, progress, traced = buffers(name, form), UpdateProgress(), AtLine(hit)
        sys.settrace(traced)
        try:
            run(made, form, progress)
        except InterruptedAtLineError:
            pass
        finally:
            sys.settrace(before)
        if not traced.has_raised:
            break
        for found, fresh, new in zip(content(made), start, content(expected), strict=True):
            done, next_chunk = (min(n, ELEMENTS) * len(new) // ELEMENTS for n in (progress.done, progress.done + CHUNK))
            assert torch.equal(found[:done], new[:done]) and torch.equal(found[next_chunk:], fresh[next_chunk:])
        run(made, form, progress)
        assert all(map(torch.equal, content(made), content(expected))), f"before line {hit}"
    assert hit > 100, "the pass was never traced"
