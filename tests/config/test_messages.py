"""One message for everything that is wrong: file, key, given, legal, nearest. And each key's documentation."""

from pathlib import Path

import pytest

from tests.support.toml import MINIMAL
from torchround import config
from torchround.config import AdamWTable, ConfigError, load_config, to_toml
from torchround.config.__main__ import page
from torchround.config.key_types import Table
from torchround.config.load import all_keys

VALID = f"{MINIMAL}[training]\nsteps = 50\nglobal_batch_size = 8\nmicro_batch_size = 2\n"


@pytest.fixture
def message(tmp_path):
    def refused(text, *overrides):
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "run.toml", overrides)
        return str(caught.value).replace(str(tmp_path / "run.toml"), "run.toml")

    return refused


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.seq_length=3", "training.seq_length: unknown key, given 3; legal in training: steps, "),
        ("training.seq_length=3", "; nearest: seq_len"),
        ("training.lr=3", "; nearest: optimizer.lr"),
        ("trainig.steps=3", 'trainig: unknown table, given {"steps": 3}; legal: run, model, '),
        ("trainig.steps=3", "; nearest: training"),
        ("training.steps=two", 'training.steps: given "two"; input should be a valid integer'),
        ("training.steps=9223372036854775808", "less than or equal to 9223372036854775807"),
        ("optimizer.lr=inf", "optimizer.lr: given inf; input should be a finite number"),
        ("optimizer.betas=[0.9]", "optimizer.betas[1]: missing"),
        ("optimizer.betas=[0.9, 2]", "optimizer.betas[1]: given 2; input should be less than 1"),
        ("optimizer.name=muno", 'optimizer.name: given "muno"; legal: adamw, muon'),
        ("optimizer.state=small", "given \"small\"; input should be 'exact' or 'compact'"),
        ("optimizer.beta=0.9", "optimizer.beta: unknown key, given 0.9; legal in optimizer: name, lr, "),
        ("engine.update=asyncc", "given \"asyncc\"; input should be 'sync', 'async' or 'bounded'; nearest: async"),
        ("engine.plan=3", "engine.plan: given 3; input should be a table or a valid string"),
        ("engine.plan={fused=0}", "engine.plan.forward: missing"),
        ("data.sources=[]", "data.sources: given []; value should have at least 1 item"),
        ("data.sources=[{}]", "data.sources[0].path: missing"),
        ('data.sources=[{path="a"}, {path=1}]', "data.sources[1].path: given 1; input should be a valid string"),
        ('data.sources=[{pathh="a"}]', "data.sources[0].pathh: unknown key"),
        ("run.name=7", "run.name: given 7; input should be a valid string"),
        ("run.name=a/b", 'given "a/b"; string should match pattern '),
        ("lora.rank_pattern={q=0}", "lora.rank_pattern.q: given 0; input should be greater than or equal to 1"),
        (
            'lora.alpha_pattern={"(q"=2}',
            'given "(q"; value error, a regular expression is wanted: missing ), unterminated',
        ),
        ('lora.rank_pattern={"(q+)+"=2}', "at most three repeats, and none of a group"),
        ("training.dtype=float64", "input should be 'float32', 'bfloat16' or 'float16'"),
        ("training.dtype=floa16", "; nearest: float16"),
    ],
)
def test_a_mistake_on_the_command_line_is_named_with_what_is_legal(message, override, expected):
    lines = message(VALID, f"--{override}").splitlines()
    assert any(line.strip().startswith("command line: ") and expected in line for line in lines), lines


def test_a_mistake_in_a_file_is_one_line_that_begins_with_the_file(message):
    text = VALID.replace("steps = 50", 'steps = "50"')
    assert message(text) == 'run.toml: training.steps: given "50"; input should be a valid integer'
    assert "; nearest: optimizer.lr" in message("lr = 1\n" + VALID)
    # A chosen optimizer's mistakes are named once, not for each optimizer.
    assert message(f"{VALID}[optimizer]\nlr = 0").count("optimizer.lr") == 1


def test_the_command_line_is_blamed_only_for_what_it_gave(message):
    lines = message(VALID.replace("steps = 50", "steps = 0"), "--training.seq_len=0").splitlines()
    places = [line.split(": ")[:2] for line in lines[1:]]
    assert places == [["  run.toml", "training.steps"], ["  command line", "training.seq_len"]]


def test_all_missing_required_keys_are_named(message):
    first, *lines = message("").splitlines()
    assert first == "2 problems in the configuration"
    assert [line.split(";")[0] for line in lines] == [
        f"  run.toml: {key}: missing" for key in ("model.family", "data.sources")
    ]


def test_a_value_in_place_of_a_table_is_refused_with_the_way_to_write_a_table(message):
    text = VALID.partition("[training]")[0]
    assert message("training = 3\n" + text) == "run.toml: training: given 3; input should be a table"
    assert "optimizer: given 3; input should be a table" in message("optimizer = 3\n" + text)


