"""What is put on the hub of hub_server.py, and somebody who downloads it.

They do so in processes of their own, which know the hub by the settings that people use
(HF_ENDPOINT, HF_HOME, HF_TOKEN). Their client is huggingface_hub as it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from hub_server import Hub

from firstlight.models import LlamaConfig, empty_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import model_files

WEIGHTS = "model.safetensors"

#: Prints the folder of a hub id. It does not wait before it tries again.
FIND = """
import sys, time
from firstlight.errors import FirstlightError
from firstlight.weights.hub import find_model_folder
time.sleep = lambda seconds: None
try:
    print(find_model_folder(sys.argv[1]))
except FirstlightError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""

# What this machine itself knows of a hub must not count.
_FOREIGN = ("HF_", "HUGGING", "TRANSFORMERS_", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")

_SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def write_model(
    folder: Path, tokenizer: Tokenizer, *, seed: int = 0, shards: int = 1, **shape: int
) -> Path:
    """A Llama in a folder of the hub's layout, its weights in one file or in shards."""
    config = LlamaConfig.model_validate({**_SHAPE, **shape})
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    folder.mkdir()
    for name, content in model_files(config, tokenizer).items():
        (folder / name).write_text(content, encoding="utf-8")
    tensors = model.state_dict()
    if shards == 1:
        safetensors.torch.save_file(tensors, folder / WEIGHTS)
        return folder
    files = [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    weight_map = {name: files[number % shards] for number, name in enumerate(tensors)}
    for file in files:
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        safetensors.torch.save_file(part, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Client:
    """A machine that knows one hub, and keeps its cache and token in `home`."""

    hub: Hub
    home: Path

    def start(
        self, *arguments: str, settings: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start `python ARGUMENTS...`.

        Args:
            settings: variables of the environment, beside those that name the hub and the cache.
            options: further ones of `subprocess.Popen`.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        environment |= {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home)}
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**environment, **(settings or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS...` to its end."""
        with self.start(*arguments, **options) as process:
            out, err = process.communicate()
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def find(self, name: str, **settings: str) -> Path:
        """The folder that a hub id is found in."""
        done = self.run("-c", FIND, name, settings=settings)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.removesuffix("\n"))

    def refusal(self, name: str, settings: dict[str, str] | None = None, **options: Any) -> str:
        """The error that a hub id ends in: its class and its one line."""
        done = self.run("-c", FIND, name, settings=settings, **options)
        assert (done.returncode, done.stdout) == (1, "")
        assert "Traceback" not in done.stderr
        return done.stderr.splitlines()[-1]

    def files(self, pattern: str) -> list[Path]:
        """The files of the cache with such a name."""
        return sorted(self.home.rglob(pattern))
