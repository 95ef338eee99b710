"""Every metric name that this suite logs, defined once.

The part before the slash is the chart section in the MLflow UI. Names hold no characters that MLflow
refuses. This module imports nothing, so that the analysis can read it without torch.
"""

RULE_NAMES = ("sequence", "token", "balanced", "constant")

REWARD_MEAN = "reward/mean"
REWARD_STD = "reward/std"
ZERO_VARIANCE_GROUPS = "reward/zero_variance_groups"

ACCURACY = "reward/accuracy"
"""Share of correct responses before length penalties and before groups were replaced, where a recipe has those."""
REPLACED_GROUPS = "reward/replaced_groups"
"""Groups that dynamic sampling left out of a step."""

LENGTH_MEAN = "length/mean"
LENGTH_STD = "length/std"
LENGTH_MIN = "length/min"
LENGTH_MAX = "length/max"
GROUP_CV = "length/group_cv"
POS_LENGTH = "length/pos_mean"
NEG_LENGTH = "length/neg_mean"
SIGN_GAP = "length/sign_gap"
SIGN_GAP_REL = "length/sign_gap_rel"
TRUNCATED = "length/truncated"

LOSS = "policy/loss"
GRAD_NORM = "policy/grad_norm"
ENTROPY = "policy/entropy"
APPROX_KL = "policy/approx_kl"
CLIP_LOW = "policy/clip_low"
CLIP_HIGH = "policy/clip_high"
ENGINE_KL = "policy/engine_kl"
"""Divergence of the engine that sampled from the policy as the trainer computes it, before the first update (k3)."""
IMPORTANCE_CAPPED = "policy/importance_capped"
"""Share of tokens whose engine-to-trainer importance weight was cut at its cap."""
REFERENCE_KL = "policy/reference_kl"
"""Divergence from the base model, by the estimator of the recipe, where it is part of the loss."""
LEARNING_RATE = "policy/lr"

STEP_SECONDS = "perf/step_s"
ROLLOUT_SECONDS = "perf/rollout_s"
TRAIN_SECONDS = "perf/train_s"
GRADE_SECONDS = "perf/grade_s"
TOKENS_PER_SECOND = "perf/tokens_per_s"

NON_FINITE = "events/non_finite"
"""How many metrics of a step were NaN or infinite. They cannot be logged themselves; steps without any log nothing."""

EVAL_MEAN = "eval/mean"
HELDOUT = "heldout"
"""Benchmark name under which the held-out split of a cell's own training set is scored."""


def positive_mass(rule: str) -> str:
    """Name of the mass that `rule` would put on responses with positive advantage."""
    return f"balance/{rule}_pos_mass"


def negative_mass(rule: str) -> str:
    """Name of the mass that `rule` would put on responses with negative advantage."""
    return f"balance/{rule}_neg_mass"


def eval_avg(benchmark: str, k: int) -> str:
    """Name of the mean score over k samples per problem."""
    return f"eval/{benchmark}_avg_at_{k}"


def eval_pass(benchmark: str, k: int) -> str:
    """Name of the unbiased probability that at least one of k samples is right."""
    return f"eval/{benchmark}_pass_at_{k}"


def eval_length(benchmark: str) -> str:
    """Name of the mean response length, in tokens."""
    return f"eval/{benchmark}_length"
