"""Which targets share cached hidden states: contents count, places do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from dflash_lightning.producer import identity
from dflash_lightning.producer.identity import target_identity


@pytest.fixture
def copy(tiny_target: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "copy"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def edit_config(folder: Path, **entries) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


def test_a_copy_is_the_same_target_and_another_weight_is_not(tiny_target: str, copy: Path) -> None:
    (copy / "README.md").write_text("a card")
    edit_config(copy, _name_or_path="elsewhere", transformers_version="0")
    assert target_identity(str(copy)) == target_identity(tiny_target)
    flip(copy / "model.safetensors", 90_000)
    assert target_identity(str(copy)) != target_identity(tiny_target)


def test_the_config_counts(tiny_target: str, copy: Path) -> None:
    edit_config(copy, rms_norm_eps=1e-3)
    assert target_identity(str(copy)) != target_identity(tiny_target)


def test_every_shard_counts(tiny_target: str, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tiny_target).save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    before = target_identity(str(folder))
    for shard in shards:
        flip(shard, -1)
        changed = target_identity(str(folder))
        assert changed != before
        before = changed


def test_of_a_large_file_every_tensor_counts(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_WHOLE_BYTES", 0)
    file = copy / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:start])
    before = target_identity(str(copy))
    for name in ("model.embed_tokens.weight", "model.layers.7.mlp.down_proj.weight", "lm_head.weight"):
        flip(file, start + tensors[name]["data_offsets"][0])
        assert target_identity(str(copy)) != before, name
        file.write_bytes(content)
    assert target_identity(str(copy)) == before


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_a_hub_name_is_what_its_files_are(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: str
) -> None:
    from transformers.utils import hub

    repo = tmp_path / "hub" / "models--some--target"
    snapshot = repo / "snapshots" / "abc"
    AutoModelForCausalLM.from_pretrained(tiny_target).save_pretrained(snapshot, max_shard_size=shard_size)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert target_identity("some/target") == target_identity(str(snapshot))
