"""Several ranks (gloo on the CPU): the same gradient however rows are split, the same end, no row lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SCRIPT = """
import json, sys
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from dflash_lightning import DFlashModule, HiddenStateDataModule
from dflash_lightning.callbacks import DrafterCheckpoint

options = json.loads(sys.argv[1])
torch.set_num_threads(1)


class Record(Callback):
    def __init__(self):
        self.rows = []
        self.syncs = None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not options.get("count_syncs"):
            return
        if batch_idx == 2:
            from tests.test_host_syncs import SyncCounter

            self.syncs = SyncCounter()
            self.syncs.__enter__()
        if batch_idx == 10:
            self.syncs.__exit__(None, None, None)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if options.get("fail_on") == trainer.global_rank and batch_idx == 3:
            raise RuntimeError("raised on purpose")
        self.rows.append(list(batch.row_ids))
        assert options.get("count_syncs") or torch.isfinite(outputs["loss"])

    def on_train_end(self, trainer, module):
        out = f"{options['out']}.{trainer.global_rank}"
        torch.save({n: p.detach().clone() for n, p in module.drafter.named_parameters()}, out + ".pt")
        with open(out + ".json", "w") as file:
            seen = self.syncs.seen if self.syncs else []
            json.dump({"rows": self.rows, "steps": trainer.global_step, "syncs": seen}, file)


if __name__ == "__main__":
    torch.manual_seed(0)
    optimizer = {"optimizer": lambda p: torch.optim.SGD(p, lr=1.0), "scheduler": None} if options.get("sgd") else {}
    module = DFlashModule(
        options["target"], num_layers=2, block_size=4, max_anchors=64, **optimizer, **options["model"]
    )
    data = HiddenStateDataModule(options["target"], **options["data"])
    ranks = options["ranks"]
    trainer = Trainer(
        accelerator="cpu", devices=ranks // options.get("nodes", 1), num_nodes=options.get("nodes", 1),
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=DDPStrategy(broadcast_buffers=False, process_group_backend="gloo") if ranks > 1 else "auto",
        num_sanity_val_steps=0, default_root_dir=options["out"],
        callbacks=[Record(), DrafterCheckpoint(options.get("every", 1))],
        **options["trainer"],
    )
    trainer.fit(module, datamodule=data, ckpt_path=options.get("ckpt"))
"""


@pytest.fixture
def run_ranks(tmp_path: Path, tiny_target: str) -> Callable[..., list[dict]]:
    """Run SCRIPT on so many ranks; for each rank its rows, steps and weights."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(name: str, ranks: int, train: str, *, data=None, trainer=None, model=None, **options) -> list[dict]:
        out = tmp_path / name
        options |= {"target": tiny_target, "ranks": ranks, "out": str(out), "model": model or {}}
        options["data"] = {"train": train, "max_seq_len": 64, "token_budget": 256, "num_buckets": 1, **(data or {})}
        options["trainer"] = trainer or {}
        done = subprocess.run(
            [sys.executable, str(script), json.dumps(options)],
            capture_output=True,
            text=True,
            timeout=170,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "DFLASH_TEST_RUN": str(os.getpid())},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        results = []
        for rank in range(ranks):
            result = json.loads(Path(f"{out}.{rank}.json").read_text())
            results.append(result | {"weights": torch.load(f"{out}.{rank}.pt", weights_only=True)})
        return results

    run.folder = tmp_path
    return run


@pytest.fixture
def four_rows(tmp_path: Path) -> str:
    """Rows with 2, 2, 5 and 5 supervised tokens: means over ranks or micro-batches would weigh them wrongly."""
    file = tmp_path / "rows.jsonl"
    generator = torch.Generator().manual_seed(1)
    lines = []
    for supervised in (2, 2, 5, 5):
        ids = torch.randint(4, 260, (8,), generator=generator).tolist()
        lines.append(json.dumps({"input_ids": ids, "loss_mask": [0] * (8 - supervised) + [1] * supervised}))
    file.write_text("\n".join(lines))
    return str(file)


@pytest.mark.parametrize("weights", ["decay", pytest.param("dpace", marks=pytest.mark.slow)])
def test_a08_gradient_does_not_depend_on_how_rows_are_split(run_ranks, four_rows: str, weights: str) -> None:
    one_step = {"max_steps": 1}
    common = {"sgd": True, "model": {"weights": weights}}
    whole = run_ranks("whole", 1, four_rows, trainer=one_step, **common)[0]
    single = {"token_budget": 8, "max_seq_len": 8}
    split = {"max_steps": 1, "accumulate_grad_batches": 4}
    accumulated = run_ranks("accumulated", 1, four_rows, data=single, trainer=split, **common)[0]
    split = {"max_steps": 1, "accumulate_grad_batches": 2}
    ranks = run_ranks("ranks", 2, four_rows, data=single, trainer=split, **common)
    assert [len(r) for r in whole["rows"]] == [4]
    assert [len(r) for r in accumulated["rows"]] == [1, 1, 1, 1]
    assert sorted(r for rank in ranks for batch in rank["rows"] for r in batch) == [0, 1, 2, 3]
    moved = float((whole["weights"]["norm.weight"] - 1).abs().max())
    assert moved > 0
    for other in (accumulated, *ranks):
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(other["weights"][name], weight, atol=1e-5 * moved, rtol=0, msg=name)


