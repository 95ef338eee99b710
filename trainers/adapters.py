"""Low-rank adapters (LoRA, arXiv 2106.09685): put on, taken out of the way, and merged for whoever reads weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainers.parallel import whole
from trainers.recipe import Recipe


def add_adapters(model: PreTrainedModel, recipe: Recipe, seed: int) -> None:
    """Freeze the model and give every linear layer but the output layer an adapter that starts at zero.

    Raises:
        FileNotFoundError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise FileNotFoundError("lora_rank needs the package peft: pip install peft") from error
    output = model.get_output_embeddings()
    targets = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not output]
    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha if recipe.lora_alpha is not None else 2 * recipe.lora_rank,
        lora_dropout=0.0,
        target_modules=targets,
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    inject_adapter_in_model(config, model)
    torch.set_rng_state(state)


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Whole weights by the names that the model has without adapters, each adapter added to its layer's weight.

    With a sharded model every worker must go through all of them.
    """
    layers = dict(_adapted_layers(model))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, _, kind = name.rpartition(".")
        layer = layers.get(owner.removesuffix(".base_layer"))
        weight = whole(parameter.detach())
        if layer is not None and kind == "weight":
            (adapter,) = layer.lora_A
            down, up = (whole(part[adapter].weight.detach()) for part in (layer.lora_A, layer.lora_B))
            weight = weight + layer.scaling[adapter] * (up @ down)
        yield name.replace(".base_layer.", "."), weight


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before training."""
    layers = [layer for _, layer in _adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _adapted_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module
