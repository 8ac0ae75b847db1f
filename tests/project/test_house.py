"""The library stays within the figures of `workflow/docs/architecture.md`."""

from tests.support.house import bounds, figures


def test_library_is_within_the_figures_of_the_page():
    counted, allowed = figures(), bounds()
    assert counted.keys() == allowed.keys()
    assert {name: count for name, count in counted.items() if count > allowed[name]} == {}
