"""Generation with vLLM, in process: CUDA, or its CPU build."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from evals.engines.interface import Engine, Request, Sample, SamplingParams, sample_seed


class VllmEngine(Engine):
    """Holds one model; its samples are drawn by vLLM, so they differ from the torch engine's except when greedy."""

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        config: dict[str, Any] | None = None,
        max_tokens: int | None = None,
        gpu_memory: float = 0.9,
        may_sleep: bool = False,
    ) -> None:
        """
        Args:
            model: folder of Hugging Face files, or hub id.
            config: overrides of the model's config.
            max_tokens: longest prompt and response together; None: the model's context.
            gpu_memory: share of each GPU's memory that the engine may take.
            may_sleep: make `sleep` give the GPU's memory back; on CPUs it never does.

        Raises:
            FileNotFoundError: vLLM is not installed here.
        """
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm
            from vllm.platforms import current_platform
        except ImportError as error:
            raise FileNotFoundError(f"the vllm engine needs vLLM 0.32 ({error}); use the torch engine") from error
        self._on_cpu = on_cpu = current_platform.is_cpu()
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        self._vllm = vllm
        self._sleeps = may_sleep and not on_cpu
        self._asleep = False
        self.tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
        self._llm = vllm.LLM(
            model=model,
            revision=revision,
            hf_overrides=config or {},
            max_model_len=max_tokens,
            dtype="float32" if on_cpu else "bfloat16",
            enforce_eager=on_cpu,
            # In this process, also where a launcher has set up torch.distributed for the trainer.
            distributed_executor_backend="uni",
            gpu_memory_utilization=gpu_memory,
            enable_sleep_mode=self._sleeps,
            # Log-probabilities of the distribution that is sampled from, temperature applied.
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
        )

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        """See `Engine.sample`. Every request has a seed of its own; shared prompts are read once (prefix cache)."""
        if not requests:
            return []
        unique = list(dict.fromkeys(request.prompt for request in requests))
        encoded = dict(zip(unique, self.tokenizer(unique, add_special_tokens=False)["input_ids"], strict=True))
        settings = [
            self._vllm.SamplingParams(
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                seed=int(sample_seed(params.seed, request.prompt, request.index).generate_state(1)[0]),
                logprobs=0,
            )
            for request in requests
        ]
        prompts = [self._vllm.TokensPrompt(prompt_token_ids=encoded[request.prompt]) for request in requests]
        finished = self._llm.generate(prompts, settings, use_tqdm=False)
        outputs = [request.outputs[0] for request in finished]
        texts = self.tokenizer.batch_decode([output.token_ids for output in outputs], skip_special_tokens=True)
        return [
            _sample(encoded[request.prompt], output, text)
            for request, output, text in zip(requests, outputs, texts, strict=True)
        ]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.update_weights`; in memory, without a file."""
        if self._asleep:
            self._llm.wake_up(["weights"])
        # Not load_weights: packed CPU weights have lost their loaders. With an iterator this reads no file.
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if self._on_cpu:
            self._llm.apply_model(_repack_tied_head)
        if self._asleep:
            self._llm.wake_up(["kv_cache"])
            self._asleep = False
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        """See `Engine.sleep`. Weights and cache are dropped, not kept on the host: new weights come anyway."""
        if self._sleeps:
            self._llm.sleep(level=2)
            self._asleep = True

    def close(self) -> None:
        """See `Engine.close`. Also takes down torch.distributed in this process, which vLLM shares."""
        self._llm.llm_engine.engine_core.shutdown()


def _repack_tied_head(model: Any) -> None:
    """CPU kernels compute with a packed copy of the output layer, which vLLM forgets where it is the embedding."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _sample(prompt_ids: list[int], output: Any, text: str) -> Sample:
    token_ids = list(output.token_ids)
    logprobs = [step[token].logprob for step, token in zip(output.logprobs, token_ids, strict=True)]
    return Sample(prompt_ids, token_ids, logprobs, text, truncated=output.finish_reason == "length")
