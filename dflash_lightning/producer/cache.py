"""The hidden-state cache: finds, reads and stores produced batches in a folder that runs and processes share.

An entry is one produced batch, named by its rows' token ids in order (`cache_file`). A batch that is there under its
own name gives the very bits that the target gave; one whose rows all lie in other entries (another token budget, seed
or more data) is put together row by row and equals a fresh one up to rounding.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dflash_lightning.producer.cache_file import (
    SUFFIX,
    TEMPORARY,
    BadEntryError,
    StateLayout,
    StoredRow,
    batch_key,
    entry_path,
    read_header,
    read_rows,
    remove_stale,
    write_entry,
)


@dataclass(frozen=True)
class CacheConfig:
    """A cache as its users see it; travels to workers as JSON.

    Args:
        folder: `data.cache_dir`.
        identity: what the states depend on beside the token ids (target, layer ids, dtype, ...); plain JSON values.
        read_only: never write.
        limit_bytes: most bytes that `folder` may hold; None sets no limit.
        writers: processes that share what is left of the limit.
    """

    folder: str
    identity: dict[str, Any]
    read_only: bool = False
    limit_bytes: int | None = None
    writers: int = 1

    @property
    def home(self) -> Path:
        """The sub-folder of this identity."""
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode())
        return Path(self.folder) / digest.hexdigest()[:16]


def check_cache_options(folder: str | None, mode: str, limit_gb: float | None) -> None:
    """Raise ValueError for `data.cache_dir`, `data.cache_mode` and `data.cache_limit_gb` that make no sense."""
    if mode not in ("write-through", "read-only"):
        raise ValueError(f"data.cache_mode={mode!r}: 'write-through' or 'read-only'")
    if limit_gb is not None and not limit_gb > 0:
        raise ValueError(f"data.cache_limit_gb={limit_gb}: more than 0, in GB (10^9 bytes); null sets no limit")
    if folder is None and (limit_gb is not None or mode != "write-through"):
        option = f"data.cache_limit_gb={limit_gb}" if limit_gb is not None else f"data.cache_mode={mode}"
        raise ValueError(f"{option} needs data.cache_dir, the folder of the hidden-state cache")


def check_cache_folder(folder: Path, read_only: bool) -> None:
    """Make the cache's folder where it may be written.

    Raises:
        FileNotFoundError: a folder that is to be read does not exist.
        ValueError: it cannot be made or written.
    """
    if read_only:
        if not folder.is_dir():
            raise FileNotFoundError(f"data.cache_dir={folder}: no such folder; data.cache_mode=read-only makes none")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"data.cache_dir={folder}: cannot make this folder: {error}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"data.cache_dir={folder}: not writable; data.cache_mode=read-only uses what is there")


class StateCache:
    """One process's view of a cache. `find` may run beside `read` and `store`.

    Opening it in write-through mode removes what killed writers left behind.
    """

    def __init__(self, config: CacheConfig, layout: StateLayout) -> None:
        self.config = config
        self.layout = layout
        self.storing = not config.read_only
        self._home = config.home
        self._bad: set[Path] = set()
        self._index: _RowIndex | None = None
        self._left: float | None = None  # bytes of this process's share; None: not counted yet
        if self.storing:
            for path in _files(self._home, TEMPORARY):
                remove_stale(path)

    def is_empty(self) -> bool:
        """Whether there is no entry of this identity at all."""
        return next(_files(self._home, SUFFIX), None) is None

    def find(self, hashes: Sequence[str]) -> list[StoredRow] | None:
        """Where the states of a batch's rows lie; None unless all of them are there.

        Args:
            hashes: of the rows' token ids, in the batch's order.
        """
        path = entry_path(self._home, batch_key(hashes))
        exact = self._rows_of(path)
        if exact is not None:
            return exact
        if self._index is None:
            # What comes later, this process's own entries too, is found by exact name: whether a batch is exact must
            # not depend on which one was made before it.
            self._index = _RowIndex(self._home, self._rows_of)
        places = self._index.places(hashes)
        if places is None:
            return None
        headers: dict[Path, list[StoredRow] | None] = {}
        found = []
        for (file, number), name in zip(places, hashes, strict=True):
            if file not in headers:
                headers[file] = self._rows_of(file)
            rows = headers[file]
            if rows is None or number >= len(rows) or rows[number].hash != name:
                return None
            found.append(rows[number])
        return found

    def read(self, rows: Sequence[StoredRow], tensors: dict[str, Tensor]) -> None:
        """Read what `find` gave into `tensors`, each [T, width]. Raises BadEntryError; then call `discard`."""
        read_rows(rows, tensors)

    def discard(self, error: BadEntryError) -> None:
        """Say that an entry is unusable and never use it again; write-through removes it."""
        self._bad.add(error.path)
        print(f"hidden-state cache: {error.path} is made again: {error}", flush=True)
        if self.storing:
            try:
                error.path.unlink(missing_ok=True)
            except OSError:  # whoever owns it will see the same message
                pass

    def store(self, hashes: Sequence[str], lengths: Sequence[int], tensors: dict[str, Tensor]) -> None:
        """Store a batch; says so once and stores nothing more where there is no room for it.

        Args:
            hashes, lengths: of each row; length 0 marks a dropped row.
            tensors: name -> [T, width], T = sum of the lengths.
        """
        if not self.storing:
            return
        if not self._has_room(sum(lengths) * self.layout.token_bytes):
            return self._stop(f"data.cache_limit_gb={(self.config.limit_bytes or 0) / 1e9:g} is reached")
        try:
            written = write_entry(self._home, self.config.identity, self.layout, hashes, lengths, tensors)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            return self._stop("the disk is full" if full else f"writing failed: {error}")
        self._bad.discard(entry_path(self._home, batch_key(hashes)))
        if self._left is not None:
            self._left -= written

    def _stop(self, reason: str) -> None:
        self.storing = False
        used, free = used_bytes(self.config.folder) / 1e9, free_bytes(self.config.folder) / 1e9
        print(
            f"hidden-state cache: {reason}: {self.config.folder} holds {used:.3f} GB, its disk has {free:.3f} GB free. "
            "This process stores nothing more; training goes on, what is not there is made anew each time",
            flush=True,
        )

    def _has_room(self, needed: int) -> bool:
        """Each of the writers takes an equal share of what is left, and counts again when its share is used up."""
        limit = self.config.limit_bytes
        if limit is None:
            return True
        if self._left is None or self._left < needed:
            self._left = (limit - used_bytes(self.config.folder)) / self.config.writers
        return self._left >= needed

    def _rows_of(self, path: Path) -> list[StoredRow] | None:
        if path in self._bad:
            return None
        try:
            return read_header(path, self.config.identity, self.layout)
        except FileNotFoundError:
            return None
        except BadEntryError as error:
            self.discard(error)
            return None


class _RowIndex:
    """Row hash -> its place in some entry; 24 bytes a row."""

    def __init__(self, home: Path, rows_of: Any) -> None:
        self._files: list[Path] = []
        keys: list[NDArray[np.uint64]] = []
        for path in sorted(_files(home, SUFFIX)):
            rows = rows_of(path)
            if rows:
                self._files.append(path)
                keys.append(_short([row.hash for row in rows]))
        files = np.repeat(np.arange(len(keys)), [len(k) for k in keys])
        numbers = np.concatenate([np.arange(len(k)) for k in keys] or [np.zeros(0, np.int64)])
        flat = np.concatenate(keys or [np.zeros(0, np.uint64)])
        order = np.argsort(flat, kind="stable")
        self._keys, self._file, self._number = flat[order], files[order], numbers[order]

    def places(self, hashes: Sequence[str]) -> list[tuple[Path, int]] | None:
        """File and row number in it of each row; None unless all are known. The short key may be another row's."""
        keys = _short(hashes)
        at = np.searchsorted(self._keys, keys)
        if not len(self._keys) or (at == len(self._keys)).any() or (self._keys[at] != keys).any():
            return None
        return [(self._files[self._file[i]], int(self._number[i])) for i in at]


def _short(hashes: Sequence[str]) -> NDArray[np.uint64]:
    return np.array([int(name[:16], 16) for name in hashes], dtype=np.uint64)


def _files(home: Path, suffix: str) -> Iterator[Path]:
    """Files of an identity's folder with this ending."""
    for folder, _, names in os.walk(home):
        yield from (Path(folder, name) for name in names if name.endswith(suffix))


def used_bytes(folder: str) -> int:
    """Bytes in the files under `folder`; what vanishes meanwhile does not count."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_size  # noqa: PTH116, PTH118  a Path a file costs more
            except OSError:
                continue
    return total


def free_bytes(folder: str) -> int:
    """Free bytes of the disk that holds `folder`."""
    return shutil.disk_usage(folder).free
