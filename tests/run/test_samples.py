"""`validation.prompts`: continuations at each validation, which depend on the weights alone and change nothing else."""

import json

import pytest
import torch

from tests.support.batch_contents import TEMPLATE
from tests.support.small_run import ASYNC, small_runs, stop_after
from torchround.commands.try_model import main as try_model
from torchround.engine.engine import Engine

__all__ = ["small_runs"]

VALIDATED = ("--validation.interval_steps=2", "--data.validation_fraction=0.2", "--validation.max_batches=2")
PROMPTS = ("--validation.prompts=['ab cd', 'a much longer prompt than the first']", "--validation.prompt_tokens=7")


def samples(runs, name):
    """Return what each line of the metrics holds."""
    return {int(line["step"]): line["samples"] for line in runs.steps(name) if "samples" in line}


def test_each_validation_continues_the_prompts_and_nothing_else_changes(small_runs, capsys):
    assert small_runs("plain", *VALIDATED) == 0
    capsys.readouterr()
    assert small_runs("prompted", *VALIDATED, *PROMPTS) == 0
    shown = capsys.readouterr().out
    small_runs.assert_same("prompted", "plain")
    assert [line.get("validation_loss") for line in small_runs.steps("prompted")] == [
        line.get("validation_loss") for line in small_runs.steps("plain")
    ]
    found = samples(small_runs, "prompted")
    assert list(found) == [2, 4, 5] and not samples(small_runs, "plain")
    for texts in found.values():
        assert [sample["prompt"] for sample in texts] == ["ab cd", "a much longer prompt than the first"]
    first = found[2][0]
    assert shown.count("ab cd»") == 3
    assert first["text"] != found[5][0]["text"], "five steps with a large learning rate change the text"


def test_continuations_are_the_same_on_any_number_of_devices_and_after_a_resume(small_runs):
    arguments = (*VALIDATED, *PROMPTS, ASYNC, "--engine.plan=none", "--engine.measure_steps=0")
    for count in (1, 3):
        assert small_runs(f"on-{count}", *arguments, f"--engine.num_devices={count}") == 0
    stop_after(4, small_runs, "parted", *arguments)
    assert small_runs("parted", *arguments) == 0
    small_runs.assert_same("parted", "on-1")
    assert len(samples(small_runs, "on-1")) == 3
    assert samples(small_runs, "on-1") == samples(small_runs, "on-3") == samples(small_runs, "parted")


def test_the_continuations_are_the_ones_of_the_checkpoint_of_that_step(small_runs, capsys):
    """The weights of the step, and no others: `async` computes with predictions, which no checkpoint holds."""
    arguments = (*VALIDATED, *PROMPTS, ASYNC, "--checkpoint.interval_steps=2", "--checkpoint.keep_latest_k=0")
    assert small_runs("run", *arguments) == 0
    capsys.readouterr()
    for step, texts in samples(small_runs, "run").items():
        prompts = [sample["prompt"] for sample in texts]
        run = ("--run", "outputs/run", f"--step={step}", "--max-tokens=7", "--json")
        assert try_model([*run, "--prompt", *prompts]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [{key: line[key] for key in ("prompt", "text")} for line in lines] == texts


def test_a_run_on_chats_asks_its_prompts_with_the_chat_template(small_runs, capsys):
    chat = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd ef"}]}
    (small_runs.folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 20)
    (small_runs.folder / "chat.jinja").write_text(TEMPLATE)
    source = "--data.sources=[{ path = 'chats.jsonl', content = 'messages' }]"
    chats = (source, "--tokenizer.chat_template=chat.jinja", "--validation.sources=[{ path = 'text.jsonl' }]")
    assert small_runs("run", *chats, "--validation.interval_steps=5", *PROMPTS) == 0
    run = ("--run", "outputs/run", "--max-tokens=7", "--json", "--prompt", "ab cd")
    capsys.readouterr()
    texts = []
    for asked in ((*run, "--chat"), run):
        assert try_model(list(asked)) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] != texts[1], "the template makes a difference"
    assert samples(small_runs, "run")[5][0] == {"prompt": "ab cd", "text": texts[0]}


def test_logits_that_are_not_numbers_are_one_warning_and_no_end_of_the_run(small_runs, monkeypatch, caplog):
    forward = Engine.forward

    def spoilt(self, batches):
        result = forward(self, batches)
        outputs = [torch.full_like(output, torch.nan) for output in result.outputs()]
        monkeypatch.setattr(result, "outputs", lambda: outputs, raising=False)
        return result

    monkeypatch.setattr(Engine, "forward", spoilt)
    assert small_runs("run", *VALIDATED, *PROMPTS) == 0
    assert not samples(small_runs, "run")
    assert caplog.text.count("validation.prompts are not continued") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--validation.prompts=['a']",), "validation.prompts, validation.interval_steps: "),
        ((*VALIDATED, "--validation.prompts=['']"), "validation.prompts[0]: "),
        ((*VALIDATED, "--validation.prompts=a"), "legal: an array"),
        ((*VALIDATED, *PROMPTS, "--validation.prompt_tokens=0"), "validation.prompt_tokens: given 0"),
        ((*VALIDATED, *PROMPTS, "--data.sources=[{path = 'text.jsonl', content = 'tokens'}]"), "token ids"),
    ],
)
def test_prompts_that_cannot_be_continued_are_one_message(small_runs, capsys, arguments, message):
    assert small_runs("run", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not small_runs.path("run").exists()
