"""The predicted time of an evaluation as people read it."""

from tests.support.plans import make_forecast
from workflow.lib.artifacts.preflight_record import EvaluationEstimate
from workflow.lib.planning.preflight.table import evaluation_in_words, render

ESTIMATE = EvaluationEstimate(
    total_s=100.0,
    subjects_s={"base": 40.0, "tuned_on_original": 60.0},
    read_tokens=9,
    written_tokens=3,
    not_counted=["mmlu"],
)


def test_each_subject_has_its_seconds_and_what_is_not_counted_is_named() -> None:
    assert evaluation_in_words(ESTIMATE) == (
        "1 min 40 s: NF4 base 40 s, tuned on original 1 min 0 s; not counted: mmlu"
    )
    assert evaluation_in_words(ESTIMATE.model_copy(update={"total_s": None})) == "not known"


def test_table_shows_the_evaluation() -> None:
    text = render(make_forecast(evaluation=ESTIMATE.model_dump()), run="demo")
    assert "evaluation" in text
    assert "tuned on original 1 min 0 s" in text
