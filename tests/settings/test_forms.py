"""Which forms of the model are measured, and which one is served."""

import pytest

from workflow.lib.settings.config import load_config
from workflow.lib.system.errors import UserError


def run_with(**sections):
    (run,) = load_config(sections)[1].values()
    return run


@pytest.mark.parametrize(
    ("sections", "subjects", "served"),
    [
        ({}, ("original", "base", "tuned"), "tuned"),
        ({"export": {"merged": True}}, ("original", "base", "tuned", "merged"), "merged"),
        (
            {"export": {"merged": True, "w4a16": True}},
            ("original", "base", "tuned", "merged", "w4a16"),
            "w4a16",
        ),
        (
            {"export": {"merged": True, "w4a16": True, "gguf": ["q8_0"], "serve": "llama_cpp"}},
            ("original", "base", "tuned", "merged", "w4a16"),
            "merged",
        ),
        (
            {"evaluate": {"served": "tuned_on_original"}},
            ("original", "base", "tuned", "tuned_on_original"),
            "tuned_on_original",
        ),
        ({"evaluate": {"subjects": ["tuned", "base"]}}, ("base", "tuned"), "tuned"),
    ],
)
def test_what_is_served_is_among_the_measured(sections, subjects, served):
    run = run_with(**sections)
    assert (run.subjects, run.served) == (subjects, served)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"evaluate": {"subjects": ["base"]}}, r"evaluate\.served: tuned\) must be measured"),
        ({"evaluate": {"served": "merged"}}, r"export\.merged = false: .* none is exported"),
        ({"export": {"w4a16": True}}, r"w4a16 = True: it is made of the merged model"),
        ({"export": {"hub_form": "w4a16"}}, r"hub_form = w4a16: it is not exported"),
        ({"evaluate": {"subjects": ["tuned"]}}, "measured against one of original, base"),
        ({"evaluate": {"subjects": ["base", "base", "tuned"]}}, "entry 2 stands there twice"),
        ({"evaluate": {"subjects": ["orginal"]}}, "entry 1 must be 'original', 'base'"),
    ],
)
def test_subjects_that_do_not_suit_are_refused(sections, message):
    with pytest.raises(UserError, match=message):
        run_with(**sections)


def test_shared_settings_may_name_what_a_run_exports():
    document = {"evaluate": {"served": "merged"}, "runs": {"a": {"export": {"merged": True}}}}
    assert load_config(document)[1]["a"].served == "merged"
