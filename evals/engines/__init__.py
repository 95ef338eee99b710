"""Text generation for rollouts and evaluation: one small interface, several engines."""

from evals.engines.interface import Engine, Request, Sample, SamplingParams
from evals.engines.models import load_model, open_engine
from evals.engines.torch_engine import TorchEngine

__all__ = ["Engine", "Request", "Sample", "SamplingParams", "TorchEngine", "load_model", "open_engine"]
