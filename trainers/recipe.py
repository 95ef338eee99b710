"""The GRPO recipe: every knob of one training run, with its default and where the default comes from."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyper-parameters of a training run. All of them are part of a cell's identity.

    Raises:
        ValueError: a value is out of its range; the message names the field.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  read by pydantic, which this package does not import

    steps: int = 200
    """Rollout steps. One step samples `prompts_per_step` groups and makes one or more optimizer updates."""
    prompts_per_step: int = 32
    """Prompts per rollout (assumed: one optimizer batch of verl's DAPO script for Qwen2.5-Math-7B)."""
    group_size: int = 16
    """Responses per prompt, G (verl DAPO, SkyRL DAPO)."""
    prompts_per_update: int | None = None
    """Prompts per optimizer update, a divisor of `prompts_per_step`; None: one update per rollout epoch."""
    epochs_per_rollout: int = 1
    """Passes over each rollout batch (verl DAPO)."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out of the training set, with their count logged (Polaris)."""
    max_response_tokens: int = 8192
    """Length limit of a response, in tokens (verl DAPO)."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities are taken at the same temperature (verl DAPO)."""
    top_p: float = 1.0
    """Nucleus sampling in training; below 1 it biases the importance ratio (verl DAPO)."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW (verl DAPO, Polaris, SkyRL)."""
    warmup_steps: int = 10
    """Optimizer updates of linear warm-up (verl DAPO)."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What follows the warm-up (verl DAPO)."""
    weight_decay: float = 0.1
    """AdamW weight decay (verl DAPO, SkyRL)."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW moments (PyTorch's default)."""
    grad_clip: float = 1.0
    """Global gradient norm limit (verl's default)."""
    clip_low: float = 0.2
    """Lower clip width of the importance ratio (DAPO)."""
    clip_high: float = 0.28
    """Upper clip width of the importance ratio (DAPO's clip-higher)."""
    advantage_std_floor: float = 1e-3
    """Smallest reward std to divide by, so that rewards equal up to rounding do not explode."""
    normalize_advantages: Literal["std", "none"] = "std"
    """Divide centred rewards by the group's std (GRPO), or leave them (Dr. GRPO)."""
    overlong_filtering: bool = False
    """Mask out truncated responses whole, before weights are computed (SkyRL DAPO)."""
    micro_batch_tokens: int = 16384
    """Padded tokens per forward and backward pass. Changes memory and speed, never the gradient."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter and compute type; bfloat16 on GPUs."""
    checkpoint_every: int = 50
    """Steps between checkpoints for resuming; evaluated steps and the last one are always kept."""
    rollout_log_every: int = 10
    """Steps between rollout samples kept as parquet; the first and last step are always kept."""

    def __post_init__(self) -> None:
        positive = (
            "steps", "prompts_per_step", "group_size", "epochs_per_rollout", "max_prompt_tokens",
            "max_response_tokens", "temperature", "learning_rate", "grad_clip", "advantage_std_floor",
            "micro_batch_tokens", "checkpoint_every", "rollout_log_every",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay", "clip_low", "clip_high"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.prompts_per_step % self.update_prompts:
            raise ValueError(
                f"prompts_per_update ({self.prompts_per_update}) must divide prompts_per_step ({self.prompts_per_step})"
            )

    @property
    def update_prompts(self) -> int:
        """Prompts whose responses make up one optimizer update."""
        return self.prompts_per_update or self.prompts_per_step
