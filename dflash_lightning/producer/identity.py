"""What makes two targets the same one for a cache of hidden states: their config and their weights, not their path."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

# In the order in which transformers looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Config entries that say how the file came about, not what the model computes.
_NO_MATTER = ("_name_or_path", "transformers_version")
_WHOLE_BYTES = 8 << 20
_BLOCK_BYTES = 4096


def target_identity(target: str) -> str:
    """Hash of a target's `config.json` and weights files, 32 hex digits.

    Weights of up to 8 MiB count whole. Of a larger safetensors file the size and the header count, and 4 KiB at the
    start and in the middle of each tensor (a second for hundreds of tensors); of another large file its size and 512
    such blocks. That tells checkpoints and fine-tunes apart; a single weight changed by hand it may miss. The code of
    a target that needs `trust_remote_code` does not count.

    Args:
        target: a folder or hub name, as `resolve_target` gives it. Weights on a hub that are not on this machine yet
            are downloaded, as loading the target would.

    Raises:
        OSError: there are no weights.
    """
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    config_file = cached_file(target, "config.json")
    assert config_file is not None, "raises where there is none"
    config: dict[str, Any] = json.loads(Path(config_file).read_text(encoding="utf-8"))
    kept = {k: v for k, v in config.items() if k not in _NO_MATTER}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for name in _WEIGHTS:
        found = cached_file(target, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            break
    else:
        raise FileNotFoundError(f"target={target}: found none of {', '.join(_WEIGHTS)}")
    files: list[str] = [found]
    if name.endswith(".index.json"):
        files = list(get_checkpoint_shard_files(target, found)[0] or [])
    for file in sorted(map(Path, files), key=lambda f: f.name):
        digest.update(f"{file.name}:{file.stat().st_size}:".encode() + _content(file))
    return digest.hexdigest()[:32]


def _content(path: Path) -> bytes:
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return hashlib.sha256(path.read_bytes()).digest()
    with path.open("rb") as file:
        digest = hashlib.sha256()
        places = [size * i // 512 for i in range(512)]
        if path.suffix == ".safetensors":
            header = _header(file)
            digest.update(header)
            start = 8 + len(header)
            spans = [t["data_offsets"] for name, t in json.loads(header).items() if name != "__metadata__"]
            places = [start + at for first, last in spans for at in (first, (first + last) // 2)]
        for place in sorted(places):
            file.seek(place)
            digest.update(file.read(_BLOCK_BYTES))
        return digest.digest()


def _header(file: BinaryIO) -> bytes:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length)
