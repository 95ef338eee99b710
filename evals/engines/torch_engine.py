"""Batched generation in plain PyTorch with any Transformers causal language model, on any machine."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from evals.engines.interface import Engine, Request, Sample, SamplingParams, sample_seed

CACHE_BYTES = 2**30
"""Largest key-value cache of one batch, in bytes; more responses are generated in further batches."""
MAX_ROWS = 512
"""Largest batch. Beyond it a larger one no longer makes decoding cheaper per token on CPUs."""


COMPACT_BELOW = 0.85
"""Finished rows leave once the going ones are at most this share of the batch: leaving copies the cache."""


class TorchEngine(Engine):
    """Decodes with a key-value cache; rows that have finished leave the batch."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.stop_ids = _stop_ids(model, tokenizer)

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        """See `Engine.sample`."""
        if not requests:
            return []
        unique = list(dict.fromkeys(request.prompt for request in requests))
        encoded = dict(zip(unique, self.tokenizer(unique, add_special_tokens=False)["input_ids"], strict=True))
        self._check_fit(encoded, params)
        # Prompts of similar length share a batch, so that little of it is padding.
        order = sorted(range(len(requests)), key=lambda i: len(encoded[requests[i].prompt]))
        batch_rows = self._rows_per_batch(max(map(len, encoded.values())) + params.max_tokens)
        results: dict[int, Sample] = {}
        was_training = self.model.training
        self.model.eval()
        for start in range(0, len(order), batch_rows):
            batch = order[start : start + batch_rows]
            prompts = [encoded[requests[i].prompt] for i in batch]
            uniforms = np.stack([_uniforms(params, requests[i]) for i in batch])
            token_ids, logprobs = self._decode(prompts, uniforms, params)
            texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
            for i, prompt, ids, values, text in zip(batch, prompts, token_ids, logprobs, texts, strict=True):
                results[i] = Sample(prompt, ids, values, text, truncated=ids[-1] not in self.stop_ids)
        self.model.train(was_training)
        return [results[i] for i in range(len(requests))]

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.update_weights`. A model that shares its parameters with the trainer has them already."""
        for name, weight in weights:
            own = self.model.get_parameter(name)
            if own is not weight:
                own.copy_(weight)

    def _decode(
        self, prompts: list[list[int]], uniforms: np.ndarray, params: SamplingParams
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and log-probabilities of one response per row."""
        device = self.model.device
        num_rows, width = len(prompts), max(map(len, prompts))
        limit = width + params.max_tokens
        # Rows of one prompt are neighbours: read each prompt once and copy its cache.
        unique, copies = _runs(prompts)
        ids = torch.zeros(len(unique), width, dtype=torch.long)
        real = torch.zeros(len(unique), limit, dtype=torch.bool)
        for row, prompt in enumerate(unique):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            real[row, width - len(prompt) :] = True
        padded = not bool(real.all())
        ids, real = ids.to(device), real.to(device)
        cache = self._new_cache()
        logits = self.model(
            input_ids=ids,
            attention_mask=_prefill_mask(real[:, :width]) if padded else None,
            position_ids=(real[:, :width].cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        repeats = torch.tensor(copies, device=device)
        expand = torch.repeat_interleave(torch.arange(len(unique), device=device), repeats)
        cache.batch_select_indices(expand)
        logits, real = logits[expand], real[expand]
        positions = real[:, :width].sum(1)

        draws = torch.from_numpy(uniforms).to(device)
        stops = torch.tensor(sorted(self.stop_ids), device=device)
        tokens = torch.full((num_rows, params.max_tokens), -1, dtype=torch.long, device=device)
        logprobs = torch.zeros(num_rows, params.max_tokens, device=device)
        rows = torch.arange(num_rows, device=device)
        going = torch.ones(num_rows, dtype=torch.bool, device=device)
        for step in range(params.max_tokens):
            chosen, chosen_logprobs = _sample(logits.float(), draws[rows, step], params)
            tokens[rows, step] = torch.where(going, chosen, -1)
            logprobs[rows, step] = chosen_logprobs
            going = going & ~torch.isin(chosen, stops)
            num_going = int(going.sum())
            if step + 1 == params.max_tokens or num_going == 0:
                break
            if num_going <= COMPACT_BELOW * len(rows):
                keep = going.nonzero()[:, 0]
                cache.batch_select_indices(keep)
                rows, chosen, real, positions = rows[keep], chosen[keep], real[keep], positions[keep]
                going = going[keep]
            seen = width + step + 1
            logits = self.model(
                input_ids=chosen[:, None],
                attention_mask=real[:, None, None, :seen] if padded else None,
                position_ids=positions[:, None],
                past_key_values=cache,
                logits_to_keep=1,
            ).logits[:, -1]
            positions = positions + 1
        lengths = (tokens >= 0).sum(1).tolist()
        token_rows, logprob_rows = tokens.tolist(), logprobs.tolist()
        return (
            [row[:length] for row, length in zip(token_rows, lengths, strict=True)],
            [row[:length] for row, length in zip(logprob_rows, lengths, strict=True)],
        )

    def _new_cache(self) -> Cache:
        kinds = getattr(self.model.config, "layer_types", None) or ["full_attention"]
        if set(kinds) == {"full_attention"}:
            return Cache(layer_class_to_replicate=GrowingLayer)
        return DynamicCache(config=self.model.config)

    def _rows_per_batch(self, tokens_per_row: int) -> int:
        config = self.model.config
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        token_bytes = 2 * config.num_hidden_layers * kv_heads * head_dim * self.model.dtype.itemsize
        return max(1, min(MAX_ROWS, CACHE_BYTES // (token_bytes * tokens_per_row)))

    def _check_fit(self, encoded: Mapping[str, list[int]], params: SamplingParams) -> None:
        context = getattr(self.model.config, "max_position_embeddings", None)
        for prompt, ids in encoded.items():
            if not ids:
                raise ValueError("cannot generate from an empty prompt")
            if context and len(ids) + params.max_tokens > context:
                raise ValueError(
                    f"a prompt of {len(ids)} tokens and a response of up to {params.max_tokens} exceed the model's "
                    f"context of {context} tokens; lower the response limit or raise max_position_embeddings. "
                    f"The prompt begins: {prompt[:60]!r}"
                )


class GrowingLayer(DynamicLayer):
    """A cache layer that writes into spare room instead of copying the whole cache for each token."""

    GROWTH = 64
    """Tokens of room added at a time."""

    _length: int
    _room_k: Tensor
    _room_v: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append (B, H, Q, D) keys and values; returns all of them, (B, H, T, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._hold(key_states, value_states)
            return key_states, value_states
        start, end = self._length, self._length + key_states.shape[2]
        if end > self._room_k.shape[2]:
            self._hold(self._room_k[:, :, :start], self._room_v[:, :, :start])
        self._room_k[:, :, start:end] = key_states
        self._room_v[:, :, start:end] = value_states
        self._length = end
        self._expose()
        return self._room_k[:, :, :end], self._room_v[:, :, :end]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, which may repeat."""
        self._hold(self._room_k[indices, :, : self._length], self._room_v[indices, :, : self._length])

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        self._length = keys.shape[2]
        self._room_k, self._room_v = _widened(keys, self.GROWTH), _widened(values, self.GROWTH)
        self._expose()

    def _expose(self) -> None:
        self.keys = self._room_k[:, :, : self._length]
        self.values = self._room_v[:, :, : self._length]


def _widened(states: Tensor, spare: int) -> Tensor:
    """A copy of (B, H, T, D) states with room for `spare` more tokens."""
    used = states.shape[2]
    room = states.new_empty(*states.shape[:2], used + spare, states.shape[3])
    room[:, :, :used] = states
    return room


def _sample(logits: Tensor, draws: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability: logits (R, V), draws (R,) uniform in [0, 1)."""
    if params.temperature == 0:
        logprobs = logits.log_softmax(-1)
        chosen = logits.argmax(-1)
    else:
        logprobs = (logits / params.temperature).log_softmax(-1)
        probs = _nucleus(logprobs.exp(), params.top_p)
        cdf = probs.cumsum(-1)
        # Inverse transform sampling: one uniform per token makes each response's randomness its own.
        target = draws[:, None] * cdf[:, -1:]
        chosen = torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose probability reaches top_p."""
    if top_p == 1:
        return probs
    ordered, order = probs.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return probs.scatter(1, order, ordered.masked_fill(outside, 0.0))


def _prefill_mask(real: Tensor) -> Tensor:
    """(R, 1, T, T) causal mask without padding keys; padding queries see themselves, so no row is empty."""
    size = real.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=real.device).tril()
    itself = torch.eye(size, dtype=torch.bool, device=real.device)
    return (causal & real[:, None, None, :]) | itself


def _runs(prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Neighbouring equal prompts once each, with how often each occurs."""
    unique: list[list[int]] = []
    copies: list[int] = []
    for prompt in prompts:
        if unique and unique[-1] == prompt:
            copies[-1] += 1
        else:
            unique.append(prompt)
            copies.append(1)
    return unique, copies


def _uniforms(params: SamplingParams, request: Request) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(sample_seed(params.seed, request.prompt, request.index)))
    return generator.random(params.max_tokens, dtype=np.float32)


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    ids: set[int] = set()
    for source in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        ids.update(source if isinstance(source, list) else [source] if source is not None else [])
    return ids
