"""Generation with vLLM, in process: CUDA, or its CPU build."""

import os
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

from evals.engines.interface import Sample, SamplingParams, sample_seed


class VllmEngine:
    """Holds one model; its samples are drawn by vLLM, so they differ from the torch engine's except when greedy."""

    def __init__(self, model: str, *, revision: str | None = None, config: dict[str, Any] | None = None) -> None:
        """
        Args:
            model: folder of Hugging Face files, or hub id.
            config: overrides of the model's config.

        Raises:
            FileNotFoundError: vLLM is not installed here.
        """
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm
            from vllm.platforms import current_platform
        except ImportError as error:
            raise FileNotFoundError(f"the vllm engine needs vLLM 0.32 ({error}); use --engine torch") from error
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        self._vllm = vllm
        self.tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
        self._llm = vllm.LLM(
            model=model,
            revision=revision,
            hf_overrides=config or {},
            dtype="float32" if on_cpu else "bfloat16",
            enforce_eager=on_cpu,
            distributed_executor_backend="uni",
            # Log-probabilities of the distribution that is sampled from, temperature applied.
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
        )

    def generate(self, prompts: Sequence[str], params: SamplingParams) -> list[list[Sample]]:
        """`params.n` samples per prompt, in the order of the prompts; every sample has a seed of its own."""
        encoded = self.tokenizer(list(prompts), add_special_tokens=False)["input_ids"] if prompts else []
        settings = [
            self._vllm.SamplingParams(
                n=params.n,
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                # vLLM counts on from here within the group.
                seed=int(sample_seed(params.seed, prompt, 0).generate_state(1)[0]),
                logprobs=0,
            )
            for prompt in prompts
        ]
        requests = [self._vllm.TokensPrompt(prompt_token_ids=ids) for ids in encoded]
        outputs = self._llm.generate(requests, settings, use_tqdm=False) if requests else []
        return [
            [self._sample(ids, output) for output in sorted(request.outputs, key=lambda output: output.index)]
            for ids, request in zip(encoded, outputs, strict=True)
        ]

    def _sample(self, prompt_ids: list[int], output: Any) -> Sample:
        token_ids = list(output.token_ids)
        logprobs = [step[token].logprob for step, token in zip(output.logprobs, token_ids, strict=True)]
        (text,) = self.tokenizer.batch_decode([token_ids], skip_special_tokens=True)
        return Sample(prompt_ids, token_ids, logprobs, text, truncated=output.finish_reason == "length")
