"""The list of types that fit is made by a test: every causal language model of `transformers`, compared at toy size."""

import re

import pytest
import transformers

from tests.support import list_of_models
from tests.support.list_of_models import HEAD, PAGE, ListedModel, compare, look_at, page
from tests.support.toy_decoders import causal_types, toy_config, toy_decoder
from tests.support.transformers_loop import pair_of
from torchround.models import FAMILIES, ModelConfigError

TEXT = PAGE.read_text(encoding="utf-8")


def is_of_this_version():
    """Return whether the page is of the installed version; another version may have another list."""
    return f"`transformers` {transformers.__version__} " in TEXT


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", causal_types())
def test_a_type_is_equal_to_transformers_or_refused_as_the_page_says(model_type):
    listed = look_at(model_type)
    fits, _, refused = TEXT.partition("refused (")
    rows = refused.splitlines() if listed.reason else re.split(r"[\n ,]+", fits)
    assert listed.row() in rows or not is_of_this_version()


def test_the_page_lists_each_type_once():
    version = re.search(r"`transformers` (\S+) ", TEXT)
    assert version is not None and TEXT.startswith(HEAD.format(version=version[1]))
    if is_of_this_version():
        fits, refused = TEXT.removeprefix(HEAD.format(version=version[1])).split("## Types that are refused")
        listed = re.findall(r"`([^`]+)`", fits) + re.findall(r"^\| `([^`]+)` \|", refused, re.MULTILINE)
        assert sorted(listed) == sorted(causal_types())


def test_a_type_that_computes_something_else_is_an_error(tools):
    theirs = toy_decoder(toy_config("gemma2"))
    pair = pair_of(tools, theirs)
    theirs.config.final_logit_softcapping = 1.0
    with pytest.raises(AssertionError, match="logits"):
        compare(pair)


def test_a_refusal_is_a_row_with_its_reason(monkeypatch):
    class Refusing:
        def build(self, config):
            raise AssertionError("the config is refused already")

        def config_from_hf(self, content):
            raise ModelConfigError("model_type 'qwen3' of transformers has | no blocks")

    monkeypatch.setattr(list_of_models, "FAMILIES", {**FAMILIES, "transformers": Refusing()})
    listed = look_at("qwen3")
    assert listed == ListedModel("qwen3", "has \\| no blocks")
    assert listed.row() in page([listed]).splitlines()
