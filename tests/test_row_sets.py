"""Train and validation rows of a run: prepared once, divided by prompt, left out where they cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_lightning.data import load_rows
from dflash_lightning.row_sets import RowSets


def chat(number: int, answer: str = "red green blue") -> dict:
    return {"messages": [{"role": "user", "content": f"colour {number}"}, {"role": "assistant", "content": answer}]}


def write(file: Path, chats: list[dict]) -> str:
    file.write_text("".join(json.dumps(c) + "\n" for c in chats))
    return str(file)


def row_sets(target: str, train: list[str], **options) -> RowSets:
    return RowSets(
        **{
            "target": target, "train": train, "val": [], "max_seq_len": 128, "min_supervised_tokens": 2,
            "trust_remote_code": False, **options,
        }
    )  # fmt: skip


def sides(sets: RowSets) -> dict[str, set[tuple[int, ...]]]:
    """The rows of each set, as ids."""
    found = {}
    for name, folder in sets.ensure().items():
        ids = load_rows(folder)["input_ids"]
        found[name] = {tuple(ids[int(row)]) for row in np.flatnonzero(sets.load(name, folder, None).lengths)}
    return found


def test_a_fraction_divides_the_rows_of_one_folder(tiny_target: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [chat(i) for i in range(200)])
    sets = row_sets(tiny_target, [file], val_fraction=0.2)
    folders = sets.ensure()
    assert folders["train"] == folders["val"]
    lengths = {name: sets.load(name, folder, None).lengths for name, folder in folders.items()}
    whole = row_sets(tiny_target, [file]).load("train", folders["train"], None).lengths
    assert ((lengths["train"] > 0) ^ (lengths["val"] > 0)).all()
    assert (lengths["train"] + lengths["val"] == whole).all()
    assert 20 <= (lengths["val"] > 0).sum() <= 60


def test_a_row_stays_on_its_side_when_rows_are_added_and_moved(tiny_target: str, tmp_path: Path) -> None:
    chats = [chat(i) for i in range(100)]
    few = sides(row_sets(tiny_target, [write(tmp_path / "a.jsonl", chats)], val_fraction=0.3))
    files = [
        write(tmp_path / "b.jsonl", [chat(i) for i in range(300, 400)] + chats[:30:-1]),
        write(tmp_path / "c.jsonl", chats[:31]),
    ]
    many = sides(row_sets(tiny_target, files, val_fraction=0.3))
    assert few["val"] < many["val"]
    assert few["train"] < many["train"]


def test_answers_to_one_prompt_and_repeated_records_stay_together(tiny_target: str, tmp_path: Path) -> None:
    chats = [chat(i, answer) for i in range(60) for answer in ("red", "green blue", "blue blue red")]
    sets = row_sets(tiny_target, [write(tmp_path / "a.jsonl", chats)], val_fraction=0.5, train_weights=[2.0])
    folder = sets.ensure()["train"]
    val = sets.load("val", folder, None).lengths > 0
    assert val.reshape(60, 6).any(1).tolist() == val.reshape(60, 6).all(1).tolist()
    assert 0 < val.sum() < len(val)


@pytest.mark.parametrize(("fraction", "name", "side"), [(1e-9, "val", "validation"), (1 - 1e-9, "train", "training")])
def test_an_empty_side_is_named(tiny_target: str, tmp_path: Path, fraction: float, name: str, side: str) -> None:
    file = write(tmp_path / "a.jsonl", [chat(1, "red"), chat(1, "blue"), chat(2)])
    sets = row_sets(tiny_target, [file], val_fraction=fraction)
    folder = sets.ensure()["train"]
    with pytest.raises(
        ValueError, match=rf"data\.val_fraction={fraction}: no row is left for {side}; .* 3 usable rows of 2"
    ):
        sets.load(name, folder, None)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 20.0, float("nan")])
def test_fractions_out_of_range(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"data\.val_fraction={fraction}: a share"):
        row_sets("none", ["a.jsonl"], val_fraction=fraction)


def test_val_and_fraction_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"data\.val=\['b\.jsonl'\] and data\.val_fraction=0\.1"):
        row_sets("none", ["a.jsonl"], val=["b.jsonl"], val_fraction=0.1)


def test_weights_make_another_folder_and_bad_ones_are_named(tiny_target: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [chat(i) for i in range(20)])
    plain = row_sets(tiny_target, [file]).ensure()["train"]
    twice = row_sets(tiny_target, [file], train_weights=[2.0]).ensure()["train"]
    assert (len(load_rows(plain)), len(load_rows(twice))) == (20, 40)
    with pytest.raises(ValueError, match=r"data\.train_weights holds 2 weights for 1 entries of data\.train"):
        row_sets(tiny_target, [file], train_weights=[1.0, 1.0]).ensure()


def test_folder_of_an_older_version(tiny_target: str, tmp_path: Path) -> None:
    folder = row_sets(tiny_target, [write(tmp_path / "a.jsonl", [chat(i) for i in range(5)])]).ensure()["train"]
    report = Path(folder) / "report.json"
    report.write_text(report.read_text().replace('"format_version": 2', '"format_version": 1'))
    with pytest.raises(
        ValueError, match="has format version 1, this version of dflash-lightning reads 2; prepare it again"
    ):
        row_sets(tiny_target, [folder]).ensure()


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_fit_trains_and_validates_on_the_two_sides(make_run, write_chats) -> None:
    trained: set[int] = set()
    validated: set[int] = set()

    def run(seed: int) -> None:
        from lightning.pytorch import Callback

        class Seen(Callback):
            def on_train_batch_start(self, trainer, module, batch, index) -> None:
                trained.update(batch.row_ids)

            def on_validation_batch_start(self, trainer, module, batch, index, dataloader_idx=0) -> None:
                validated.update(batch.row_ids)

        trainer, module, data = make_run(
            write_chats(60), callbacks=[Seen()], run=f"run{seed}", trainer_max_steps=-1, trainer_max_epochs=1,
            data_val_fraction=0.25, data_seed=seed,
        )  # fmt: skip
        trainer.fit(module, data)

    run(0)
    first = set(validated)
    assert trained | first == set(range(60))
    assert not trained & first
    run(1)
    assert validated == first
    assert not trained & first
