"""The report is one page that stands by itself, and says what the tables say."""

import base64
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from analysis import comparisons
from analysis.figures import FIGURES
from analysis.report import SECTIONS, report_page, write_report
from analysis.runs import LoggedRuns
from analysis.synthetic import Lengths, Study, draw_study, log_study
from analysis.tables import tables

STUDY = Study(
    seeds=3, steps=6, models={"gapped": Lengths(gap=-0.4)}, datasets=("chains", "tales <b>"), effects={"balanced": 0.03}
)  # fmt: skip
VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """What a page holds: every link and image, the ids, the text of each element with an id; checks nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.images: list[dict[str, str]] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.addresses += [values[name] for name in ("href", "src") if name in values]
        self.ids += [values["id"]] if "id" in values else []
        if tag == "img":
            self.images.append(values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + " "


@pytest.fixture(scope="module")
def loaded() -> LoggedRuns:
    return draw_study(STUDY)


@pytest.fixture(scope="module")
def source(loaded: LoggedRuns) -> str:
    return report_page(loaded, "balagg-study")


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_every_figure_and_table_has_its_place(page: Page, loaded: LoggedRuns):
    placed = [name for names in SECTIONS.values() for name in names]
    assert sorted(placed) == sorted([*FIGURES, *(table.name for table in tables(loaded))])
    assert set(placed) <= set(page.ids) and len(page.ids) == len(set(page.ids))
    assert page.open == []


def test_the_page_needs_nothing_else(page: Page, source: str):
    for address in page.addresses:
        if address.startswith("#"):
            assert address[1:] in page.ids
        else:
            assert address.startswith(("data:image/svg+xml;base64,", "data:image/png;base64,"))
    style = source[source.index("<style>") : source.index("</style>")]
    assert "url(" not in style and "@import" not in style and "<script" not in source


def test_images_are_drawings_with_words_for_those_who_do_not_see_them(page: Page):
    assert len(page.images) == len(FIGURES) + len(STUDY.rules)
    for image in page.images:
        assert image["alt"]
        kind, content = image["src"].split(";base64,")
        drawing = base64.b64decode(content)
        if kind == "data:image/svg+xml":
            assert ET.fromstring(drawing).tag.endswith("svg")
        else:
            assert drawing.startswith(b"\x89PNG")


def test_findings_are_the_numbers_of_the_tables(page: Page, loaded: LoggedRuns):
    table = comparisons.differences(loaded)
    found = table[table.rule == "balanced"]
    ends = [f"{value:+.3f}".replace("-", "−") for value in (found["mean"].min(), found["mean"].max())]
    apart = int(((found.low > 0) | (found.high < 0)).sum())
    text = " ".join(page.text.split())
    assert f"balanced minus that of sequence: {ends[0]} to {ends[1]}, and {apart} of 2 intervals without zero" in text
    assert "18 finished runs: 3 aggregation rules (sequence, token, balanced)" in text
    assert "n = 3 seeds per rule. 6 training steps each." in text


def test_names_cannot_be_markup(source: str):
    assert "tales <b>" not in source and "tales &lt;b&gt;" in source


def test_both_colour_schemes_and_print_have_a_style(source: str):
    assert "prefers-color-scheme: dark" in source and "@media print" in source and "color-scheme: light dark" in source


def test_one_seed_of_an_unfinished_grid_has_no_intervals_and_says_what_is_missing(
    loaded: LoggedRuns, monkeypatch: pytest.MonkeyPatch
):
    def keep(table: pd.DataFrame) -> pd.DataFrame:
        return table[(table.seed == 0) & (table.dataset == "chains")] if len(table) else table

    tables = LoggedRuns(*map(keep, loaded))
    params = tables.params.copy()
    params.loc[params.rule == "token", "status"] = "FAILED"
    metrics = tables.metrics[tables.metrics.rule != "token"]
    monkeypatch.setattr("analysis.report.MOST_SVG_BYTES", 1000)
    text = report_page(tables._replace(params=params, metrics=metrics), "one seed")
    assert "n = 1 seed: these are single runs, and no interval is given below 3." in text
    assert "intervals without zero" not in text and "95 % interval over" not in text
    assert re.search(r'<div class="notes"><p>Missing 1 of 3 cells: token on gapped · chains seed 0 \(failed\)\.', text)
    # Drawings of many bytes are embedded as PNG.
    assert all(image["src"].startswith("data:image/png") for image in Page(text).images)


def test_the_command_writes_the_same_page_from_the_store_alone(tmp_path: Path):
    study = Study(seeds=1, models={"m": Lengths(gap=-0.3)}, datasets=("gen_chains",), steps=6)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    log_study(study, uri, "balagg-laptop", tmp_path / "artifacts")
    written = write_report(uri, "balagg-laptop", tmp_path / "here")
    command = [sys.executable, "-m", "orchestrator", "report", "--grid", "laptop", "--out", str(tmp_path / "there")]
    environment = os.environ | {"MLFLOW_TRACKING_URI": uri, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "there" / "index.html")
    assert (tmp_path / "there" / "index.html").read_bytes() == written.read_bytes()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["index.html"]


def test_a_grid_without_runs_is_a_message(tmp_path: Path):
    command = [sys.executable, "-m", "orchestrator", "report", "--out", str(tmp_path)]
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/none.db"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "no MLflow database" in done.stderr and "Traceback" not in done.stderr
