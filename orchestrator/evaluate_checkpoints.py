"""`balagg evaluate-checkpoints`: score checkpoints that exist, at other steps or on other benchmarks, without training.

At other steps, the grid's own benchmarks go where a run would put them, `evals/step-N`. A benchmark that the grid does
not name goes to `evals/<benchmark>/step-N`. Both reach the cell's MLflow run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator import leases, ledger, tasks
from orchestrator.cells import CellRun, look_again, look_up
from orchestrator.cluster import connect, evaluation_gang
from orchestrator.config import Config, known_names, unknown
from orchestrator.errors import UserError
from orchestrator.failures import classify
from orchestrator.grid import Cell, canonical_json, plain
from orchestrator.ledger import CellDir
from orchestrator.options import Chosen
from orchestrator.placement import Nodes, place
from orchestrator.tracking import Recorder, tracking_uri


@dataclass(frozen=True)
class BenchmarkDir(CellDir):
    """A cell's folder, with the evaluations of one benchmark that its grid does not name."""

    benchmark: str

    def evaluation(self, step: int) -> Path:
        return self.path / "evals" / self.benchmark / f"step-{step}"


@dataclass(frozen=True)
class Job:
    """One evaluation to make.

    Attributes:
        run: the cell as its grid has it.
        cell: the same cell, with the evaluation that is asked for.
        folder: where the result goes.
        step: of the checkpoint.
    """

    run: CellRun
    cell: Cell
    folder: CellDir
    step: int

    def __str__(self) -> str:
        names = ", ".join(benchmark["name"] for benchmark in self.cell.evaluation["benchmarks"])
        return f"{self.cell.id}: step {self.step} on {names}"

    @property
    def is_done(self) -> bool:
        return ledger.read_summary(self.cell, self.folder, self.step) is not None

    @property
    def samples(self) -> str:
        """Equal for jobs that make the same samples: the base model's, under the same settings."""
        place = self.cell.config["model"] if self.step == 0 else [self.cell.id, self.step]
        return canonical_json([place, self.cell.evaluation])


def score_checkpoints(
    chosen: Chosen,
    cells: Sequence[Cell],
    steps: str,
    benchmarks: str | None,
    sampling: Mapping[str, int],
    data_dir: Path | None,
    function: str,
) -> bool:
    """Make the evaluations that are missing, tell of each, and send them to MLflow; whether all went well.

    Args:
        steps: `all`, or steps with commas between.
        benchmarks: names with commas between; None for the grid's own.
        sampling: sampling values of these benchmarks, before their own.
        function: what evaluates, as `module:name`.

    Raises:
        UserError: there is nothing like that to evaluate, or the cluster can never do it.
    """
    runs = [look_up(chosen.runs_dir, cell) for cell in cells]
    names = _benchmark_names(runs[0].cell, benchmarks)
    jobs = [
        Job(run, cell, folder, step)
        for run in runs
        for cell, folder in _targets(chosen.config, run, names, sampling)
        for step in _steps(steps, run)
    ]
    if not jobs:
        raise UserError(f"--steps {steps}: these cells have no such checkpoint; balagg status shows how far they are")
    todo = [job for job in jobs if not job.is_done]
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{len(todo)} of {len(jobs)} evaluations are missing")
    recorder = Recorder(tracking_uri(chosen.root), chosen.grid, chosen.root)
    recorder.open(chosen.cells)
    failed = 0
    for job, reason in _evaluate(todo, chosen.root, data_dir, function):
        failed += bool(reason)
        console.print(f"{job}: " + (f"failed: {reason} (log: {job.folder.log})" if reason else "done"))
    lacking = sum(not _record(run, recorder, console) for run in {job.run.cell.id: job.run for job in jobs}.values())
    return not failed and not lacking


def _benchmark_names(cell: Cell, text: str | None) -> list[str]:
    """The benchmarks that were asked for by name.

    Raises:
        UserError: one is unknown, or is the grid's own, whose scores would be mixed up with these.
    """
    names = [part.strip() for part in (text or "").split(",") if part.strip()]
    if text is not None and not names:
        raise UserError("--benchmarks names no benchmark")
    own = {benchmark["name"] for benchmark in cell.evaluation["benchmarks"]}
    known = known_names().benchmarks
    for name in names:
        if name in own:
            raise UserError(
                f"the grid evaluates {name} itself; leave out --benchmarks to evaluate its benchmarks at other steps"
            )
        if name not in known:
            raise UserError(unknown("benchmark", name, known))
    return names


