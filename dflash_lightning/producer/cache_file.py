"""One entry of the hidden-state cache: a safetensors file with the states of one produced batch.

Tensors: `hidden_states` [T, F] and, where the training asks for it, `last_hidden_state` [T, H]. Metadata: `format`;
`identity`, JSON of what the states depend on; `rows`, a JSON list of [hash of the token ids, tokens, CRC-32 of the
states] in the batch's order (0 tokens: the producer dropped the row). Ids and masks stay in the rows.

Files are read and written here instead of by the safetensors package for three reasons: states go straight between
file and slot (a batch is gigabytes; the package copies it once more), the write must be synced before its rename, and
a file that ends early must be an error, never a fault of a mapped page.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

FORMAT = "dflash-hidden-states-1"
SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
_MAX_HEADER = 16 << 20
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Reading and CRC-32 release the interpreter's lock; one thread alone checks about 1 GB/s.
_threads = ThreadPoolExecutor(4, thread_name_prefix="dflash-cache")


class BadEntryError(ValueError):
    """An entry cannot be used. `path` is the file, the message says why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


@dataclass(frozen=True)
class StateLayout:
    """What the tensors of an entry look like: `width` hidden values a token (and `last_width` more) in `dtype`."""

    width: int
    last_width: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"data.target_dtype={self.dtype!r} cannot be cached; use one of {', '.join(_DTYPES)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's states."""
        return sum(self.row_bytes().values())

    def row_bytes(self) -> dict[str, int]:
        """Tensor name -> bytes of one token."""
        size = getattr(torch, self.dtype).itemsize
        names = {"hidden_states": self.width, "last_hidden_state": self.last_width}
        return {name: width * size for name, width in names.items() if width}

    def tensors(self, num_tokens: int) -> dict[str, dict[str, Any]]:
        """The tensors' part of a safetensors header."""
        found, at = {}, 0
        widths = {"hidden_states": self.width, "last_hidden_state": self.last_width}
        for name, size in self.row_bytes().items():
            end = at + size * num_tokens
            shape = [num_tokens, widths[name]]
            found[name] = {"dtype": _DTYPES[self.dtype], "shape": shape, "data_offsets": [at, end]}
            at = end
        return found


@dataclass(frozen=True)
class StoredRow:
    """Where the states of one row lie: byte offset by tensor name."""

    path: Path
    hash: str
    tokens: int
    crc: int
    offsets: dict[str, int]


def batch_key(hashes: Sequence[str]) -> str:
    """Name of an entry: the hash of its rows' hashes, in order."""
    return hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()


