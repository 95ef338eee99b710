"""Text generation for rollouts and evaluation: one small interface, several engines."""

from evals.engines.interface import Engine, Sample, SamplingParams
from evals.engines.models import load_model, make_engine

__all__ = ["Engine", "Sample", "SamplingParams", "load_model", "make_engine"]
