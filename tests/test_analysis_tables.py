"""The tables, against numbers worked out by hand."""

import csv
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.runs import LoggedRuns
from analysis.tables import (
    LATEX,
    accuracy,
    differences,
    overall,
    stability,
    tables,
    to_csv,
    to_html,
    to_latex,
    to_markdown,
    write_tables,
)
from orchestrator.config import load_config
from orchestrator.grid import expand
from trainers import metric_names as names


def runs_with_means(cells: dict[tuple[str, str, str], list[float]], scope: str = "group", **params: str) -> LoggedRuns:
    """Runs whose mean accuracy is 0.2 before training, 0.9 in between, and as given per seed at step 40."""
    rows, table = [], []
    for (rule, model, dataset), finals in cells.items():
        for seed, final in enumerate(finals):
            run = f"{rule}-{model}-{dataset}-{seed}"
            axes = {"run": run, "rule": rule, "model": model, "dataset": dataset, "scope": scope, "seed": seed}
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
SEEDS = {
    ("sequence", "tiny", "chains"): [0.5, 0.6, 0.7],
    ("token", "tiny", "chains"): [0.52, 0.61, 0.75],
}


def test_one_row_per_panel_with_the_last_step():
    table = accuracy(runs_with_means(TINY)).numbers
    assert table[["model", "dataset", "step"]].to_numpy().tolist() == [
        ["tiny", "chains", "40"],
        ["tiny", "tales_2", "40"],
    ]
    assert table.base.tolist() == pytest.approx([0.2, 0.2], rel=1e-12)
    assert table[["sequence", "token", "balanced"]].iloc[0].tolist() == [0.5, 0.62344, 0.61]
    assert np.isnan(table.token[1]) and table.token_seeds.tolist() == [1, 0]
    assert table.filter(regex="_(low|high|paper)$").isna().all(axis=None)


def test_three_seeds_give_mean_and_interval():
    row = accuracy(runs_with_means({("token", "tiny", "chains"): [0.5, 0.6, 0.7]})).numbers.iloc[0]
    half_width = 4.302653 * 0.1 / np.sqrt(3)
    assert (row.token, row.token_low, row.token_high) == pytest.approx((0.6, 0.6 - half_width, 0.6 + half_width))
    assert row.token_seeds == 3


def test_markdown_sets_the_best_in_bold_and_ties_too():
    lines = to_markdown(accuracy(runs_with_means(TINY)), ["One note."]).splitlines()
    assert lines[0] == "| model | data set | step | base model | sequence (GRPO) | token (DAPO) | balanced (BA) |"
    assert lines[1] == "|---|---|---|---:|---:|---:|---:|"
    assert lines[2] == "| tiny | chains | 40 | 0.2000 | 0.5000 | **0.6234** | 0.6100 |"
    # Equal to the digits shown: no rule is ahead of the other.
    assert lines[3] == "| tiny | tales_2 | 40 | 0.2000 | **0.4000** | – | **0.4000** |"
    assert "n = 1 seed" in lines[5] and lines[5].endswith("One note.")


def test_latex_is_booktabs_and_escaped():
    cells = {("token", "m_1", "d"): [0.5, 0.6, 0.7], ("balanced", "m_1", "d"): [0.1, 0.1, 0.1]}
    text = to_latex(accuracy(runs_with_means(cells)), ["100 % of a_b · c."])
    for command in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert text.count(command) == 1
    assert r"m\_1 & d & 40 & 0.2000 & \textbf{0.6000} $\pm$ 0.2484 & 0.1000 $\pm$ 0.0000 \\" in text
    assert r"\begin{tabular}{lllrrr}" in text
    assert r"100 \% of a\_b $\cdot$ c." in text
    assert LATEX.escape("−0.1 %") == r"$-$0.1 \%"


def test_html_marks_text_and_numbers():
    text = to_html(accuracy(runs_with_means({("token", "a<b", "d"): [0.5], ("sequence", "a<b", "d"): [0.4]})))
    assert '<th class="number">token (DAPO)</th>' in text and '<td class="text">a&lt;b</td>' in text
    assert '<td class="number"><b>0.5000</b></td>' in text


def test_papers_values_stand_beside_ours_in_the_papers_cells():
    cells = {("sequence", "qwen3-1.7b", "polaris_53k"): [0.4], ("balanced", "qwen3-1.7b", "polaris_53k"): [0.5]}
    ours = accuracy(runs_with_means(cells, **{"model.hub_id": "Qwen/Qwen3-1.7B"}))
    assert ours.numbers[["sequence_paper", "balanced_paper"]].to_numpy().tolist() == [[0.4614, 0.4640]]
    header, _, row, *_ = to_markdown(ours).splitlines()
    assert header.endswith("| sequence (GRPO) | sequence (GRPO), paper | balanced (BA) | balanced (BA), paper |")
    assert row.endswith("| 0.4000 | 0.4614 | **0.5000** | 0.4640 |")
    assert "Paper: its Table 1" in ours.caption
    by_name = accuracy(runs_with_means({("token", "Qwen/Qwen2.5-Math-7B", "dapo_17k"): [0.3]}))
    assert by_name.numbers.token_paper.tolist() == [0.3364]


