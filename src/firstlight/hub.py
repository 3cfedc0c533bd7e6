"""The Hugging Face hub: downloads happen here and nowhere else."""

from __future__ import annotations

from pathlib import Path

from firstlight.errors import ModelError, nearest

#: What a model folder is made of. Never pickled weights, never code.
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]

#: Copies of the same weights that some models keep for other programs.
_LEFT_OUT = ["*/*", "consolidated*.safetensors"]


def find_model_folder(name: str | Path) -> Path:
    """The folder of a local model, or of a hub id (`openai-community/gpt2`) after download.

    Raises:
        ModelError: neither a folder nor something that can be downloaded.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    text = str(name)
    looks_like_hub_id = text.count("/") == 1 and not text.startswith((".", "/", "~"))
    if path.exists() or not looks_like_hub_id:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = "" if path.exists() else nearest(path.name, siblings)
        problem = "is a file, not a folder" if path.exists() else "does not exist"
        raise ModelError(f"model folder {text} {problem}{hint}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=_DOWNLOADED, ignore_patterns=_LEFT_OUT))
    except Exception as error:
        # The errors of its HTTP library come through too, and which library that is varies.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{text} is not a folder here, and it can't be downloaded from the hub: {reason}"
        ) from error
