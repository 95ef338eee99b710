"""The GRPO loop on a real tiny model: gradients, learning, resuming."""

import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from evals.engines import TorchEngine, load_model
from evals.problems import Problem
from evals.prompts import TEMPLATES
from tests.sequences import padded
from trainers import checkpoints, grpo
from trainers.aggregation import RULES, aggregate
from trainers.batches import token_batch
from trainers.policy import Policy, clipped_surrogate, token_statistics
from trainers.recipe import Recipe
from trainers.rollout import draw_prompts, sample_rollout
from trainers.step_log import read_steps
from trainers.update import TOTALS, Learner, accumulate_gradient, make_optimizer

MODEL = {"name": "tiny-qwen3", "path": "models/tiny-qwen3", "template": "qa"}
RECIPE = {
    "steps": 4, "prompts_per_step": 4, "group_size": 4, "max_response_tokens": 64, "learning_rate": 1e-3,
    "warmup_steps": 1, "checkpoint_every": 2, "rollout_log_every": 2, "weight_decay": 0.01,
}  # fmt: skip


def cell(rule="balanced", **changes):
    return {
        "grid": "test", "rule": rule, "scope": "group", "seed": 0, "model": MODEL,
        "dataset": {"name": "gen_chains"}, "train": RECIPE | changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def rollout():
    model, tokenizer = load_model(MODEL)
    recipe = Recipe(**RECIPE | {"prompts_per_step": 8, "group_size": 8})
    problems = grpo.load_train("gen_chains")[:64]
    prompts = draw_prompts(grpo.usable_prompts(problems, TEMPLATES["qa"], tokenizer, recipe), 1, 0, 8)
    result = sample_rollout(TorchEngine(model, tokenizer), prompts, recipe, seed=0, draw=1)
    assert 0 < result.rewards.mean() < 1
    return model, result, recipe


def learner(model, recipe, rule="balanced"):
    policy = Policy(model)
    return Learner(policy, make_optimizer(policy, recipe), recipe, rule, "group")


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


@pytest.mark.parametrize("rule", RULES)
def test_the_loop_computes_the_gradient_of_the_written_loss(rollout, rule):
    model, batch, recipe = rollout
    totals = dict.fromkeys(TOTALS, 0.0)
    accumulate_gradient(learner(model, recipe, rule), batch, range(64), totals)
    looped = gradient(model)

    # The loss over whole padded responses, zero advantages included, by `aggregate`.
    samples = list(batch.samples.values())
    _, mask = padded(samples)
    statistics = token_statistics(model, token_batch(samples))
    old = torch.tensor([x for sample in batch.samples.values() for x in sample.logprobs])
    advantages = batch.advantages.repeat_interleave(batch.lengths)
    terms = torch.full(mask.shape, math.nan).masked_scatter(
        mask, clipped_surrogate(statistics.logprobs, old, advantages, 0.2, 0.28).terms
    )
    model.zero_grad()
    loss = aggregate(terms, mask, batch.advantages, batch.group_ids, rule, max_length=recipe.max_response_tokens)
    loss.backward()
    expected = gradient(model)
    assert expected.norm() > 1e-4
    assert (looped - expected).norm() <= 1e-5 * expected.norm()
    assert totals["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)


@pytest.mark.parametrize("max_tokens_per_micro_batch", [1, 200, 1000])
def test_micro_batches_do_not_change_the_gradient(rollout, max_tokens_per_micro_batch):
    model, batch, _ = rollout
    gradients = []
    for tokens in (10**6, max_tokens_per_micro_batch):
        totals = dict.fromkeys(TOTALS, 0.0)
        changed = Recipe(**RECIPE | {"prompts_per_step": 8, "group_size": 8, "max_tokens_per_micro_batch": tokens})
        accumulate_gradient(learner(model, changed, "balanced"), batch, range(64), totals)
        gradients.append(gradient(model))
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[0].norm()


def test_token_statistics_equal_a_plain_forward_pass(rollout, monkeypatch):
    model, batch, _ = rollout
    samples = [batch.samples[row] for row in range(6)]
    ids, mask = padded(samples)
    with torch.no_grad():
        logprobs = (model(ids).logits / 0.7).log_softmax(-1)
        expected = logprobs[:, :-1].gather(2, ids[:, 1:, None])[..., 0][mask[:, 1:]]
        entropies = -(logprobs.exp() * logprobs).sum(-1)[:, :-1][mask[:, 1:]]
        whole = token_statistics(model, token_batch(samples), 0.7)
        torch.testing.assert_close(whole.logprobs, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(whole.entropies, entropies, rtol=0, atol=1e-5)
    gradients = []
    # One chunk; chunks of seven tokens that are kept; chunks of seven tokens that are computed again.
    for elements, tokens in ((2**23, 512), (2**23, 7), (256 * 7, 512)):
        monkeypatch.setattr("trainers.policy.CHUNK_ELEMENTS", elements)
        monkeypatch.setattr("trainers.policy.CHUNK_TOKENS", tokens)
        model.zero_grad()
        statistics = token_statistics(model, token_batch(samples), 0.7)
        torch.testing.assert_close(statistics.logprobs.detach(), expected, rtol=0, atol=1e-5)
        statistics.logprobs.square().sum().backward()
        gradients.append(gradient(model))
    for chunked in gradients[1:]:
        assert (gradients[0] - chunked).norm() <= 1e-5 * gradients[0].norm()


def test_first_update_is_on_policy(rollout):
    model, batch, recipe = rollout
    totals = dict.fromkeys(TOTALS, 0.0)
    accumulate_gradient(learner(model, recipe, "balanced"), batch, range(64), totals)
    assert abs(totals["kl"]) / totals["tokens"] < 1e-6
    assert totals["low"] == totals["high"] == 0
    # With ratio 1 and binary rewards both signs weigh the same under the balanced rule: the loss is 0.
    assert abs(totals["loss"]) < 1e-5


def final_parameters(cell_dir):
    model, _ = load_model(checkpoints.checkpoint_dir(cell_dir, RECIPE["steps"]))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def recorded(cell_dir):
    rows = read_steps(cell_dir / "metrics.jsonl")
    return [(row["step"], {k: v for k, v in row["metrics"].items() if not k.startswith("perf/")}) for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    cell_dir = tmp_path_factory.mktemp("cells") / "whole"
    grpo.train(cell_dir, cell(), keep_steps=(2,))
    return cell_dir


def test_a_run_records_every_step_and_keeps_its_checkpoints(finished):
    assert [step for step, _ in recorded(finished)] == [1, 2, 3, 4]
    assert checkpoints.complete_steps(finished) == [0, 2, 4]
    assert sorted(path.name for path in (finished / "rollouts").iterdir()) == [
        "step-1.parquet", "step-2.parquet", "step-4.parquet",
    ]  # fmt: skip
    told = json.loads((finished / "provenance.json").read_text())
    assert told["dataset"]["source"].startswith("generated with seed")
    assert told["dataset"]["problems"] == len(grpo.load_train("gen_chains"))
    assert told["torch"] == torch.__version__
    base, _ = load_model(MODEL)
    moved = max(float((p - base.get_parameter(n).detach()).abs().max()) for n, p in final_parameters(finished).items())
    assert 1e-4 < moved < 0.1


def test_rollout_files_hold_what_was_trained_on(finished):
    import pyarrow.parquet as pq

    table = pq.read_table(finished / "rollouts" / "step-1.parquet").to_pandas()
    metrics = recorded(finished)[0][1]
    assert len(table) == 16
    assert table.reward.mean() == pytest.approx(metrics["reward/mean"])
    assert table.length.mean() == pytest.approx(metrics["length/mean"])
    assert (table.groupby("group").advantage.sum().abs() < 1e-5).all()


@pytest.mark.parametrize("stopped_after", [2, 3])
def test_an_interrupted_run_ends_like_an_uninterrupted_one_bit_for_bit(finished, tmp_path, stopped_after, monkeypatch):
    def stop(*args, **kwargs):
        if args[-1] > stopped_after:  # the step
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    original = grpo.update_policy
    monkeypatch.setattr(grpo, "update_policy", stop)
    with pytest.raises(KeyboardInterrupt):
        grpo.train(tmp_path, cell(), keep_steps=(2,))
    monkeypatch.setattr(grpo, "update_policy", original)
    grpo.train(tmp_path, cell(), keep_steps=(2,))
    assert recorded(tmp_path) == recorded(finished)
    for name, parameter in final_parameters(finished).items():
        assert torch.equal(parameter, final_parameters(tmp_path)[name])


def test_a_finished_run_does_nothing_more(finished):
    before = (finished / "metrics.jsonl").read_bytes()
    grpo.train(finished, cell(), keep_steps=(2,))
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated weights", "no marker", "empty state"])
def test_a_damaged_checkpoint_is_passed_over(finished, tmp_path, damage, caplog):
    cell_dir = tmp_path / "cell"
    shutil.copytree(finished, cell_dir)
    folder = checkpoints.checkpoint_dir(cell_dir, 4)
    if damage == "truncated weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "no marker":
        (folder / checkpoints.MARKER).unlink()
    else:
        next((folder / checkpoints.TRAINER_STATE).glob("*.distcp")).write_bytes(b"")
    grpo.train(cell_dir, cell(), keep_steps=(2,))
    assert ("is damaged" in caplog.text) == (damage != "no marker")
    for name, parameter in final_parameters(finished).items():
        assert torch.equal(parameter, final_parameters(cell_dir)[name])


def test_killed_at_random_moments_the_result_is_the_same(finished, tmp_path):
    (tmp_path / "cell.json").write_text(json.dumps(cell()))
    program = (
        "import json, sys; from pathlib import Path; from trainers.grpo import train; folder = Path(sys.argv[1]); "
        "train(folder / 'cell', json.loads((folder / 'cell.json').read_text()), keep_steps=(2,))"
    )
    moments = random.Random(3)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (tmp_path / "cell" / "checkpoints").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(moments.uniform(0.0, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
    grpo.train(tmp_path / "cell", cell(), keep_steps=(2,))
    assert recorded(tmp_path / "cell") == recorded(finished)
    for name, parameter in final_parameters(finished).items():
        assert torch.equal(parameter, final_parameters(tmp_path / "cell")[name])


def test_overlong_filtering_masks_truncated_responses_whole(rollout):
    model, _, _ = rollout
    _, tokenizer = load_model(MODEL)
    recipe = Recipe(**RECIPE | {"max_response_tokens": 25, "overlong_filtering": True})
    prompts = grpo.usable_prompts(grpo.load_train("gen_chains")[:4], TEMPLATES["qa"], tokenizer, recipe)
    batch = sample_rollout(TorchEngine(model, tokenizer), prompts, recipe, seed=0, draw=1)
    assert 0 < batch.truncated.sum() < 16
    assert torch.equal(batch.masked_lengths == 0, batch.truncated)
    assert (batch.lengths > 0).all()


def test_a_grader_failure_is_not_a_wrong_answer(rollout, monkeypatch):
    from evals.grading.verdict import Grade
    from trainers import rollout as rollout_module

    model, _, recipe = rollout
    _, tokenizer = load_model(MODEL)
    monkeypatch.setattr(
        rollout_module,
        "grade_many",
        lambda texts, problems, extractor: [
            Grade(i % 2 == 0, "grader_error" if i % 8 == 7 else "correct") for i in range(len(texts))
        ],
    )
    problems = [Problem(id=str(i), question=f"Compute {i} + 1.", answer=("0",)) for i in range(2)]
    prompts = grpo.usable_prompts(problems, TEMPLATES["qa"], tokenizer, recipe)
    batch = sample_rollout(TorchEngine(model, tokenizer), prompts, recipe, seed=0, draw=1)
    failed = torch.arange(16) % 8 == 7
    assert torch.equal(~batch.mask, failed)
    assert (batch.advantages[failed] == 0).all()
    # Four right of seven judged: the failed one does not shift the baseline.
    assert batch.advantages[0] == pytest.approx((1 - 4 / 7) / math.sqrt(4 / 7 * 3 / 7), rel=1e-5)


def test_paths_of_the_shipped_models_exist():
    assert (Path("models") / "tiny-qwen3" / "model.safetensors").is_file()
