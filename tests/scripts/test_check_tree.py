"""Each rule about the tree finds a planted offence. `.ci/run` runs the rules themselves."""

import pytest

from scripts.check_tree import (
    RULES,
    Source,
    circles,
    imports_only_what_is_below,
    knows_no_kind_of_device,
    model_imports_little,
    only_defines,
    open_ends,
    planner_is_pure,
    rooms_that_grew,
    says_what_fails,
)

OFFENCES = [
    (imports_only_what_is_below, "torchround/engine/x.py", "from torchround.run import y"),
    (imports_only_what_is_below, "torchround/data/x.py", "import torchround.models"),
    (imports_only_what_is_below, "torchround/data/x.py", "def f():\n    from tests import y"),
    (model_imports_little, "torchround/models/a/x.py", "from torchround.models.b import y"),
    (model_imports_little, "torchround/models/a/x.py", "import triton"),
    (planner_is_pure, "torchround/planning/x.py", "import torch"),
    (planner_is_pure, "torchround/planning/x.py", "def f():\n    open('x')"),
    (only_defines, "torchround/x.py", "print()"),
    (only_defines, "torchround/x.py", "x = []"),
    (only_defines, "torchround/x.py", "def f():\n    global x"),
    (knows_no_kind_of_device, "torchround/x.py", "x = torch.cuda"),
    (says_what_fails, "torchround/x.py", "def f():\n    assert x"),
    (says_what_fails, "torchround/x.py", "def f():\n    try:\n        g()\n    except Exception:\n        pass"),
]


@pytest.mark.parametrize(("rule", "name", "text"), OFFENCES, ids=[rule.__name__ for rule, *_ in OFFENCES])
def test_each_rule_finds_its_offence_and_no_other_does(rule, name, text):
    assert [found for found in RULES if [*found(Source(name, text))]] == [rule]


def test_a_model_may_name_a_module_of_the_package():
    source = Source("torchround/models/a/x.py", "from torchround import layer, run")
    assert [*model_imports_little(source)] == ["imports torchround.run"]


def test_a_circle_an_open_end_and_a_room_that_grew_are_found():
    circle = [Source("torchround/a.py", "from torchround import b"), Source("torchround/b.py", "import torchround.a")]
    assert [*circles(circle)] and not [*circles(circle[:1])]
    assert [*open_ends([Source("tests/x.py", "xf" + "ail")])]
    grew = rooms_that_grew({"a": 11, "b": 10, "c": 5}, {"a": 10, "b": 10, "c": 105})
    assert [line.split()[0] for line in grew] == ["a", "c"]
