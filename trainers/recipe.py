"""The GRPO recipe: every knob of one training run, with its default and where the default comes from."""

from dataclasses import dataclass
from typing import Literal

KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyper-parameters of a training run. All of them are part of a cell's identity.

    Raises:
        ValueError: a value is out of its range; the message names the field.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  read by pydantic, which this package does not import

    steps: int = 200
    """Rollout steps. One step samples `prompts_per_step` groups and makes one or more optimizer updates."""

    # Sampling
    prompts_per_step: int = 32
    """Prompts per rollout (assumed: one optimizer batch of verl's DAPO script for Qwen2.5-Math-7B)."""
    group_size: int = 16
    """Responses per prompt, G (verl DAPO, SkyRL DAPO)."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out of the training set, with their count logged (Polaris)."""
    max_response_tokens: int = 8192
    """Length limit of a response, in tokens (verl DAPO)."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities are taken at the same temperature (verl DAPO)."""
    top_p: float = 1.0
    """Nucleus sampling in training; below 1 it biases the importance ratio (verl DAPO)."""
    rollout_engine: Literal["torch", "vllm"] = "torch"
    """Who generates. vLLM holds a copy of the weights, renewed before every rollout."""
    engine_memory: float = 0.4
    """Share of a GPU's memory for vLLM's weights and cache; it sleeps while the policy trains."""
    max_draws: int = 1
    """Above 1: dynamic sampling (DAPO). Groups whose rewards are all equal are replaced by the next draw's, of which
    there are at most so many in a step; what is still missing then is filled with such groups."""

    # Rewards and advantages
    normalize_advantages: Literal["std", "none"] = "std"
    """Divide centred rewards by the group's std (GRPO), or leave them (Dr. GRPO)."""
    advantage_std_floor: float = 1e-3
    """Smallest reward std to divide by, so that rewards equal up to rounding do not explode."""
    overlong_buffer: int = 0
    """Soft length penalty (DAPO): over the last so many tokens before the limit the reward falls linearly; 0: off.
    verl's DAPO script uses 4096."""
    overlong_penalty: float = 1.0
    """What a response at the length limit loses when `overlong_buffer` is set (verl DAPO)."""
    overlong_filtering: bool = False
    """Mask out truncated responses whole, before weights are computed (SkyRL DAPO)."""

    # Loss
    clip_low: float = 0.2
    """Lower clip width of the importance ratio (DAPO)."""
    clip_high: float = 0.28
    """Upper clip width of the importance ratio (DAPO's clip-higher)."""
    dual_clip: float | None = None
    """Bound on the ratio of tokens with negative advantage; verl's default is 3, its DAPO script uses 10."""
    importance_cap: float | None = None
    """Truncated importance sampling between engine and trainer: tokens weigh min(p_trainer / p_engine, cap), with the
    trainer's probabilities from a pass of their own before the first update. None: the engine's probabilities are
    the old policy's, which is exact for the torch engine. 2 is usual with vLLM."""
    kl_coef: float = 0.0
    """Weight of the divergence from the base model; it is aggregated by the same rule (0: DAPO, Polaris, SkyRL)."""
    kl_estimator: KlEstimator = "k3"
    """See `trainers.policy.kl_terms` (k3: the GRPO paper)."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus (0: DAPO, Polaris)."""

    # Updates
    prompts_per_update: int | None = None
    """Prompts per optimizer update, a divisor of `prompts_per_step`; None: one update per rollout epoch."""
    epochs_per_rollout: int = 1
    """Passes over each rollout batch (verl DAPO)."""
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
    lora_rank: int = 0
    """Above 0: train low-rank adapters of that rank on all linear layers instead of the weights (arXiv 2106.09685)."""
    lora_alpha: int | None = None
    """Scale of the adapters; None: twice the rank (TRL's examples)."""

    # Memory and speed; the gradient does not depend on these
    max_tokens_per_micro_batch: int = 16384
    """Tokens per forward and backward pass of a worker, padding included."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; bfloat16 on GPUs. Master weights, optimizer and gradient sums stay in float32."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again."""

    # Files
    checkpoint_every: int = 50
    """Steps between checkpoints for resuming; evaluated steps and the last one are always kept."""
    keep_last: int = 2
    """How many of the newest checkpoints for resuming stay."""
    keep_best: bool = False
    """Also keep the checkpoint whose steps since the one before had the highest mean reward."""
    rollout_log_every: int = 10
    """Steps between rollout samples kept as parquet; the first and last step are always kept."""

    def __post_init__(self) -> None:
        positive = (
            "steps", "prompts_per_step", "group_size", "epochs_per_rollout", "max_prompt_tokens",
            "max_response_tokens", "temperature", "learning_rate", "grad_clip", "advantage_std_floor",
            "max_tokens_per_micro_batch", "checkpoint_every", "rollout_log_every", "max_draws", "keep_last",
            "engine_memory",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in (
            "warmup_steps", "weight_decay", "clip_low", "clip_high", "kl_coef", "entropy_coef", "overlong_buffer",
            "overlong_penalty", "lora_rank",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, not {self.dual_clip}")
        if self.importance_cap is not None and not self.importance_cap >= 1:
            raise ValueError(f"importance_cap must be at least 1, not {self.importance_cap}")
        if self.overlong_buffer >= self.max_response_tokens:
            raise ValueError(
                f"overlong_buffer ({self.overlong_buffer}) must be below max_response_tokens "
                f"({self.max_response_tokens})"
            )
        if not self.engine_memory < 1:
            raise ValueError(f"engine_memory must be below 1, not {self.engine_memory}")
        if self.prompts_per_step % self.update_prompts:
            raise ValueError(
                f"prompts_per_update ({self.prompts_per_update}) must divide prompts_per_step ({self.prompts_per_step})"
            )

    @property
    def update_prompts(self) -> int:
        """Prompts whose responses make up one optimizer update."""
        return self.prompts_per_update or self.prompts_per_step
