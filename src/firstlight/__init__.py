"""firstlight: from raw text to your own language model.

Train a model on a folder of text files, in one call:

    import firstlight

    run = firstlight.train_texts("my_texts/", budget="30m")

Or call the individual steps:

    tokenizer = firstlight.train_tokenizer(texts, vocab_size=4096)
    firstlight.prepare(["corpus/"], tokenizer, "data/corpus")
    firstlight.train("recipe.yaml")
    print(firstlight.evaluate("runs/recipe").bits_per_byte)
    print(firstlight.generate("runs/recipe", "Once upon a time").text)

Public names are imported when they are first used, so `import firstlight` itself is fast. It sets
the environment variable GOMP_SPINCOUNT and, on machines with an NVIDIA GPU, PYTORCH_ALLOC_CONF.
These variables are read when torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # `import X as X` marks the name as public for type checkers.
    from firstlight.conversion.convert import Conversion as Conversion
    from firstlight.conversion.convert import convert as convert
    from firstlight.data.chat import ChatOptions as ChatOptions
    from firstlight.data.chat import prepare_chat as prepare_chat
    from firstlight.data.corpus import TokenDataset as TokenDataset
    from firstlight.data.prepare import prepare as prepare
    from firstlight.errors import FirstlightError as FirstlightError
    from firstlight.evaluation.comparison import ModelComparison as ModelComparison
    from firstlight.evaluation.comparison import compare as compare
    from firstlight.evaluation.perplexity import Evaluation as Evaluation
    from firstlight.evaluation.perplexity import evaluate as evaluate
    from firstlight.evaluation.scores import TaskResult as TaskResult
    from firstlight.evaluation.tasks import evaluate_tasks as evaluate_tasks
    from firstlight.from_texts.result import TextRun as TextRun
    from firstlight.from_texts.run import train_texts as train_texts
    from firstlight.generation.chat import ChatSession as ChatSession
    from firstlight.generation.config import SamplingConfig as SamplingConfig
    from firstlight.generation.continuation import Generation as Generation
    from firstlight.generation.engine import GenerationStream as GenerationStream
    from firstlight.generation.engine import generate as generate
    from firstlight.generation.engine import generate_batch as generate_batch
    from firstlight.generation.engine import load as load
    from firstlight.lora.loading import LoadedModel as LoadedModel
    from firstlight.planner.memory.module import plan_module as plan_module
    from firstlight.recipe import Recipe as Recipe
    from firstlight.recipe import load_recipe as load_recipe
    from firstlight.report.report import draw_report as draw_report
    from firstlight.sharing.push import Pushed as Pushed
    from firstlight.sharing.push import push as push
    from firstlight.sharing.push import push_data as push_data
    from firstlight.tokenizer import TextStream as TextStream
    from firstlight.tokenizer import Tokenizer as Tokenizer
    from firstlight.tokenizer import train_tokenizer as train_tokenizer
    from firstlight.training.cooldown import cooldown_recipe as cooldown_recipe
    from firstlight.training.loop import TrainResult as TrainResult
    from firstlight.training.loop import train as train
    from firstlight.tuning.search import TuneResult as TuneResult
    from firstlight.tuning.search import tune as tune

__version__ = "0.1.0"

#: Public names that are imported when they are first used, grouped by module.
_PUBLIC = {
    "conversion.convert": ["Conversion", "convert"],
    "data.chat": ["ChatOptions", "prepare_chat"],
    "data.corpus": ["TokenDataset"],
    "data.prepare": ["prepare"],
    "errors": ["FirstlightError"],
    "evaluation.comparison": ["ModelComparison", "compare"],
    "evaluation.perplexity": ["Evaluation", "evaluate"],
    "evaluation.scores": ["TaskResult"],
    "evaluation.tasks": ["evaluate_tasks"],
    "generation.chat": ["ChatSession"],
    "generation.config": ["SamplingConfig"],
    "generation.continuation": ["Generation"],
    "generation.engine": ["GenerationStream", "generate", "generate_batch", "load"],
    "from_texts.result": ["TextRun"],
    "from_texts.run": ["train_texts"],
    "lora.loading": ["LoadedModel"],
    "planner.memory.module": ["plan_module"],
    "recipe": ["Recipe", "load_recipe"],
    "report.report": ["draw_report"],
    "sharing.push": ["Pushed", "push", "push_data"],
    "tokenizer": ["TextStream", "Tokenizer", "train_tokenizer"],
    "training.cooldown": ["cooldown_recipe"],
    "training.loop": ["TrainResult", "train"],
    "tuning.search": ["TuneResult", "tune"],
}
_MODULES = {name: f"firstlight.{module}" for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULES)

# By default, torch's threads spin while they wait. If other programs keep the CPU busy, a training
# step then takes ten times as long.
_environment = importlib.import_module("firstlight.hardware.environment")
_environment.set_at_import()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'firstlight' has no attribute '{name}'")
    _environment.require_fork()
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
