"""Load, validate and resolve recipes. A recipe is a YAML file with all settings of a run. Its
sections are strictly validated.
"""

from firstlight.checkpoint.retention import CheckpointConfig
from firstlight.data.loader import NO_MASKING, DataConfig, MixedCorpus
from firstlight.recipe.load import (
    hint_for_other_name,
    known_keys,
    load_recipe,
    override_pairs,
    parse_recipe,
    parse_resolved_recipe,
    recipe_fields,
)
from firstlight.recipe.micro_batch import DEFAULT_ROWS, BatchConfig
from firstlight.recipe.schema import (
    EvaluationConfig,
    GuardConfig,
    PlanningConfig,
    PreferenceConfig,
    Recipe,
    ResolvedRecipe,
    RunConfig,
)

__all__ = [
    "DEFAULT_ROWS",
    "NO_MASKING",
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "GuardConfig",
    "MixedCorpus",
    "PlanningConfig",
    "PreferenceConfig",
    "Recipe",
    "ResolvedRecipe",
    "RunConfig",
    "hint_for_other_name",
    "known_keys",
    "load_recipe",
    "override_pairs",
    "parse_recipe",
    "parse_resolved_recipe",
    "recipe_fields",
]
