"""The list of types that fit is made by a test: every causal language model of `transformers`, compared at toy size."""

import re

import pytest
import transformers

from tests.support.list_of_models import HEAD, PAGE, look_at, row
from tests.support.toy_decoders import causal_types

TEXT = PAGE.read_text(encoding="utf-8")
# Another version may have another list.
IS_OF_THIS_VERSION = f"`transformers` {transformers.__version__} " in TEXT


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", causal_types())
def test_a_type_is_equal_to_transformers_or_refused_as_the_page_says(model_type):
    reason = look_at(model_type)
    fits, _, refused = TEXT.partition("refused (")
    rows = refused.splitlines() if reason else re.split(r"[\n ,]+", fits)
    assert row(model_type, reason) in rows or not IS_OF_THIS_VERSION


def test_the_page_lists_each_type_once():
    version = re.search(r"`transformers` (\S+) ", TEXT)
    assert version is not None and TEXT.startswith(HEAD.format(version=version[1]))
    if IS_OF_THIS_VERSION:
        fits, refused = TEXT.removeprefix(HEAD.format(version=version[1])).split("## Types that are refused")
        listed = re.findall(r"`([^`]+)`", fits) + re.findall(r"^\| `([^`]+)` \|", refused, re.MULTILINE)
        assert sorted(listed) == sorted(causal_types())
