"""Drafters as the start of a new training: both layouts, checkpoints, and what is refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_lightning import DFlashModule
from dflash_lightning.callbacks import DrafterCheckpoint, find_last_checkpoint
from dflash_lightning.drafter.export import export_drafter
from dflash_lightning.drafter.weights import load_drafter


@pytest.fixture
def trained(make_run, write_chats, tmp_path: Path) -> Path:
    """Checkpoint of a short real training."""
    trainer, module, data = make_run(
        write_chats(16), callbacks=[DrafterCheckpoint(dirpath=str(tmp_path / "ckpt"))], trainer_max_steps=2
    )
    trainer.fit(module, datamodule=data)
    found = find_last_checkpoint(tmp_path / "ckpt")
    assert found is not None
    return found


def test_foreign_files_among_the_checkpoints_are_passed_over(trained: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, trained.parent / "other.ckpt")
    torch.save(torch.zeros(2), trained.parent / "tensor.ckpt")
    with zipfile.ZipFile(trained.parent / "photos.ckpt", "w") as archive:
        archive.writestr("a.txt", "no checkpoint")
    (trained.parent / "notes.ckpt").write_text("nothing")
    assert find_last_checkpoint(trained.parent) == trained


def test_both_layouts_start_a_new_training_without_loss(trained: Path, tiny_target: str, make_run, write_chats) -> None:
    for fmt in ("hf", "speculators"):
        first = export_drafter(trained, trained.parent / f"first-{fmt}", fmt).folder
        module = DFlashModule(tiny_target, num_layers=2, block_size=4, init_from=str(first))
        assert {p.dtype for p in module.drafter.parameters()} == {torch.float32}
        stored = load_file(first / "model.safetensors")
        for name, value in module.drafter.state_dict().items():
            assert torch.equal(value, stored[name].float()), name
        # A checkpoint of that module, before any step, exports to the same bytes.
        checkpoint = {"state_dict": {f"drafter.{k}": v for k, v in module.drafter.state_dict().items()}}
        module.on_save_checkpoint(checkpoint)
        file = trained.parent / "again.ckpt"
        torch.save(checkpoint, file)
        again = export_drafter(file, trained.parent / f"again-{fmt}", fmt).folder
        assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
        ours, theirs = (json.loads((f / "config.json").read_text()) for f in (first, again))
        assert ours.pop("dflash_lightning")["steps"] == 2
        theirs.pop("dflash_lightning")
        assert ours == theirs


def test_a_checkpoint_loads_as_it_is(trained: Path) -> None:
    drafter = load_drafter(trained)
    saved = torch.load(trained, weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[f"drafter.{name}"]) for name, value in drafter.state_dict().items())


def test_init_from_another_drafter_is_refused_by_field(trained: Path, tiny_target: str) -> None:
    out = export_drafter(trained, trained.parent / "out").folder
    with pytest.raises(ValueError, match=r"model.init_from.*target_layer_ids \(\[1, 5\] there, \[0, 5\] here\)"):
        DFlashModule(tiny_target, num_layers=2, block_size=4, target_layer_ids=[0, 5], init_from=str(out))
    with pytest.raises(ValueError, match=r"model.init_from.*num_hidden_layers \(2 there, 1 here\)"):
        DFlashModule(tiny_target, num_layers=1, block_size=4, init_from=str(out))


def test_the_layout_of_released_drafters_loads(make_drafter, trained: Path) -> None:
    """z-lab's configs lack `dflash_config.block_size` and ours; some engines want embedding and head beside."""
    out = export_drafter(trained, trained.parent / "out").folder
    fields = json.loads((out / "config.json").read_text())
    del fields["dflash_lightning"], fields["dflash_config"]["block_size"], fields["dflash_config"]["sliding_causal"]
    fields |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(fields))
    drafter = load_drafter(out)
    assert drafter.config.block_size == 4
    assert drafter.mask_kinds() == [(None, False)]


@pytest.mark.parametrize("where", ["nowhere", "empty", "half"])
def test_what_is_no_drafter_is_refused_by_name(tmp_path: Path, where: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=where):
        load_drafter(tmp_path / where)