def test_no_other_cell_has_a_value_of_the_paper():
    cell = ("token", "Qwen/Qwen2.5-Math-7B", "dapo_17k")
    others = [
        runs_with_means({(*cell[:2], "gen_chains"): [0.3]}),
        runs_with_means({cell: [0.3]}, scope="batch"),
        runs_with_means({("token", "qwen2.5-math-7b", "dapo_17k"): [0.3]}, **{"model.hub_id": "me/Qwen2.5-Math-7B"}),
        runs_with_means({("constant", *cell[1:]): [0.3]}),
    ]
    for loaded in others:
        table = accuracy(loaded)
        assert table.numbers.filter(like="_paper").isna().all(axis=None) and "paper" not in to_markdown(table).lower()


def test_every_cell_of_the_papers_grid_has_its_value():
    config = load_config(Path("experiments.yaml"))
    cells = [cell for cell in expand(config, "paper", (), (), None) if cell.seed == 0]
    hub_ids = {cell.model_name: cell.config["model"]["hub_id"] for cell in cells}
    loaded = runs_with_means({(cell.rule, cell.model_name, cell.dataset_name): [0.3] for cell in cells})
    loaded.params["model.hub_id"] = loaded.params.model.map(hub_ids)
    numbers = accuracy(loaded).numbers
    assert len(numbers) == 4
    rules = ["sequence", "token", "balanced"]
    assert numbers[[f"{rule}_paper" for rule in rules]].notna().all(axis=None)
    assert numbers.set_index(["model", "dataset"]).balanced_paper["qwen3-1.7b", "dapo_17k"] == 0.4695


def test_differences_are_paired_by_seed():
    table = differences(runs_with_means(SEEDS))
    [row] = table.numbers.to_dict("records")
    paired = np.array([0.02, 0.01, 0.05])
    half_width = 4.302653 * paired.std(ddof=1) / np.sqrt(3)
    assert (row["rule"], row["baseline"], row["seeds"], row["over"]) == ("token", "sequence", 3, "seeds")
    assert (row["mean"], row["low"], row["high"]) == pytest.approx(
        (paired.mean(), paired.mean() - half_width, paired.mean() + half_width), abs=1e-7
    )
    assert 0.5 < row["probability_low"] + 0.5 < row["probability"] + 0.5 < row["probability_high"] + 0.5 <= 1.5
    line = to_markdown(table).splitlines()[2]
    assert line.startswith("| tiny | chains | token (DAPO) | 3 | +0.0267 [−0.0250, +0.0784] | 90\u00a0% [")


def test_overall_means_over_panels():
    cells = SEEDS | {("sequence", "big", "chains"): [0.1, 0.2, 0.3], ("token", "big", "chains"): [0.1, 0.3, 0.5]}
    numbers = overall(runs_with_means(cells | {("token", "lone", "chains"): [0.9]})).numbers.set_index("rule")
    assert numbers.panels.tolist() == [2, 2] and numbers.seeds.tolist() == [3, 3]
    assert numbers["mean"].tolist() == pytest.approx([0.4, (0.3 + 0.62666667) / 2])
    assert np.isnan(numbers.difference["sequence"])
    assert numbers.difference["token"] == pytest.approx((0.02666667 + 0.1) / 2)


def test_stability_holds_peak_last_and_the_difference_of_drops():
    numbers = stability(runs_with_means(SEEDS)).numbers.set_index("rule")
    assert numbers.index.tolist() == ["sequence", "token"]
    assert numbers.peak.tolist() == [0.9, 0.9]
    assert numbers["drop"].tolist() == pytest.approx([0.3, 0.9 - 0.62666667])
    assert numbers.difference["token"] == pytest.approx(-0.02666667) and np.isnan(numbers.difference["sequence"])
    assert numbers.difference_low["token"] == pytest.approx(-0.0784, abs=1e-4)


def test_files_hold_the_tables(tmp_path: Path):
    loaded = runs_with_means(TINY)
    paths = write_tables(loaded, tmp_path)
    names_of_tables = ("table_1", "differences", "overall", "stability")
    assert [path.name for path in paths] == [
        f"{name}.{end}" for name in names_of_tables for end in ("csv", "md", "tex")
    ]
    rows = list(csv.DictReader(io.StringIO(paths[0].read_text("utf-8"))))
    assert [float(row["balanced"]) for row in rows] == [0.61, 0.40004]
    for table, path in zip(tables(loaded), paths[::3], strict=True):
        assert path.read_text("utf-8") == to_csv(table)
