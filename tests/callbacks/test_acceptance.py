"""AcceptanceCallback: real decoding while training, for TensorBoard and ModelCheckpoint, with no effect on training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from dflash_lightning.callbacks import AcceptanceCallback
from dflash_lightning.drafter.config import target_layer_ids
from dflash_lightning.drafter.decoding import SamplingOptions
from dflash_lightning.prompts import read_prompts
from dflash_lightning.speculative import SpeculativeDecoder, check_decodable
from tests.conftest import read_scalars


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("colour 1\ncolour 2\ncolour 3\n")
    return str(file)


def test_figures_are_those_of_decoding_with_the_drafter_at_that_step(
    make_run, write_chats, prompts: str, tmp_path: Path, tiny_target: str
) -> None:
    callback = AcceptanceCallback(prompts, every_n_steps=2, max_new_tokens=12, max_prompts=2)
    trainer, module, data = make_run(write_chats(16), callbacks=[callback], trainer_max_steps=4)
    trainer.fit(module, datamodule=data)
    scalars = read_scalars(tmp_path / "run")
    names = ["acceptance/tau", "acceptance/gap_to_teacher_forced", *(f"acceptance/slot_{k}" for k in (1, 2, 3))]
    assert sorted(n for n in scalars if n.startswith("acceptance/")) == sorted(names)
    assert all([step for step, _ in scalars[name]] == [2, 4] for name in names)

    decoder = SpeculativeDecoder(tiny_target, target_layer_ids(module.drafter.config))
    report = decoder.compare(
        module.drafter, read_prompts(prompts)[:2], SamplingOptions(12, stop_ids=decoder.stop_ids), progress=False
    )
    assert report.lossless
    assert scalars["acceptance/tau"][-1][1] == pytest.approx(report.acceptance_length, rel=1e-5)
    for k, share in enumerate(report.acceptance_by_slot, start=1):
        assert scalars[f"acceptance/slot_{k}"][-1][1] == pytest.approx(share, abs=1e-6)


def test_the_batch_size_changes_no_figure(make_run, write_chats, prompts: str, tmp_path: Path) -> None:
    figures = []
    for size in (1, 2, 8):
        callback = AcceptanceCallback(prompts, every_n_steps=2, max_new_tokens=12, batch_size=size)
        trainer, module, data = make_run(
            write_chats(16), callbacks=[callback], run=f"run{size}", trainer_max_steps=2, model_block_size=3
        )
        trainer.fit(module, datamodule=data)
        scalars = read_scalars(tmp_path / f"run{size}")
        figures.append({name: value for name, value in scalars.items() if name.startswith("acceptance/")})
    assert figures[0] == figures[1] == figures[2]


def test_training_is_the_same_with_and_without(make_run, write_chats, prompts: str) -> None:
    weights = []
    for callbacks in ([], [AcceptanceCallback(prompts, every_n_steps=1, max_new_tokens=4, max_prompts=1)]):
        trainer, module, data = make_run(
            write_chats(16), callbacks=callbacks, run=f"run{len(weights)}", trainer_max_steps=3
        )
        trainer.fit(module, datamodule=data)
        weights.append(module.drafter.state_dict())
        assert all(p.requires_grad for p in module.drafter.parameters())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_it_drives_model_checkpoint(make_run, write_chats, prompts: str, tmp_path: Path, monkeypatch) -> None:
    """The best of several measurements is kept, not the newest."""
    taus = iter([1.5, 2.5, 2.0])
    callback = AcceptanceCallback(prompts, every_n_steps=2)
    monkeypatch.setattr(callback, "_measure", lambda module, device: {"acceptance/tau": next(taus)})
    best = ModelCheckpoint(
        dirpath=tmp_path / "best", monitor="acceptance/tau", mode="max", every_n_train_steps=2, filename="{step}"
    )
    trainer, module, data = make_run(write_chats(16), callbacks=[callback, best], trainer_max_steps=6)
    trainer.fit(module, datamodule=data)
    assert [p.name for p in (tmp_path / "best").iterdir()] == ["step=4.ckpt"]
    assert float(best.best_model_score) == 2.5  # pyright: ignore[reportArgumentType]


def test_accumulation_measures_once_a_step(make_run, write_chats, prompts: str, monkeypatch) -> None:
    callback = AcceptanceCallback(prompts, every_n_steps=1)
    calls = []
    monkeypatch.setattr(callback, "_measure", lambda *_: calls.append(1) or {"acceptance/tau": 1.0})
    trainer, module, data = make_run(
        write_chats(24), callbacks=[callback], trainer_max_steps=2, trainer_accumulate_grad_batches=2
    )
    trainer.fit(module, datamodule=data)
    assert len(calls) == 2


def test_the_time_limit_ends_a_measurement(make_run, write_chats, prompts: str) -> None:
    callback = AcceptanceCallback(prompts, every_n_steps=1, max_new_tokens=4, max_seconds=1e-9, batch_size=1)
    trainer, module, data = make_run(write_chats(8), callbacks=[callback], trainer_max_steps=1)
    with pytest.warns(UserWarning, match="1 of 3 prompts"):
        trainer.fit(module, datamodule=data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0"),
        ({"max_seconds": 0}, "max_seconds=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"prompts": "nowhere.txt"}, "prompts=nowhere.txt"),
        ({"num_speculative_tokens": 4}, "num_speculative_tokens=4"),
    ],
)
def test_wrong_options_are_refused_before_training(make_run, write_chats, prompts: str, options, message) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):  # noqa: PT012
        callback = AcceptanceCallback(**{"prompts": prompts, **options})
        trainer, module, data = make_run(write_chats(8), callbacks=[callback])
        trainer.fit(module, datamodule=data)


def test_a_target_that_cannot_take_tokens_back_is_refused_before_training(tmp_path: Path, tiny_target: str) -> None:
    from transformers import AutoTokenizer, Qwen3_5TextConfig

    AutoTokenizer.from_pretrained(tiny_target).save_pretrained(tmp_path)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
    Qwen3_5TextConfig(**sizes, num_hidden_layers=4, num_key_value_heads=1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # no weight of it is read
    with pytest.raises(ValueError, match=r"Qwen3_5ForCausalLM.*linear_attention"):
        check_decodable(str(tmp_path), [1])


SCRIPT = """
import json, sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from dflash_lightning import DFlashModule, HiddenStateDataModule
from dflash_lightning.callbacks import AcceptanceCallback

