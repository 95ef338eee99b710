"""What the tests run in worker processes: training cells over recorded rollouts, alone or in a gang."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

from evals.engines import Engine, TorchEngine

MODEL = {"name": "tiny-qwen3", "path": "models/tiny-qwen3", "template": "qa"}
RECIPE = {
    "steps": 10, "prompts_per_step": 4, "group_size": 4, "prompts_per_update": 2, "max_response_tokens": 48,
    "learning_rate": 1e-4, "warmup_steps": 1, "checkpoint_every": 3, "rollout_log_every": 5, "weight_decay": 0.01,
}  # fmt: skip
"""At 1e-3, two updates a rollout clip, and rounding decides now and then whether a token is clipped."""


def cell(rule="balanced", model=MODEL, **changes):
    return {
        "grid": "test", "rule": rule, "scope": "group", "seed": 0, "model": model,
        "dataset": {"name": "gen_chains"}, "train": RECIPE | changes,
    }  # fmt: skip


class Recorder(Engine):
    """Samples with another engine and remembers what it said."""

    def __init__(self, engine):
        self.engine, self.said = engine, {}

    def sample(self, requests, params):
        samples = self.engine.sample(requests, params)
        self.said |= {(params.seed, r.prompt, r.index): s for r, s in zip(requests, samples, strict=True)}
        return samples

    def update_weights(self, weights):
        self.engine.update_weights(weights)


class Replay(Engine):
    """Says again what a recorder remembers."""

    def __init__(self, said):
        self.said = said

    def sample(self, requests, params):
        return [self.said[params.seed, request.prompt, request.index] for request in requests]

    def update_weights(self, weights):
        pass


def record(cell_dir: Path, cell: dict, recording: Path) -> None:
    """Train on one worker, and keep what was sampled."""
    from trainers import grpo

    original = grpo.open_rollout_engine
    recorders = []

    def recorded(spec, learner, tokenizer):
        recorders.append(Recorder(TorchEngine(learner.policy.model, tokenizer)))
        return recorders[0], True

    grpo.open_rollout_engine = recorded
    try:
        grpo.train(cell_dir, cell)
    finally:
        grpo.open_rollout_engine = original
    recording.write_bytes(pickle.dumps(recorders[0].said))


def start(cell_dir: Path, cell: dict, size: int = 1, recording: Path | None = None) -> list[subprocess.Popen]:
    """Train a cell in `size` processes connected over gloo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = json.dumps([str(cell_dir), cell, str(recording or "")])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed_cases", job], env=os.environ | address | {"RANK": str(rank)}
        )
        for rank in range(size)
    ]


def run(cell_dir: Path, cell: dict, size: int = 1, recording: Path | None = None) -> None:
    """As `start`, to the end."""
    for process in start(cell_dir, cell, size, recording):
        assert process.wait(timeout=240) == 0


def _main() -> None:
    import torch
    import torch.distributed as dist

    from trainers import grpo

    cell_dir, cell, recording = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    if recording:
        said = pickle.loads(Path(recording).read_bytes())
        grpo.open_rollout_engine = lambda spec, learner, tokenizer: (Replay(said), True)
    grpo.train(Path(cell_dir), cell)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _main()