def _targets(
    config: Config, run: CellRun, names: Sequence[str], sampling: Mapping[str, int | None]
) -> Iterator[tuple[Cell, CellDir]]:
    """The cell with each evaluation that is asked for, and where its results go."""
    if not names:
        yield run.cell, run.folder
    for name in names:
        own = config.benchmarks[name].model_dump(exclude_none=True) if name in config.benchmarks else {}
        evaluation = run.cell.evaluation | {"benchmarks": [{"name": name} | own | dict(sampling)]}
        yield replace(run.cell, evaluation=plain(evaluation)), BenchmarkDir(run.folder.path, name)


def _steps(text: str, run: CellRun) -> list[int]:
    """Those of the asked steps that have a checkpoint with a model in it."""
    found = {step for step in run.checkpoints if _has_model(run.folder.checkpoint(step))}
    if text == "all":
        return sorted(found)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise UserError(f"--steps {text!r}: give all, or whole numbers with commas between, such as 0,20,40")
    return sorted({int(part) for part in parts} & found)


def _has_model(checkpoint: Path) -> bool:
    """False for one that training alone can go on from."""
    return (checkpoint / "config.json").exists() or not (checkpoint / "trainer").exists()


def _evaluate(
    jobs: Sequence[Job], root: Path, data_dir: Path | None, function: str
) -> Iterator[tuple[Job, str]]:  # fmt: skip
    """Make the evaluations, as many at once as the cluster has room for; yields each with why it failed, or "".

    Raises:
        UserError: the cluster can never run one of them.
    """
    if not jobs:
        return
    total = connect()
    import ray

    try:
        _check_demand(jobs, total)
        same: dict[str, list[Job]] = {}
        for job in jobs:
            same.setdefault(job.samples, []).append(job)
        running = {_submit(group[0], root, data_dir, function): group for group in same.values()}
        while running:
            (ended,), _ = ray.wait(list(running), num_returns=1)
            first, *twins = running.pop(ended)
            reason = _reason(ended, first)
            yield first, reason
            for twin in twins:
                if not reason:
                    ledger.copy_evaluation(first.folder, twin.folder, twin.step)
                yield twin, reason
    finally:
        ray.shutdown()


def _check_demand(jobs: Sequence[Job], total: Nodes) -> None:
    for model, gang in {job.cell.model_name: evaluation_gang(job.cell) for job in jobs}.items():
        if place(gang, total, total) is None:
            raise UserError(
                f"evaluation of {model} asks for {gang} on one node, and no node of the cluster has that; join a "
                "larger cluster with RAY_ADDRESS, or lower the model's eval_cpus or eval_gpus in the experiments file"
            )


def _submit(job: Job, root: Path, data_dir: Path | None, function: str) -> Any:
    import ray

    needs = evaluation_gang(job.cell).each
    ledger.prepare_evaluation(job.cell, job.folder, job.step)
    setting = tasks.Setting(job.folder, root, data_dir, int(needs.cpus), needs.gpus, (), function)
    options = {
        "name": f"evaluate:{job.cell.id}",
        "num_cpus": needs.cpus,
        "num_gpus": needs.gpus,
        "max_retries": job.cell.retries,
    }
    return ray.remote(tasks.evaluate).options(**options).remote(setting, job.step, job.cell.evaluation)


def _reason(ended: Any, job: Job) -> str:
    """Why there is no result; empty when there is one."""
    import ray

    try:
        failure = ray.get(ended)
    except ray.exceptions.RayError as error:
        failure = classify(error)
    if job.is_done:
        return ""
    return failure.reason if failure else "it ended without its result"


def _record(run: CellRun, recorder: Recorder, console: Console) -> bool:
    """Send the cell's new evaluations to MLflow; False when it did not take them.

    A command that looks after the cell now sends them itself.
    """
    look_again(run)
    try:
        with leases.hold(run.folder.claim):
            if run.left:
                recorder.record_evaluations(run.cell, run.folder)
            elif not recorder.is_synced(run.cell, run.folder):
                recorder.close(run.cell, run.folder, run.tail, "done")
    except leases.Busy:
        console.print(f"{run.cell.id}: the command that runs it sends its scores to MLflow")
    except recorder.errors as error:
        console.print(f"{run.cell.id}: MLflow did not take its scores ({error}); run the same command again")
        return False
    return True
