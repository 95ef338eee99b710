"""The learning rate of each optimizer update, a pure function of its number."""

import math

from trainers.recipe import Recipe


def learning_rate(recipe: Recipe, update: int, num_updates: int) -> float:
    """Linear warm-up to the peak, then constant, or cosine or linear decay to 0 at the last update's end.

    Args:
        update: how many updates came before, from 0.
        num_updates: updates of the whole run.
    """
    if update < recipe.warmup_steps:
        return recipe.learning_rate * (update + 1) / (recipe.warmup_steps + 1)
    progress = (update - recipe.warmup_steps) / max(1, num_updates - recipe.warmup_steps)
    match recipe.lr_schedule:
        case "constant":
            return recipe.learning_rate
        case "linear":
            return recipe.learning_rate * (1 - progress)
        case "cosine":
            return recipe.learning_rate * (1 + math.cos(math.pi * progress)) / 2
