"""The options of `firstlight train` that start several processes, and their start."""

from __future__ import annotations

import os
import sys

import click

from firstlight.errors import ConfigError

#: The options for starting several processes.
LAUNCH_OPTIONS = ("nproc", "nnodes", "node-rank", "rdzv-endpoint", "max-restarts")


def launch_if_asked(ctx: click.Context) -> int | None:
    """Remove LAUNCH_OPTIONS from a command's parameters, and start the processes that they ask for.

    Returns:
        The exit code of the processes; None if this process must do the work itself.

    Raises:
        ConfigError: the options contradict each other, or a launcher has started this process.
        RankError: a rank failed.
    """
    asked = {name: ctx.params.pop(name.replace("-", "_")) for name in LAUNCH_OPTIONS}
    nproc = asked.pop("nproc")
    if nproc is None:
        given = next((name for name, value in asked.items() if value is not None), None)
        if given is not None:
            raise ConfigError(f"--{given} needs --nproc: processes a machine")
        return None
    nnodes = 1 if asked["nnodes"] is None else asked["nnodes"]
    if nnodes > 1 and asked["node-rank"] is None:
        raise ConfigError("--nnodes needs --node-rank: which of the machines this is, from 0")
    _require_no_launcher(nnodes)
    count = _count(nproc)
    if count == 1 and nnodes == 1 and not asked["max-restarts"]:
        return None
    # Otherwise torch's C++ code prints a long stack trace for each broken connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from firstlight.parallel.elastic import Launch, launch

    options = Launch(
        count,
        nnodes,
        asked["node-rank"] or 0,
        asked["rdzv-endpoint"] or "",
        max_restarts=asked["max-restarts"] or 0,
    )
    # -P: modules in the current folder are not imported.
    command = [sys.executable, "-P", "-m", "firstlight", *arguments_of(ctx)]
    return launch(command, options, () if ctx.params.get("resume") else ("--resume",))


def arguments_of(ctx: click.Context) -> list[str]:
    """The command and its arguments as a list for a new process, without the removed options."""
    assert ctx.info_name is not None
    arguments = [ctx.info_name]
    for parameter in ctx.command.params:
        assert parameter.name is not None
        value = ctx.params.get(parameter.name)
        if isinstance(parameter, click.Argument):
            arguments += value or ()
        elif isinstance(value, tuple):
            # An option that may be given several times.
            arguments += [word for one in value for word in (parameter.opts[0], str(one))]
        elif value is not None and value != parameter.get_default(ctx):
            arguments += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    return arguments


def _require_no_launcher(nnodes: int) -> None:
    """Check that no launcher has started this process.

    Raises:
        ConfigError: a launcher has, so that several processes would start processes.
    """
    from firstlight.parallel.world import find_world

    variables = {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"}
    # With several machines, a launcher such as srun may start this command once on each.
    if variables & os.environ.keys() or (nnodes == 1 and find_world().size > 1):
        raise ConfigError(
            "a launcher has started this process: leave out --nproc, or start the command without "
            "that launcher"
        )


def _count(nproc: str) -> int:
    if nproc == "auto":
        import torch

        return max(torch.cuda.device_count(), 1)
    if not nproc.isdecimal() or int(nproc) < 1:
        raise ConfigError(f"--nproc is '{nproc}': it has to be a number from 1 on, or auto")
    return int(nproc)