options = json.loads(sys.argv[1])
torch.set_num_threads(1)


class Acceptance(AcceptanceCallback):
    def _measure(self, module, device):
        assert module.trainer.is_global_zero
        if options["fail"]:
            raise ValueError("raised on purpose")
        return super()._measure(module, device)


if __name__ == "__main__":
    torch.manual_seed(0)
    best = ModelCheckpoint(options["out"], "{step}", monitor="acceptance/tau", mode="max", every_n_train_steps=2)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(broadcast_buffers=False, process_group_backend="gloo"),
        logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, max_steps=4,
        default_root_dir=options["out"],
        callbacks=[Acceptance(options["prompts"], every_n_steps=2, max_new_tokens=6, max_prompts=2), best],
    )
    module = DFlashModule(options["target"], num_layers=2, block_size=4, max_anchors=16)
    data = HiddenStateDataModule(options["target"], train=options["train"], token_budget=128, max_seq_len=64)
    try:
        trainer.fit(module, datamodule=data)
    finally:
        with open(f"{options['out']}.{trainer.global_rank}.json", "w") as file:
            json.dump({n: float(v) for n, v in trainer.callback_metrics.items() if "acceptance/" in n}, file)
"""


@pytest.mark.parametrize("fail", [False, True])
def test_e08_two_ranks_end_together(fail: bool, tmp_path: Path, write_chats, prompts: str, tiny_target: str) -> None:
    """Rank 0 alone decodes: both ranks get its figures, and its error ends both at once."""
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    options = {"fail": fail, "out": str(out), "prompts": prompts, "target": tiny_target, "train": write_chats(32)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    if fail:
        assert done.returncode != 0
        assert "ValueError: raised on purpose" in done.stderr
        assert time.monotonic() - started < 120, "the process group's timeout is 30 minutes"
        return
    assert done.returncode == 0, done.stderr
    figures = [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in (0, 1)]
    assert figures[0] == figures[1]
    assert figures[0]["acceptance/tau"] >= 1.0
    assert len(list(out.glob("step=*.ckpt"))) == 1
