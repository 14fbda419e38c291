"""Write a drafter as a folder that inference engines load: config.json, model.safetensors, README.md.

The folder appears whole or not at all, and is read back and compared before it gets its name: engines take missing
tensors and fields without a word and draft worse.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from dflash_lightning.drafter.card import model_card
from dflash_lightning.drafter.layouts import OWN_KEY, missing_fields, write_fields
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.weights import read_drafter

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FILES = ("README.md", "config.json", "model.safetensors")


@dataclass
class Exported:
    """The folder that was written, and what its user should know."""

    folder: Path
    num_parameters: int
    notes: list[str] = field(default_factory=list)


def export_drafter(
    source: str | Path,
    out: str | Path,
    fmt: str = "hf",
    *,
    dtype: str = "bfloat16",
    target: str | None = None,
    trained_max_length: int | None = None,
) -> Exported:
    """Write the drafter of a checkpoint or exported folder to `out` in the layout `fmt` (`hf` or `speculators`).

    Args:
        dtype: dtype of the weights.
        target: name of the target to record; None keeps what the source says.
        trained_max_length: longest text of the training, in tokens; None keeps what the source says.

    Raises:
        FileExistsError: `out` is a file, or a folder that holds something else than an export.
        ValueError: the source lacks a tensor, or holds a value that `dtype` cannot.
    """
    out = Path(out).expanduser()
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: use one of {', '.join(DTYPES)}")
    _check_replaceable(out)
    files = read_drafter(source)
    own = dict(files.own)
    if target is not None:
        own["target"] = target
    if trained_max_length is not None:
        own["trained_max_length"] = trained_max_length
    fields = write_fields(files.config, fmt, dtype, own)
    tensors = _cast(files.weights, files.config, DTYPES[dtype], str(source))

    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        (temporary / "README.md").write_text(model_card(files.config, fmt, dtype, own))
        check_export(temporary, files.config, fmt, tensors)
        for name in FILES:
            (temporary / name).chmod(0o644)
            _sync(temporary / name)
        temporary.chmod(0o755)
        _take_place(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(out, sum(t.numel() for t in tensors.values()), _notes(files.config, own))


def check_export(folder: Path, config: Qwen3Config, fmt: str, tensors: dict[str, Tensor]) -> None:
    """Read `folder` back; ValueError unless it holds every field and tensor that an engine needs, as given."""
    fields = json.loads((folder / "config.json").read_text())
    if missing := missing_fields(fields, fmt):
        raise ValueError(f"export: config.json lacks {', '.join(missing)}, without which engines draft worse")
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        names = set(stored.keys())
        if names != set(tensors):
            raise ValueError(f"export: model.safetensors differs in the tensors {sorted(names ^ set(tensors))}")
        for name, tensor in tensors.items():
            if not torch.equal(stored.get_tensor(name), tensor):
                raise ValueError(f"export: {name} was not written as it is")
    back = read_drafter(folder).config
    ours, theirs = _comparable(config), _comparable(back)
    if ours != theirs:
        differ = sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
        raise ValueError(f"export: config.json reads back with another {', '.join(differ)}")


def _cast(weights: dict[str, Tensor], config: Qwen3Config, dtype: torch.dtype, source: str) -> dict[str, Tensor]:
    """All tensors of the drafter and no other, in `dtype`."""
    with torch.device("meta"):
        expected = DFlashDraftModel(config).state_dict()
    if set(weights) != set(expected):
        raise ValueError(f"{source}: missing or unexpected tensors {sorted(set(weights) ^ set(expected))}")
    tensors = {}
    for name, like in expected.items():
        if weights[name].shape != like.shape:
            raise ValueError(f"{source}: {name} has shape {tuple(weights[name].shape)}, not {tuple(like.shape)}")
        tensors[name] = weights[name].detach().to(dtype).contiguous()
        if not torch.isfinite(tensors[name]).all():
            raise ValueError(f"{source}: {name} is not finite in {dtype}; use another --dtype or checkpoint")
    return tensors


def _comparable(config: Qwen3Config) -> dict:
    fields = config.to_dict()
    dflash = {"block_size": config.block_size, "sliding_causal": True, **fields["dflash_config"]}
    if "sliding_attention" not in (config.layer_types or ()):
        dflash["sliding_causal"] = True  # without a sliding layer it says nothing
    for name in ("dtype", "torch_dtype", "transformers_version", "architectures"):
        fields.pop(name, None)
    return {**fields, "dflash_config": dflash}


def _notes(config: Qwen3Config, own: dict) -> list[str]:
    notes = []
    trained, possible = own.get("trained_max_length"), config.max_position_embeddings
    if trained is None:
        notes.append("the checkpoint does not say how long its texts were; --trained-max-length records it")
    elif trained < possible:
        notes.append(
            f"trained on texts of up to {trained} tokens, the target takes {possible}: expect shorter accepted drafts "
            "beyond what was trained"
        )
    if not own.get("target"):
        notes.append("no target is recorded; --target records it")
    if len(set(config.layer_types or ())) > 1:
        notes.append("full and sliding layers are mixed: vLLM serves that on GPUs only")
    return notes


def _check_replaceable(out: Path) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise FileExistsError(f"--out {out}: this is no folder")
    names = {p.name for p in out.iterdir()}
    if not names:
        return
    config = out / "config.json"
    ours = names <= set(FILES) and config.is_file() and OWN_KEY in json.loads(config.read_text())
    if not ours:
        raise FileExistsError(
            f"--out {out}: the folder holds other files ({', '.join(sorted(names)[:5])}); give another"
        )


def _sync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def _take_place(temporary: Path, out: Path) -> None:
    """Rename `temporary` to `out`; an earlier export steps aside first, so no reader sees a mix of the two."""
    old = None
    if out.exists():
        old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-old-"))
        out.rename(old / "export")
    try:
        temporary.rename(out)
    except OSError:
        if old is not None:
            (old / "export").rename(out)
        raise
    finally:
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