def read_header(path: Path, identity: dict[str, Any], layout: StateLayout) -> list[StoredRow]:
    """The rows of an entry.

    Raises:
        FileNotFoundError: there is no such file.
        BadEntryError: it is cut off, unreadable, under another entry's name, or made from something else.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER, size):
                raise ValueError("unreadable header")
            header = json.loads(file.read(length))
        meta = header["__metadata__"]
        if meta["format"] != FORMAT:
            raise BadEntryError(path, f"format {meta['format']!r} instead of {FORMAT!r}")
        stored, listed = json.loads(meta["identity"]), json.loads(meta["rows"])
        rows = [(str(name), int(tokens), int(crc)) for name, tokens, crc in listed]
        if not isinstance(stored, dict) or any(tokens < 0 for _, tokens, _ in rows):
            raise ValueError("unreadable header")
    except (FileNotFoundError, BadEntryError):
        raise
    except OSError as error:
        raise BadEntryError(path, f"cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        raise BadEntryError(path, "its header is unreadable") from None
    if stored != identity:
        names = sorted(k for k in {*identity, *stored} if stored.get(k) != identity.get(k))
        raise BadEntryError(path, f"made with another {', '.join(names)}")
    if path.name != batch_key([name for name, _, _ in rows]) + SUFFIX:
        raise BadEntryError(path, "its rows are not those that its name stands for")
    total = sum(tokens for _, tokens, _ in rows)
    if {k: v for k, v in header.items() if k != "__metadata__"} != layout.tensors(total):
        raise BadEntryError(path, "its tensors have other names, shapes or dtypes")
    expected = 8 + length + total * layout.token_bytes
    if size != expected:
        raise BadEntryError(path, f"{size} bytes instead of {expected}: cut off or longer than it should be")
    starts = {name: 8 + length + tensor["data_offsets"][0] for name, tensor in layout.tensors(total).items()}
    found, at = [], 0
    for name, tokens, crc in rows:
        offsets = {key: starts[key] + at * size for key, size in layout.row_bytes().items()}
        found.append(StoredRow(path, name, tokens, crc, offsets))
        at += tokens
    return found


def read_rows(rows: Sequence[StoredRow], tensors: dict[str, Tensor]) -> None:
    """Read the states of `rows` one after the other into `tensors`, each [T, width], and check them.

    Raises:
        BadEntryError: a file is gone, ends early, or its bytes do not match their CRC-32.
    """
    with contextlib.ExitStack() as stack:
        files: dict[Path, int] = {}
        for path in {row.path: None for row in rows}:
            try:
                files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise BadEntryError(path, f"cannot be read: {error}") from None
            stack.callback(os.close, files[path])
        views = {name: _bytes(tensor) for name, tensor in tensors.items()}
        jobs, at = [], 0
        for row in rows:
            parts = [(row.offsets[name], view[at : at + row.tokens]) for name, view in views.items()]
            jobs.append((files[row.path], row, parts))
            at += row.tokens
        # All of them end before the files close, also after an error.
        errors = [e for e in _threads.map(lambda job: _read_row(*job), jobs) if e is not None]
    if errors:
        raise errors[0]


def _read_row(fd: int, row: StoredRow, parts: list[tuple[int, np.ndarray]]) -> BadEntryError | None:
    for offset, view in parts:
        left = view.reshape(-1).data
        try:
            while left.nbytes:
                count = os.preadv(fd, [left], offset)
                if not count:
                    return BadEntryError(row.path, "it ends early")
                left, offset = left[count:], offset + count
        except OSError as error:
            return BadEntryError(row.path, f"cannot be read: {error}")
    same = _crc([view for _, view in parts]) == row.crc
    return None if same else BadEntryError(row.path, "its bytes do not match their checksum")


def write_entry(
    folder: Path,
    identity: dict[str, Any],
    layout: StateLayout,
    hashes: Sequence[str],
    lengths: Sequence[int],
    tensors: dict[str, Tensor],
) -> int:
    """Write the states of a batch as an entry of `folder`, whole or not at all; bytes written.

    Args:
        hashes, lengths: of each row; length 0 marks a dropped row.
        tensors: name -> [T, width], T = sum of the lengths.
    """
    views = {name: _bytes(tensor) for name, tensor in tensors.items()}
    ends = np.cumsum(lengths)
    spans = [(int(end) - n, int(end)) for end, n in zip(ends, lengths, strict=True)]
    crcs = _threads.map(lambda s: _crc([view[s[0] : s[1]] for view in views.values()]), spans)
    rows = [[name, int(n), crc] for name, n, crc in zip(hashes, lengths, crcs, strict=True)]
    meta = {"format": FORMAT, "identity": json.dumps(identity, sort_keys=True), "rows": json.dumps(rows)}
    header = json.dumps({"__metadata__": meta, **layout.tensors(sum(lengths))}).encode()
    header += b" " * (-len(header) % 8)
    path = entry_path(folder, batch_key(hashes))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(path) as (temporary, file):
        file.write(struct.pack("<Q", len(header)) + header)
        for view in views.values():
            file.write(view.reshape(-1).data)
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(path)
        return file.tell()


def entry_path(folder: Path, key: str) -> Path:
    """Where the entry `key` lies: 256 sub-folders keep folders short."""
    return folder / key[:2] / f"{key}{SUFFIX}"


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A file beside `path`, held by a lock while its writer lives; gone afterwards unless it was renamed."""
    while True:
        temporary = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{TEMPORARY}")
        file = temporary.open("xb")
        with contextlib.suppress(OSError):  # a file system without locks: stale files then stay
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # another process took it for a stale one before it was locked
    try:
        yield temporary, file
    finally:
        temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what a full disk left in the buffer; the file is gone
            file.close()


def remove_stale(temporary: Path) -> None:
    """Remove a temporary file whose writer is dead: nobody holds its lock."""
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink(missing_ok=True)
    except OSError:  # somebody writes it, or the file system has no locks
        pass
    finally:
        os.close(fd)


def _crc(parts: Sequence[np.ndarray]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part.data, crc)
    return crc


def _bytes(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous [T, width] tensor as uint8 [T, bytes]."""
    return tensor.view(torch.uint8).numpy()
