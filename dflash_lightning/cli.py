"""`dflash`: LightningCLI's fit and validate, and the small tools beside them."""

from __future__ import annotations

import importlib
import math
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from dflash_lightning.orphans import end_with_parent

_TOOLS = {
    "prepare": ("dflash_lightning.prepare", "conversations to rows of token ids and loss mask; shows rows decoded"),
    "regenerate": ("dflash_lightning.regenerate", "the target answers the prompts of a file itself: on-policy data"),
    "generate": ("dflash_lightning.generate", "decode prompts with a drafter: acceptance length, speed, losslessness"),
    "export": ("dflash_lightning.export", "write a drafter as a folder that inference engines load"),
    "profile": ("dflash_lightning.profile_run", "where a run's seconds went, what holds it back, what would help"),
}
_LIGHTNING = {"fit": "train a drafter", "validate": "evaluate a checkpoint on the validation data"}


def main(argv: list[str] | None = None) -> int:
    """Entry point of `dflash` and `python -m dflash_lightning`."""
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else "--help"
    try:
        if command in _TOOLS:
            return importlib.import_module(_TOOLS[command][0]).main(argv[1:])
        if command in _LIGHTNING:
            return _run_lightning(argv)
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 141
    except (ValueError, OSError) as error:
        # A user's mistake: the message names option and value; a stack of our frames would bury it.
        if _is_users_mistake(error):
            print(f"dflash {command}: error: {error}", file=sys.stderr)
            return 2
        raise
    print(_usage(), file=sys.stdout if command in ("-h", "--help") else sys.stderr)
    if command in ("-h", "--help"):
        return 0
    print(f"\ndflash: error: no command {command!r}", file=sys.stderr)
    return 2


def _usage() -> str:
    commands = {**_LIGHTNING, **{name: text for name, (_, text) in _TOOLS.items()}}
    lines = [f"  {name:<12} {text}" for name, text in commands.items()]
    return "usage: dflash COMMAND ...\n\n" + "\n".join(lines) + "\n\n`dflash COMMAND --help` lists a command's options."


def _nobody_reads() -> bool:
    """Whether stdout leads nowhere (`dflash profile RUN | head`); if so, what is left for it is thrown away."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    broken = bool(poll.poll(0))
    if broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return broken


def _is_users_mistake(error: BaseException) -> bool:
    """Whether the error was raised by this package's own checks, not somewhere inside a library."""
    frame = error.__traceback__
    last = None
    while frame is not None:
        last, frame = frame, frame.tb_next
    module = last.tb_frame.f_globals.get("__name__", "") if last is not None else ""
    return module.startswith("dflash_lightning.")


def _run_lightning(argv: list[str]) -> int:
    rank = int(os.environ.get("LOCAL_RANK") or 0)
    if rank > 0:
        # Before anything that takes time: rank 0, or torchrun, may die while this rank still starts.
        end_with_parent()
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from dflash_lightning.training_cli import DFlashCLI

    # LightningCLI reads sys.argv itself where no arguments are given, and warns where both are.
    sys.argv = [sys.argv[0], *argv]
    try:
        DFlashCLI()
    except SIGTERMException:
        # Lightning's own exit code is 0, which tells a job script that the training is complete.
        if rank == 0:
            print(f"dflash {argv[0]}: stopped by SIGTERM; continue with --ckpt_path last", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


def add_target_argument(parser: Any) -> None:
    """The option that every tool has."""
    parser.add_argument("--target", required=True, help="folder, hub name, .gguf file or package that holds one")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")


def existing_file(option: str, value: str) -> Path:
    """`value` as a path; FileNotFoundError names the option."""
    path = Path(value).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{option}={value}: no such file")
    return path


def check_range(option: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise ValueError, naming the option, unless `value` is a number in low .. high, of which infinity is none."""
    if not (low <= value <= high and math.isfinite(value)):
        limits = f"at least {low}" if high == math.inf else f"{low} to {high}"
        raise ValueError(f"{option}={value}: {limits}")


if __name__ == "__main__":
    sys.exit(main())
