"""`validation.prompts`: continuations at each validation, which depend on the weights alone and change nothing else."""

import json
from types import SimpleNamespace

import torch

from tests.support.batch_contents import TEMPLATE
from tests.support.small_run import ASYNC, stop_after
from torchround.commands.try_model import main as try_model
from torchround.engine.engine import Engine

VALIDATED = ("--validation.interval_steps=2", "--data.validation_fraction=0.2", "--validation.max_batches=2")
PROMPTS = ("--validation.prompts=['ab cd', 'a much longer prompt than the first']", "--validation.prompt_tokens=7")


def samples(runs, name):
    return {int(line["step"]): line["samples"] for line in runs.steps(name) if "samples" in line}


def test_continuations_at_each_validation_change_nothing_and_are_those_of_the_step_s_checkpoint_on_any_devices(
    small_runs, capsys
):
    """The weights of the step, and no others: `async` computes with predictions, which no checkpoint holds."""
    often = ("--checkpoint.interval_steps=2", "--checkpoint.keep_latest_k=0", "--engine.measure_steps=0")
    arguments = (*VALIDATED, ASYNC, *often)
    assert small_runs("plain", *arguments) == 0
    capsys.readouterr()
    assert small_runs("run", *arguments, *PROMPTS) == 0
    assert capsys.readouterr().out.count("ab cd»") == 3
    small_runs.assert_same("run", "plain")
    losses = [[line.get("validation_loss") for line in small_runs.steps(name)] for name in ("run", "plain")]
    assert losses[0] == losses[1]
    found = samples(small_runs, "run")
    assert list(found) == [2, 4, 5] and not samples(small_runs, "plain")
    assert found[2][0]["text"] != found[5][0]["text"], "five steps with a large learning rate change the text"
    stop_after(4, small_runs, "parted", *arguments, *PROMPTS)
    assert small_runs("parted", *arguments, *PROMPTS, "--engine.plan=none", "--engine.num_devices=3") == 0
    assert samples(small_runs, "parted") == found
    capsys.readouterr()
    for step, texts in found.items():
        prompts = [sample["prompt"] for sample in texts]
        assert prompts == ["ab cd", "a much longer prompt than the first"]
        asked = ("--run", "outputs/run", f"--step={step}", "--max-tokens=7", "--json")
        assert try_model([*asked, "--prompt", *prompts]) == 0
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
        outputs = [torch.full_like(output, torch.nan) for output in forward(self, batches).outputs()]
        return SimpleNamespace(outputs=lambda: outputs)

    monkeypatch.setattr(Engine, "forward", spoilt)
    assert small_runs("run", *VALIDATED, *PROMPTS) == 0
    assert not samples(small_runs, "run")
    assert caplog.text.count("validation.prompts are not continued") == 3
