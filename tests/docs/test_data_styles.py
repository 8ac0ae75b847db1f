"""The table of public dataset styles is what becomes of the samples, and each can be trained on."""

import pytest

from tests.support.styles_page import PAGES, PREFERENCES, STYLES, TEMPLATE, read_style, written
from tests.support.tiny import tiny_tokenizer
from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.preference_rows import Judged, begin_judged
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.system.errors import UserError

REFUSED = {"glaive_tools", "kto", "oasst", "preference"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return SampleEncoder(tokenizer, chat_template=TEMPLATE, loss_on="completions")


@pytest.mark.parametrize("name", PAGES)
def test_page_shows_what_becomes_of_each_style(name):
    page = PAGES[name].read_text(encoding="utf-8")
    assert written(name) == page, "`python -m tests.support.styles_page` writes it again"


@pytest.mark.parametrize("name", [name for name in STYLES if name not in REFUSED])
def test_rows_of_a_style_have_trained_tokens(name, encoder):
    rows = [row for row in read_style(name).rows if isinstance(row, Conversation)]
    assert rows
    for row in rows:
        assert any(encoded.mask.any() for encoded in encoder.encode(row))


@pytest.mark.parametrize("name", PREFERENCES)
def test_rows_of_a_style_of_preferences_share_their_prompt(name, encoder):
    _, examples = PREFERENCES[name]
    rows = [row for row in read_style(name, examples).rows if isinstance(row, Judged)]
    assert rows
    for row in rows:
        documents = begin_judged(encoder, row)()
        assert len(documents) == (2 if examples == "pairs" else 1)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_style_that_means_no_format_is_refused(name):
    with pytest.raises(UserError, match=r"^data\.(format|columns\.label)"):
        read_style(name)
