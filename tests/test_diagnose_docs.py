"""What the pages on aggregation and diagnosis point at exists."""

import re

import pytest

from analysis import figures

PAGES = ("docs/aggregation.md", "docs/diagnose.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_test_and_figure_that_a_page_names_exists(page):
    with open(page) as file:
        text = file.read()
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    for path, name in tests:
        with open(path) as file:
            assert f"def {name}(" in file.read(), f"{page} names {path}::{name}"
    for name in re.findall(r"`analysis\.figures\.(\w+)`", text):
        assert callable(getattr(figures, name)), f"{page} names the figure {name}"
    assert len(tests) >= (10 if page == "docs/aggregation.md" else 0)