def test_two_ranks_wait_for_nothing_but_the_throttled_sigterm_check(run_ranks, write_chats: Callable[..., str]) -> None:
    trainer = {"max_steps": 12, "log_every_n_steps": 1000}
    results = run_ranks(
        "run", 2, write_chats(60), data={"token_budget": 128}, trainer=trainer, count_syncs=True, every=1000
    )
    for result in results:
        assert all("sigterm.py" in seen for seen in result["syncs"]), "\n".join(result["syncs"])
        assert len(result["syncs"]) <= 4, "not before every batch"


def test_a_step_without_any_anchor_moves_no_rank(run_ranks, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([json.dumps({"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 0]})] * 2))
    data = {"token_budget": 4, "max_seq_len": 4}
    ranks = run_ranks("two", 2, str(file), data=data, trainer={"max_steps": 1})
    torch.manual_seed(0)
    for rank in ranks:
        assert torch.equal(rank["weights"]["norm.weight"], torch.ones(32)), "weight decay alone would move it"
        assert torch.equal(rank["weights"]["fc.weight"], ranks[0]["weights"]["fc.weight"])


@pytest.mark.parametrize(
    "ranks_after", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_e12_e18_resume_at_another_world_size(run_ranks, write_chats: Callable[..., str], ranks_after: int) -> None:
    train = write_chats(24)
    data = {"target_devices": ["cpu"], "token_budget": 64, "queue_depth": 4}
    first = run_ranks("first", 2, train, data=data, trainer={"max_steps": 3})
    seen = [r for rank in first for batch in rank["rows"] for r in batch]
    ckpt = str(Path(run_ranks.folder) / "first" / "checkpoints" / "last.ckpt")
    options = {"trainer": {"max_epochs": 1}, "ckpt": ckpt}
    rest = run_ranks("rest", ranks_after, train, data=data, **options)
    seen += [r for rank in rest for batch in rank["rows"] for r in batch]
    assert sorted(seen) == list(range(24)), "no row lost, none repeated"
    assert len({rank["steps"] for rank in rest}) == 1


@pytest.mark.slow
def test_two_nodes_each_feed_their_own_ranks(run_ranks, write_chats: Callable[..., str], tiny_target: str) -> None:
    """torchrun with two nodes on this machine, two ranks each."""
    script = run_ranks.folder / "train.py"
    out = run_ranks.folder / "nodes"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = {"train": write_chats(20), "max_seq_len": 64, "token_budget": 64, "num_buckets": 1}
    data |= {"target_devices": ["cpu"], "queue_depth": 3}
    options = {"target": tiny_target, "ranks": 4, "nodes": 2, "out": str(out), "model": {}, "data": data}
    options["trainer"] = {"max_epochs": 1}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}",
             "--master-addr=127.0.0.1", f"--master-port={port}", str(script), json.dumps(options)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    for node in nodes:
        output = node.communicate(timeout=170)[0]
        assert node.returncode == 0, output
    results = [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(4)]
    assert sorted(r for result in results for batch in result["rows"] for r in batch) == list(range(20))
    assert len({result["steps"] for result in results}) == 1


@pytest.mark.parametrize("who", [0, 1])
def test_e17_an_exception_in_a_rank_ends_all(run_ranks, write_chats: Callable[..., str], who: int) -> None:
    data = {"target_devices": ["cpu", "cpu"], "token_budget": 64}
    started = time.monotonic()
    with pytest.raises(AssertionError, match="raised on purpose"):
        run_ranks("run", 2, write_chats(40), data=data, trainer={"max_steps": 10_000}, fail_on=who)
    assert time.monotonic() - started < 60
    mine = str(run_ranks.folder)
    deadline = time.monotonic() + 10
    while (left := _commands(mine) + _commands("producer.worker")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def _commands(text: str) -> list[str]:
    """Command lines of running processes that hold `text` and belong to this test run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (process / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in command and f"DFLASH_TEST_RUN={os.getpid()}" in environment:
            found.append(command)
    return found


@pytest.mark.parametrize("target_devices", [[], ["cpu", "cpu"]], ids=["inline", "pool"])
def test_e05_ranks_stop_together_and_lose_no_row(run_ranks, write_chats: Callable[..., str], target_devices) -> None:
    options = {"data": {"target_devices": target_devices, "token_budget": 64}, "trainer": {"max_epochs": 1}}
    ranks = run_ranks("run", 2, write_chats(9), **options)
    assert ranks[0]["steps"] == ranks[1]["steps"] == len(ranks[0]["rows"]) == len(ranks[1]["rows"])
    rows = [r for rank in ranks for batch in rank["rows"] for r in batch]
    assert sorted(rows) == list(range(9))
    assert all(torch.equal(w, ranks[1]["weights"][n]) for n, w in ranks[0]["weights"].items())


def test_e06_a_rank_without_any_anchor_takes_part(run_ranks, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 1, 1, 1]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 0]},
    ]
    file.write_text("\n".join(json.dumps(r) for r in rows))
    data = {"token_budget": 4, "max_seq_len": 4}
    with_empty = run_ranks("two", 2, str(file), data=data, trainer={"max_steps": 1}, sgd=True)
    alone = run_ranks(
        "one", 1, str(file), data={"token_budget": 8, "max_seq_len": 4}, trainer={"max_steps": 1}, sgd=True
    )
    for name, weight in alone[0]["weights"].items():
        torch.testing.assert_close(with_empty[0]["weights"][name], weight, atol=1e-6, rtol=1e-5)
