"""Batched generation in plain PyTorch, with any Transformers model of ordinary attention, on any machine."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from evals.engines.attention import NO_MASK, is_replaceable, layer_kinds
from evals.engines.interface import Engine, Request, Sample, SamplingParams, sample_seed
from evals.engines.kv_cache import SharedPromptCache

CACHE_BYTES = 2**30
"""Largest key-value cache, in bytes; responses that do not fit wait until others have finished."""
MAX_ROWS = 512
"""Most responses at a time. Beyond it a larger batch no longer makes decoding cheaper per token on CPUs."""
DROP_SHARE = 0.125
"""Finished rows leave once they are this share of the batch: each time costs about as much as a decoding step."""
PREFILL_TOKENS = 2**15
"""Most prompt tokens read at a time, padding included."""


class TorchEngine(Engine):
    """Decodes one batch with a key-value cache; finished rows leave it and waiting prompts take their place."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self.stop_ids = _stop_ids(model, tokenizer)
        self.stops = torch.tensor(sorted(self.stop_ids), device=model.device)
        self.layer_kinds = layer_kinds(self.config)
        unknown = set(self.layer_kinds) - {"full_attention", "sliding_attention"}
        if unknown or not is_replaceable(model):
            what = f"{', '.join(sorted(unknown))} layers" if unknown else "an attention of their own in its layers"
            raise ValueError(
                f"the torch engine cannot generate with {what} ({self.config.model_type}); use the vllm engine"
            )

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        """See `Engine.sample`."""
        if not requests:
            return []
        unique = list(dict.fromkeys(request.prompt for request in requests))
        encoded = dict(zip(unique, self.tokenizer(unique, add_special_tokens=False)["input_ids"], strict=True))
        self._check_fit(encoded, params)
        prompts = [encoded[request.prompt] for request in requests]
        # Prompts of similar length are read together, so that little of what is read is padding.
        waiting = deque(sorted(range(len(requests)), key=lambda i: len(prompts[i])))
        rows = min(len(requests), self._max_rows(encoded, params.max_tokens))
        batch = _Batch(rows, min(rows, len(unique)), max(map(len, prompts)), params.max_tokens, self.model.device)
        finished: dict[int, tuple[list[int], list[float]]] = {}
        was_training = self.model.training
        self.model.eval()
        while waiting or batch.size:
            while waiting and batch.free:
                taken = _take(waiting, batch.free, prompts)
                uniforms = np.stack([_uniforms(params, requests[i]) for i in taken])
                self._admit(batch, taken, [prompts[i] for i in taken], uniforms)
            self._decode(batch, params)
            finished |= batch.drop_finished()
        self.model.train(was_training)
        texts = self.tokenizer.batch_decode([finished[i][0] for i in range(len(requests))], skip_special_tokens=True)
        return [
            Sample(prompt, *finished[i], text, truncated=finished[i][0][-1] not in self.stop_ids)
            for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.update_weights`."""
        for name, weight in weights:
            self.model.get_parameter(name).copy_(weight)

    def _admit(self, batch: "_Batch", taken: list[int], prompts: list[list[int]], uniforms: np.ndarray) -> None:
        """Read the prompts of these requests and give each a row."""
        # Padding is on the right, where a causal model does not look. The last token of a prompt waits for the next
        # decoding step, which every row needs anyway.
        if new := [prompt for prompt in dict.fromkeys(map(tuple, prompts)) if prompt not in batch.cache.prompts]:
            ids = torch.zeros(len(new), max(1, max(map(len, new)) - 1), dtype=torch.long)
            for row, prompt in enumerate(new):
                ids[row, : len(prompt) - 1] = torch.tensor(prompt[:-1])
            cache = DynamicCache()
            self.model(input_ids=ids.to(self.model.device), past_key_values=cache, logits_to_keep=1)
            batch.cache.add_prompts(new, cache)
        batch.add(taken, prompts, uniforms)

    def _decode(self, batch: "_Batch", params: SamplingParams) -> None:
        """One more token for every row."""
        rows, positions, done = batch.rows[: batch.size], batch.positions[: batch.size], batch.done[: batch.size]
        made = positions + 1 - batch.prompt_lengths[: batch.size]
        columns = max(int(made.max()) + 1, batch.cache.least_columns)
        masks = self._masks(batch, positions, made, columns)
        batch.cache.expect(made, columns, [masks[kind] for kind in self.layer_kinds])
        logits = self.model(
            input_ids=batch.ids[rows, positions][:, None],
            attention_mask=NO_MASK,
            position_ids=positions[:, None],
            use_cache=False,
            attend=batch.cache,
            logits_to_keep=1,
        ).logits[:, -1]
        chosen, logprobs = _sample(logits.float(), batch.draws[rows, made], params)
        # A finished row that is still here writes behind its end, where nobody looks, again and again.
        batch.ids[rows, positions + 1] = chosen
        batch.logprobs[rows, made] = logprobs
        positions += ~done
        done |= torch.isin(chosen, self.stops) | (made + 1 == params.max_tokens)

    def _masks(self, batch: "_Batch", positions: Tensor, made: Tensor, columns: int) -> dict[str, Tensor]:
        """What each row's newest token may look at of its prompt and its response, by kind of layer."""
        before = batch.prompt_lengths[: batch.size, None] - 1
        prompt_columns = torch.arange(batch.cache.prompt_columns, device=positions.device)
        back = torch.cat([
            (positions[:, None] - prompt_columns).masked_fill_(prompt_columns >= before, -1),
            made[:, None] - torch.arange(columns, device=positions.device),
        ], 1)[:, None, None]  # fmt: skip
        hidden = {"full_attention": back < 0}
        if "sliding_attention" in self.layer_kinds:
            hidden["sliding_attention"] = (back < 0) | (back >= self.config.sliding_window)
        zero = torch.zeros((), dtype=self.model.dtype, device=positions.device)
        return {kind: torch.where(hidden[kind], -torch.inf, zero) for kind in set(self.layer_kinds)}

    def _max_rows(self, encoded: Mapping[str, list[int]], max_tokens: int) -> int:
        heads = self.config.num_attention_heads
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        token_bytes = 2 * self.config.num_hidden_layers * kv_heads * head_dim * self.model.dtype.itemsize
        tokens = CACHE_BYTES // token_bytes
        prompt = max(map(len, encoded.values()))
        rows = max(tokens // (prompt + max_tokens), (tokens - len(encoded) * prompt) // max_tokens)
        return max(1, min(MAX_ROWS, rows))

    def _check_fit(self, encoded: Mapping[str, list[int]], params: SamplingParams) -> None:
        context = getattr(self.config, "max_position_embeddings", None)
        for prompt, ids in encoded.items():
            if not ids:
                raise ValueError("cannot generate from an empty prompt")
            if context and len(ids) + params.max_tokens > context:
                raise ValueError(
                    f"a prompt of {len(ids)} tokens and a response of up to {params.max_tokens} exceed the model's "
                    f"context of {context} tokens; lower the response limit or raise max_position_embeddings. "
                    f"The prompt begins: {prompt[:60]!r}"
                )


class _Batch:
    """Responses in the making, one per row; the first `size` rows are in use."""

    def __init__(self, capacity: int, slots: int, prompt_tokens: int, max_tokens: int, device: torch.device) -> None:
        self.capacity = capacity
        self.size = 0
        # A finished row may stay for a while, with its next token one behind the last.
        self.cache = SharedPromptCache(capacity, max_tokens + 1, slots, max(1, prompt_tokens - 1), device)
        self.rows = torch.arange(capacity, device=device)
        self.requests, self.prompt_lengths = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        self.positions = torch.zeros_like(self.rows)
        """Of each row's newest token, which is not in the cache yet."""
        self.done = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.ids = torch.zeros(capacity, prompt_tokens + max_tokens + 1, dtype=torch.long, device=device)
        """Prompt and response."""
        self.draws = torch.zeros(capacity, max_tokens + 1, device=device)
        self.logprobs = torch.zeros(capacity, max_tokens + 1, device=device)

    @property
    def free(self) -> int:
        return self.capacity - self.size

    def add(self, requests: list[int], prompts: list[list[int]], draws: np.ndarray) -> None:
        """Give each request a row."""
        device = self.ids.device
        new = slice(self.size, self.size + len(requests))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        self.ids[new, : ids.shape[1]] = ids.to(device)
        slots = {prompt: slot for slot, prompt in enumerate(self.cache.prompts)}
        self.cache.slots[new] = torch.tensor([slots[tuple(prompt)] for prompt in prompts], device=device)
        self.requests[new] = torch.tensor(requests, device=device)
        self.prompt_lengths[new] = lengths.to(device)
        self.positions[new] = lengths.to(device) - 1
        self.draws[new, :-1] = torch.from_numpy(draws).to(device)
        self.done[new] = False
        self.size += len(requests)
        self.cache.arrange(self.size)

    def drop_finished(self) -> dict[int, tuple[list[int], list[float]]]:
        """Drop finished rows if they are many; returns their token ids and log-probabilities by request."""
        num_done = int(self.done[: self.size].sum())
        if num_done == 0 or num_done < DROP_SHARE * self.size:
            return {}
        done = self.done[: self.size].nonzero()[:, 0]
        starts, ends = self.prompt_lengths[done].tolist(), (self.positions[done] + 1).tolist()
        ids, logprobs = self.ids[done].tolist(), self.logprobs[done].tolist()
        finished = {
            request: (ids[k][starts[k] : ends[k]], logprobs[k][: ends[k] - starts[k]])
            for k, request in enumerate(self.requests[done].tolist())
        }
        self._close_gaps(done)
        return finished

    def _close_gaps(self, gaps: Tensor) -> None:
        """Move the last rows in use to where rows have become free."""
        left = self.size - len(gaps)
        target = gaps[gaps < left]
        source = self.rows[left : self.size][~self.done[left : self.size]]
        columns = int((self.positions - self.prompt_lengths)[: self.size].max()) + 1
        self.cache.move(source, target, columns)
        for state in (
            self.requests,
            self.prompt_lengths,
            self.positions,
            self.done,
            self.ids,
            self.draws,
            self.logprobs,
        ):
            state[target] = state[source]
        self.size = left
        self.cache.arrange(left)


def _sample(logits: Tensor, draws: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability: logits (R, V), draws (R,) uniform in [0, 1)."""
    if params.temperature == 0:
        probs = logits.softmax(-1)
        chosen = logits.argmax(-1)
    else:
        probs = (logits if params.temperature == 1 else logits / params.temperature).softmax(-1)
        cdf = _nucleus(probs, params.top_p).cumsum(-1)
        # Inverse transform sampling: one uniform per token makes each response's randomness its own.
        target = draws[:, None] * cdf[:, -1:]
        chosen = torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return chosen, probs.gather(1, chosen[:, None])[:, 0].log()


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose probability reaches top_p."""
    if top_p == 1:
        return probs
    ordered, order = probs.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return probs.scatter(1, order, ordered.masked_fill(outside, 0.0))


def _take(waiting: deque[int], room: int, prompts: Sequence[list[int]]) -> list[int]:
    """The next requests, as many as there is room for and as can be read at a time."""
    taken: list[int] = []
    distinct = 0
    while waiting and len(taken) < room:
        prompt = prompts[waiting[0]]
        is_new = not taken or prompt != prompts[taken[-1]]
        if taken and (distinct + is_new) * len(prompt) > PREFILL_TOKENS:
            break
        distinct += is_new
        taken.append(waiting.popleft())
    return taken


def _uniforms(params: SamplingParams, request: Request) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(sample_seed(params.seed, request.prompt, request.index)))
    return generator.random(params.max_tokens, dtype=np.float32)


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    ids: set[int] = set()
    for source in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        ids.update(source if isinstance(source, list) else [source] if source is not None else [])
    return ids
