"""firstlight: from raw text to your own language model.

    import firstlight

    tokenizer = firstlight.train_tokenizer(texts, vocab_size=4096)
    firstlight.prepare(["corpus/"], tokenizer, "data/corpus")
    firstlight.train("recipe.yaml")
    print(firstlight.evaluate("runs/recipe").bits_per_byte)
    print(firstlight.generate("runs/recipe", "Once upon a time").text)

Names are imported when they are first used: `import firstlight` itself is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstlight.conversion.convert import Conversion, convert
    from firstlight.data.chat import ChatOptions, prepare_chat
    from firstlight.data.corpus import TokenDataset
    from firstlight.data.prepare import prepare
    from firstlight.errors import FirstlightError
    from firstlight.evaluation.perplexity import Evaluation, evaluate
    from firstlight.evaluation.results import TaskResult
    from firstlight.evaluation.tasks import evaluate_tasks
    from firstlight.generation.chat import ChatSession
    from firstlight.generation.config import SamplingConfig
    from firstlight.generation.continuation import Generation
    from firstlight.generation.engine import GenerationStream, generate, generate_batch, load
    from firstlight.planner.memory.module import plan_module
    from firstlight.recipe import Recipe, load_recipe
    from firstlight.report.report import draw_report
    from firstlight.tokenizer import TextStream, Tokenizer, train_tokenizer
    from firstlight.training.loop import TrainResult, train
    from firstlight.weights.huggingface import LoadedModel

__version__ = "0.1.0"

__all__ = [
    "ChatOptions",
    "ChatSession",
    "Conversion",
    "Evaluation",
    "FirstlightError",
    "Generation",
    "GenerationStream",
    "LoadedModel",
    "Recipe",
    "SamplingConfig",
    "TaskResult",
    "TextStream",
    "TokenDataset",
    "Tokenizer",
    "TrainResult",
    "convert",
    "draw_report",
    "evaluate",
    "evaluate_tasks",
    "generate",
    "generate_batch",
    "load",
    "load_recipe",
    "plan_module",
    "prepare",
    "prepare_chat",
    "train",
    "train_tokenizer",
]

_HOMES = {
    "ChatOptions": "data.chat",
    "ChatSession": "generation.chat",
    "Conversion": "conversion.convert",
    "Evaluation": "evaluation.perplexity",
    "FirstlightError": "errors",
    "Generation": "generation.continuation",
    "GenerationStream": "generation.engine",
    "LoadedModel": "weights.huggingface",
    "Recipe": "recipe",
    "SamplingConfig": "generation.config",
    "TaskResult": "evaluation.results",
    "TextStream": "tokenizer",
    "TokenDataset": "data.shards",
    "Tokenizer": "tokenizer",
    "TrainResult": "training.loop",
    "convert": "conversion.convert",
    "draw_report": "report.report",
    "evaluate": "evaluation.perplexity",
    "evaluate_tasks": "evaluation.tasks",
    "generate": "generation.engine",
    "generate_batch": "generation.engine",
    "load": "generation.engine",
    "load_recipe": "recipe",
    "plan_module": "planner.memory.module",
    "prepare": "data.prepare",
    "prepare_chat": "data.chat",
    "train": "training.loop",
    "train_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'firstlight' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"firstlight.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
