"""The plans that preflight tried, as people see them: the chosen one among its neighbours."""

from collections.abc import Sequence

from workflow.lib.artifacts.preflight_record import Forecast, TriedPlan
from workflow.lib.planning.preflight.plan_search import VERDICTS_OF_CHOSEN
from workflow.lib.step_plan.memory_options import in_words

FASTER, SLOWER = 6, 3  # plans shown on either side of the chosen one


def nearest_plans(plans: Sequence[TriedPlan]) -> list[TriedPlan]:
    """Return the chosen plan (of a run that does not fit, the one that needs least) between the
    next ones that would be faster and the next slower ones that fit, by their time."""
    chosen = min(plans, key=lambda p: (p.why not in VERDICTS_OF_CHOSEN, abs(p.relative_time - 1)))
    ordered = sorted(plans, key=lambda plan: (plan.relative_time, plan.peak_bytes))
    index = ordered.index(chosen)
    slower = [plan for plan in ordered[index + 1 :] if plan.fits]
    return ordered[max(0, index - FASTER) : index + 1] + slower[:SLOWER]


def plan_choices(forecast: Forecast) -> list[str]:
    """Return the titles of `in_words` in which tried plans differ, and recomputation."""
    described = [in_words(tried.plan(forecast.plan)) for tried in forecast.candidates]
    differ = {title for title in described[0] if len({words[title] for words in described}) > 1}
    return [title for title in described[0] if title in differ | {"recomputation"}]
