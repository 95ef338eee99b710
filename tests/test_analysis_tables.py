"""The Table-1-shaped table, against numbers worked out by hand."""

import csv
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.runs import LoggedRuns
from analysis.tables import table_1, to_csv, to_latex, to_markdown, write_tables
from trainers import metric_names as names


def runs_with_means(cells: dict[tuple[str, str, str], list[float]], **params: str) -> LoggedRuns:
    """Runs whose mean accuracy is 0.2 before training, 0.9 in between, and as given per seed at step 40."""
    rows, table = [], []
    for (rule, model, dataset), finals in cells.items():
        for seed, final in enumerate(finals):
            run = f"{rule}-{model}-{dataset}-{seed}"
            axes = {"run": run, "rule": rule, "model": model, "dataset": dataset, "scope": "group", "seed": seed}
            table.append(axes | {"status": "FINISHED"} | params)
            means = {0: 0.2, 20: 0.9, 40: final}
            rows += [axes | {"metric": names.EVAL_MEAN, "step": s, "value": v} for s, v in means.items()]
    return LoggedRuns(pd.DataFrame(table), pd.DataFrame(rows))


TINY = {
    ("sequence", "tiny", "chains"): [0.5],
    ("token", "tiny", "chains"): [0.62344],
    ("balanced", "tiny", "chains"): [0.61],
    ("sequence", "tiny", "tales_2"): [0.4],
    ("balanced", "tiny", "tales_2"): [0.40004],
}


def test_one_row_per_panel_with_the_last_step():
    table = table_1(runs_with_means(TINY))
    assert table[["model", "dataset", "step"]].to_numpy().tolist() == [
        ["tiny", "chains", "40"],
        ["tiny", "tales_2", "40"],
    ]
    assert table.base.tolist() == pytest.approx([0.2, 0.2], rel=1e-12)
    assert table[["sequence", "token", "balanced"]].iloc[0].tolist() == [0.5, 0.62344, 0.61]
    assert np.isnan(table.token[1]) and table.token_seeds.tolist() == [1, 0]
    assert table.filter(regex="_(low|high|paper)$").isna().all(axis=None)


def test_three_seeds_give_mean_and_interval():
    row = table_1(runs_with_means({("token", "tiny", "chains"): [0.5, 0.6, 0.7]})).iloc[0]
    half_width = 4.302653 * 0.1 / np.sqrt(3)
    assert (row.token, row.token_low, row.token_high) == pytest.approx((0.6, 0.6 - half_width, 0.6 + half_width))
    assert row.token_seeds == 3


def test_markdown_sets_the_best_in_bold_and_ties_too():
    lines = to_markdown(table_1(runs_with_means(TINY)), ["One note."]).splitlines()
    assert lines[0] == "| model | dataset | step | base model | sequence (GRPO) | token (DAPO) | balanced (BA) |"
    assert lines[1] == "|---|---|---|---:|---:|---:|---:|"
    assert lines[2] == "| tiny | chains | 40 | 0.2000 | 0.5000 | **0.6234** | 0.6100 |"
    # Equal to the digits shown: no rule is ahead of the other.
    assert lines[3] == "| tiny | tales_2 | 40 | 0.2000 | **0.4000** | – | **0.4000** |"
    assert "1 seed per cell" in lines[5] and lines[5].endswith("One note.")


def test_latex_is_booktabs_and_escaped():
    cells = {("token", "m_1", "d"): [0.5, 0.6, 0.7], ("balanced", "m_1", "d"): [0.1, 0.1, 0.1]}
    text = to_latex(table_1(runs_with_means(cells)), ["100 % of a_b · c."])
    for command in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert text.count(command) == 1
    assert r"m\_1 & d & 40 & 0.2000 & \textbf{0.6000} $\pm$ 0.2484 & 0.1000 $\pm$ 0.0000 \\" in text
    assert r"\begin{tabular}{lllrrr}" in text
    assert r"100 \% of a\_b $\cdot$ c." in text


def test_papers_values_stand_beside_ours_in_the_papers_cells():
    cells = {("sequence", "qwen3-1.7b", "polaris_53k"): [0.4], ("balanced", "qwen3-1.7b", "polaris_53k"): [0.5]}
    table = table_1(runs_with_means(cells, **{"model.hub_id": "Qwen/Qwen3-1.7B"}))
    assert table[["sequence_paper", "balanced_paper"]].to_numpy().tolist() == [[0.4614, 0.4640]]
    header, _, row, *_ = to_markdown(table).splitlines()
    assert header.endswith("| sequence (GRPO) | sequence (GRPO), paper | balanced (BA) | balanced (BA), paper |")
    assert row.endswith("| 0.4000 | 0.4614 | **0.5000** | 0.4640 |")
    by_name = table_1(runs_with_means({("token", "Qwen/Qwen2.5-Math-7B", "dapo_17k"): [0.3]}))
    assert by_name.token_paper.tolist() == [0.3364]
    other_data = table_1(runs_with_means({("token", "Qwen/Qwen2.5-Math-7B", "gen_chains"): [0.3]}))
    assert np.isnan(other_data.token_paper[0])


def test_files_hold_the_table(tmp_path: Path):
    loaded = runs_with_means(TINY)
    paths = write_tables(loaded, tmp_path)
    assert [path.name for path in paths] == ["table_1.csv", "table_1.md", "table_1.tex"]
    rows = list(csv.DictReader(io.StringIO(paths[0].read_text("utf-8"))))
    assert [float(row["balanced"]) for row in rows] == [0.61, 0.40004]
    assert paths[0].read_text("utf-8") == to_csv(table_1(loaded))