BOUNDED = "engine.update=bounded"
BY_LAYER = f"{BOUNDED} training.clip=layer"
PLAN = "engine.plan={forward=[1],fused=1,backward=[1],rounds=%d}"
CONFLICTS = [
    ("model.hf_path=folder", "model.flavor model.hf_path debug folder"),
    ("model.flavor=none", "model.flavor model.shape model.hf_path"),
    ("tokenizer.path=folder", "tokenizer.path tokenizer.name folder bytes"),
    ("engine.delay_correction=predict engine.update=sync", 'engine.delay_correction engine.update "predict" "async"'),
    (BOUNDED, 'engine.update training.clip training.max_norm "bounded" "layer"'),
    (f"{BY_LAYER} training.dtype=float16", 'engine.update training.dtype "float16" "bfloat16"'),
    (f"{BOUNDED} training.max_norm=0 engine.rounds=2", "engine.rounds engine.update 2 1"),
    (f"{BY_LAYER} {PLAN % 2}", "engine.plan engine.update 2"),
    (f"{BY_LAYER} engine.delay_correction=predict", 'engine.delay_correction engine.update "predict" "bounded"'),
    (
        "optimizer.name=muon engine.update=async engine.delay_correction=predict",
        'engine.delay_correction optimizer.name "predict" "muon" "auto" "none"',
    ),
    (f"{BOUNDED} optimizer.name=muon training.clip=layer", 'engine.update optimizer.name "bounded" "muon" "sync"'),
    ("engine.rounds=5", "engine.rounds training.global_batch_size 5 1 4"),
    (PLAN % 5, "engine.plan 5 1 4"),
    ("lr_schedule.warmup_steps=50", "lr_schedule.warmup_steps training.steps 50 49"),
    ("lora.path=folder", "lora.path lora.rank folder 0"),
    ("lora.dora=true", "lora.dora lora.rank true 0"),
    ("lora.rank_pattern.q_proj=4", 'lora.rank_pattern lora.rank {"q_proj": 4} 0'),
    ("lora.path=folder lora.rank=4", "lora.path model.hf_path"),
    ("lora.experts_by_need=true", 'lora.experts_by_need lora.base true "bf16" "auto"'),
    ("lora.experts_by_need=true lora.base=nf4 lora.rank=4", 'lora.experts_by_need engine.compile true "auto"'),
    ('checkpoint.load="weights"', "checkpoint.load checkpoint.load_path"),
    ("validation.interval_steps=5", "validation.interval_steps validation.sources"),
]


@pytest.mark.parametrize(("overrides", "words"), CONFLICTS)
def test_a_conflict_between_keys_names_the_keys_and_the_values(message, overrides, words):
    text = message(VALID, *(f"--{override}" for override in overrides.split(" ")))
    assert "\n" not in text and "command line" in text
    assert all(part in text for part in [*words.split(), "legal: "]), text


@pytest.mark.parametrize(
    "overrides",
    [
        "model.flavor=none model.hf_path=folder",
        "tokenizer.name=none tokenizer.path=folder",
        "model.flavor=none model.hf_path=folder tokenizer.name=none",
        "training.micro_batch_size=8",
        "training.micro_batch_size=3 engine.rounds=3",
        "engine.plan={forward=[],fused=3,backward=[],rounds=4} engine.rounds=4",
        f"{BOUNDED} training.clip=layer engine.stale_layers=2 engine.rounds=1",
        f"{BOUNDED} training.max_norm=0 engine.rounds=auto",
        "lr_schedule.warmup_steps=49",
        'validation.interval_steps=5 validation.sources=[{path="x"}]',
        r'run.name=x run.folder="a\\b" data.sources=[{path="\"é",content="tokens",weight=2.5e-300}] training.max_norm=1e300',
        "optimizer.lr=1 optimizer.name=adamw optimizer.state=compact optimizer.betas=[0.8,0.9]",
        'engine.plan=auto engine.compile=false engine.device_memory_gib=0.1 lora.targets=["a"] lora.dropout=0.5',
        r'lora.rank=4 lora.dora=true lora.rank_pattern={"\\.[01]\\.q_proj"=8,k_proj=2} lora.alpha_pattern.q_proj=1.5',
    ],
)
def test_combinations_at_the_edge_of_what_is_legal_are_accepted_and_load_again_from_toml(tmp_path, overrides):
    (tmp_path / "run.toml").write_text(VALID)
    config = load_config(tmp_path / "run.toml", [f"--{override}" for override in overrides.split(" ")])
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "config.toml") == config and isinstance(config.optimizer, AdamWTable)
    assert hash(config.engine) == hash(load_config(tmp_path / "config.toml").engine)


def test_all_conflicts_of_one_load_are_in_one_message_with_every_source_of_their_keys(message):
    lines = message(VALID, "--model.hf_path=x", "--engine.rounds=5").splitlines()
    assert lines[0] == "2 problems in the configuration" and len(lines) == 3
    assert message(VALID, "--engine.rounds=5").startswith("command line and run.toml: engine.rounds")


def test_a_mistake_inside_a_table_is_not_repeated_for_the_table(message):
    text = message(VALID, "--engine.plan={forward = [1], fused = 0, backward = [1]}")
    assert text == "command line: engine.plan.fused: given 0; input should be greater than or equal to 1"


PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
TABLES = [value for value in vars(config).values() if isinstance(value, type) and issubclass(value, Table)]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_tables_and_keys_are_documented(table):
    fields = [] if table is config.Config else table.model_fields.values()
    assert all(text and text.strip() for text in (table.__doc__, *(info.description for info in fields)))


def test_the_page_of_all_keys_is_up_to_date_and_has_every_key_under_its_table():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m torchround.config > docs/configuration.md"
    for table, keys in all_keys().items():
        # An optimizer's table has a section of its own.
        section = "".join(text for text in page().split("\n## ") if text.startswith(f"`[{table}]"))
        assert all(f"\n**`{key}`**: " in section for key in keys), table
