"""One worker, two workers, other micro-batches: the same run."""

import pytest

from evals.engines import load_model
from tests import distributed_cases
from trainers import checkpoints
from trainers.step_log import read_steps


def metrics(cell_dir):
    rows = read_steps(cell_dir / "metrics.jsonl")
    return [{k: v for k, v in row["metrics"].items() if not k.startswith("perf/")} for row in rows]


def parameters(cell_dir, step=10):
    model, _ = load_model(checkpoints.checkpoint_dir(cell_dir, step))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    distributed_cases.record(folder / "cell", distributed_cases.cell(), folder / "said.pickle")
    return folder


@pytest.mark.parametrize(
    ("size", "changes"),
    [(2, {}), (2, {"micro_batch_tokens": 150}), (1, {"micro_batch_tokens": 100}), (3, {"prompts_per_update": 2})],
)
def test_workers_and_micro_batches_change_nothing_but_rounding(recorded, tmp_path, size, changes):
    distributed_cases.run(tmp_path / "cell", distributed_cases.cell(**changes), size, recorded / "said.pickle")
    ours, theirs = metrics(tmp_path / "cell"), metrics(recorded / "cell")
    assert len(ours) == len(theirs) == 10
    for mine, other in zip(ours, theirs, strict=True):
        # Sums of cancelling terms, such as the loss, are known to float32's rounding of the terms.
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
    reference = parameters(recorded / "cell")
    for name, parameter in parameters(tmp_path / "cell").items():
        assert float((parameter - reference[name]).abs().max()) <= 1e-5, name
