"""How much memory does a GPU need for a run? An estimate from the model's config alone, without torch or weights.

Standard accounting (ZeRO, arXiv 1910.02054; activations after arXiv 2205.05198 with fused attention): what is sharded
is divided by the number of workers, what a worker holds whole is not. Allocator slack and CUDA itself come on top.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainers.recipe import Recipe

FLOAT = 4
"""Bytes of master weights, gradients, optimizer moments and logits."""
LOGITS_HELD = 2**24 * 3
"""Elements of the chunk of logits and its two temporaries in `trainers.policy`."""
DECODED_AT_ONCE = 16
"""Responses of full length that vLLM should have room for; with more it is faster, with fewer the GPU idles."""
TORCH_CACHE = 2**30
"""Bytes of the torch engine's key-value cache."""


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder-only transformer's config that memory depends on."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """From the mapping in a config.json of the Llama, Qwen2 or Qwen3 family.

        Raises:
            ValueError: a number is missing, or the architecture is another.
        """
        kind = config.get("model_type")
        if kind not in ("llama", "mistral", "qwen2", "qwen3"):
            raise ValueError(f"no estimate for the architecture {kind!r}; known are llama, mistral, qwen2, qwen3")
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            return cls(
                hidden=hidden,
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                intermediate=config["intermediate_size"],
                vocabulary=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=kind == "qwen2",
                qk_norm=kind == "qwen3",
            )
        except KeyError as error:
            raise ValueError(f"the model's config has no {error.args[0]}") from None

    @property
    def kv_width(self) -> int:
        """Key and value numbers per token and layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        queries = self.heads * self.head_dim
        attention = self.hidden * (queries + self.kv_width) + queries * self.hidden
        attention += (queries + self.kv_width) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Parameters of embedding, output layer and last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.outer_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of low-rank adapters on all linear layers of the decoder."""
        queries = self.heads * self.head_dim
        ends = [(self.hidden, queries), (self.hidden, self.kv_width // 2), (self.hidden, self.kv_width // 2)]
        ends += [(queries, self.hidden), *[(self.hidden, self.intermediate)] * 2, (self.intermediate, self.hidden)]
        return self.layers * rank * sum(map(sum, ends))


@dataclass(frozen=True)
class Footprint:
    """Bytes on each worker's device, and the tokens of a step."""

    weights: int
    """Master weights, the layers gathered for computing, and a reference model."""
    optimizer: int
    """Gradients and the two moments of AdamW."""
    activations: int
    """What the backward pass of one micro-batch needs, logits included."""
    engine: int
    """The engine's copy of the weights."""
    kv_cache: int
    """Keys and values of the responses that are decoded at once, at full length."""
    tokens_per_step: int
    """Prompt and response tokens of a step at most."""

    @property
    def needed(self) -> int:
        """The higher peak, of the update or of the rollout; vLLM sleeps during the update."""
        resident = self.weights + self.optimizer
        return resident + max(self.activations, self.engine + self.kv_cache)


def footprint(shape: Shape, recipe: Recipe, workers: int) -> Footprint:
    """Estimate a worker's memory.

    Args:
        workers: how many share the model.
    """
    compute = 2 if recipe.dtype == "bfloat16" else FLOAT
    trained = shape.adapter_parameters(recipe.lora_rank) if recipe.lora_rank else shape.parameters
    copies = 2 if recipe.kl_coef and not recipe.lora_rank else 1
    weights = FLOAT * copies * shape.parameters // workers
    sharded = workers > 1 or recipe.dtype == "bfloat16"
    if sharded:
        # The layer at work, the one fetched ahead, and the outermost unit, which stays.
        weights += compute * (2 * shape.layer_parameters + shape.outer_parameters)
    row = recipe.max_prompt_tokens + recipe.max_response_tokens
    in_flight = -(-recipe.prompts_per_step * recipe.group_size // workers)
    copy, cache = 0, TORCH_CACHE
    if recipe.rollout_engine == "vllm":
        copy, cache = 2 * shape.parameters, 2 * shape.kv_width * shape.layers * row * min(in_flight, DECODED_AT_ONCE)
    elif sharded:
        copy = FLOAT * shape.parameters
    return Footprint(
        weights=weights,
        optimizer=3 * FLOAT * trained // workers,
        activations=_activations(shape, recipe, compute),
        engine=copy,
        kv_cache=cache,
        tokens_per_step=recipe.prompts_per_step * recipe.group_size * row,
    )


def _activations(shape: Shape, recipe: Recipe, compute: int) -> int:
    """Inputs that the backward pass of a micro-batch reads again, and the logits in work."""
    tokens = max(recipe.max_tokens_per_micro_batch, recipe.max_prompt_tokens + recipe.max_response_tokens)
    inside = 4 * shape.hidden + 2 * shape.heads * shape.head_dim + shape.kv_width + 4 * shape.intermediate
    layers = shape.layers * shape.hidden + inside if recipe.activation_checkpointing else shape.layers * inside
    head = compute * shape.vocabulary * shape.hidden + FLOAT * LOGITS_HELD
    return tokens * compute * layers + head
