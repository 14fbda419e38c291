"""`dflash export`: what engines need, field faults F1-F5, atomic writing, the lossless way back."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, LlamaConfig, Qwen3Config

from dflash_lightning.cli import main
from dflash_lightning.drafter.attention import dense_mask
from dflash_lightning.drafter.config import build_draft_config
from dflash_lightning.drafter.export import FILES, check_export, export_drafter
from dflash_lightning.drafter.layout import make_block_layout
from dflash_lightning.drafter.layouts import REQUIRED
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.weights import load_drafter

SLIDING = {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 6}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def save_checkpoint(drafter: DFlashDraftModel, file: Path, **saved) -> Path:
    """A Lightning checkpoint as DFlashModule writes it, without the optimizer."""
    checkpoint = {
        "state_dict": {f"drafter.{k}": v for k, v in drafter.state_dict().items()},
        "dflash_lightning": {"draft_config": drafter.config.to_diff_dict(), "target": "org/target", **saved},
        "global_step": 7,
        "epoch": 1,
    }
    partial = file.with_suffix(".partial")
    torch.save(checkpoint, partial)
    partial.replace(file)
    return file


@pytest.fixture
def checkpoint(make_drafter, tmp_path: Path) -> Path:
    return save_checkpoint(make_drafter(), tmp_path / "step=7.ckpt")


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# Field faults.


@pytest.mark.parametrize("fmt", ["hf", "speculators"])
@pytest.mark.parametrize("causal", [True, False])
def test_f01_sliding_layers_stay_sliding(make_drafter, make_batch, tmp_path: Path, fmt: str, causal: bool) -> None:
    drafter = make_drafter(sliding_causal=causal, **SLIDING)
    file = save_checkpoint(drafter, tmp_path / "a.ckpt")
    out = export_drafter(file, tmp_path / "out", fmt, dtype="float32").folder
    layer = config_of(out)["transformer_layer_config"] if fmt == "speculators" else config_of(out)
    assert layer["layer_types"] == SLIDING["layer_types"]
    assert layer["sliding_window"] == 6
    assert layer["use_sliding_window"] is True
    loaded = load_drafter(out)
    assert loaded.mask_kinds() == drafter.mask_kinds() == [(6, causal)]
    layout = make_block_layout(make_batch([30, 20]))
    for ours, theirs in zip(drafter.mask_kinds(), loaded.mask_kinds(), strict=True):
        assert torch.equal(dense_mask(layout, *ours), dense_mask(layout, *theirs))


@pytest.mark.parametrize("fmt", ["hf", "speculators"])
def test_f01_a_window_shorter_than_a_block_is_refused(make_drafter, tmp_path: Path, fmt: str) -> None:
    file = save_checkpoint(make_drafter(**SLIDING), tmp_path / "a.ckpt")
    out = export_drafter(file, tmp_path / "out", fmt).folder
    fields = config_of(out)
    fields.get("transformer_layer_config", fields)["sliding_window"] = 3
    (out / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"sliding_window=3.*block_size=4"):
        load_drafter(out)


def test_f01_engines_are_told_the_causality_of_the_block(make_drafter, tmp_path: Path) -> None:
    """As vLLM 0.32 resolves it: `causal` for all layers, else sliding layers are causal; speculators has one flag."""
    expected = {  # layers, causal sliding -> dflash_config.causal, sliding_window_non_causal
        ("full", True): (None, True),
        ("sliding", True): (None, False),
        ("sliding", False): (False, True),
        ("mixed", True): (None, "refused"),
        ("mixed", False): (False, True),
    }
    kinds = {"full": {}, "sliding": SLIDING, "mixed": MIXED}
    for (kind, causal), (hf, speculators) in expected.items():
        file = save_checkpoint(make_drafter(sliding_causal=causal, **kinds[kind]), tmp_path / "a.ckpt")
        assert config_of(export_drafter(file, tmp_path / "hf").folder)["dflash_config"].get("causal") is hf
        if speculators == "refused":
            with pytest.raises(ValueError, match=r"--format speculators.*--format hf"):
                export_drafter(file, tmp_path / "sp", "speculators")
        else:
            fields = config_of(export_drafter(file, tmp_path / "sp", "speculators").folder)
            assert fields["sliding_window_non_causal"] is speculators


def targets() -> dict:
    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 8,
    }  # fmt: skip
    return {
        "untied": LlamaConfig(**sizes, tie_word_embeddings=False),
        "tied": Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True),
        "nested": Gemma3Config(text_config={**sizes, "head_dim": 16}, vision_config={"num_hidden_layers": 1}),
    }


@pytest.mark.parametrize("fmt", ["hf", "speculators"])
@pytest.mark.parametrize("kind", ["untied", "tied", "nested"])
def test_f02_no_stray_head_no_nan_and_the_dtype_asked_for(tmp_path: Path, kind: str, fmt: str) -> None:
    config = build_draft_config(targets()[kind], num_layers=2, block_size=4, mask_token_id=95)
    file = save_checkpoint(DFlashDraftModel(config), tmp_path / "a.ckpt")
    out = export_drafter(file, tmp_path / "out", fmt).folder
    tensors = load_file(out / "model.safetensors")
    assert set(tensors) == set(DFlashDraftModel(config).state_dict()), "neither embedding nor head"
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert all(torch.isfinite(t).all() for t in tensors.values())
    fields = config_of(out)
    assert fields["dtype"] == "bfloat16"
    assert fields.get("transformer_layer_config", fields)["tie_word_embeddings"] is False


def test_f02_values_that_the_dtype_cannot_hold_are_refused(make_drafter, tmp_path: Path) -> None:
    drafter = make_drafter()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 1e5
    file = save_checkpoint(drafter, tmp_path / "a.ckpt")
    export_drafter(file, tmp_path / "bf16")
    with pytest.raises(ValueError, match=r"fc.weight is not finite in torch.float16"):
        export_drafter(file, tmp_path / "fp16", dtype="float16")
    assert not (tmp_path / "fp16").exists()


def test_f03_the_whole_vocabulary_needs_no_maps_and_maps_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    out = export_drafter(checkpoint, tmp_path / "out", "speculators").folder
    tensors = load_file(out / "model.safetensors")
    assert not {"d2t", "t2d"} & set(tensors)
    assert config_of(out)["draft_vocab_size"] == config_of(out)["transformer_layer_config"]["vocab_size"] == 96
    save_file({**tensors, "d2t": torch.zeros(48, dtype=torch.int64)}, out / "model.safetensors")
    with pytest.raises(ValueError, match="d2t"):
        load_drafter(out)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({**config_of(out), "draft_vocab_size": 48}))
    with pytest.raises(ValueError, match="draft_vocab_size=48"):
        load_drafter(out)


def test_f04_golden_config_of_each_layout(checkpoint: Path, tmp_path: Path) -> None:
    layer = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None, "head_dim": 16,
        "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48,
        "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 32768, "max_window_layers": 2,
        "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "pad_token_id": None, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0,
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
        "vocab_size": 96,
    }  # fmt: skip
    common = {
        "architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 8, "dtype": "bfloat16",
        "dflash_lightning": {"epoch": 1, "rope_style": "neox", "steps": 7, "target": "org/target"},
    }  # fmt: skip
    dflash = {"block_size": 4, "mask_token_id": 95, "sliding_causal": True, "target_layer_ids": [1, 4]}
    assert config_of(export_drafter(checkpoint, tmp_path / "hf").folder) == {
        **layer, **common, "dflash_config": dflash,
    }  # fmt: skip
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    assert config_of(export_drafter(checkpoint, tmp_path / "sp", "speculators").folder) == {
        **common, "speculators_model_type": "dflash", "speculators_version": "0.5.0", "mask_token_id": 95,
        "aux_hidden_state_layer_ids": [2, 5], "draft_vocab_size": 96, "target_hidden_size": 32,
        "sliding_window_non_causal": True, "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "dflash", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"architectures": [], "name_or_path": "org/target"},
        },
    }  # fmt: skip


def test_f04_two_block_sizes_are_refused_and_one_suffices(checkpoint: Path, tmp_path: Path) -> None:
    out = export_drafter(checkpoint, tmp_path / "out").folder
    fields = config_of(out)
    assert fields["block_size"] == fields["dflash_config"]["block_size"] == 4
    (out / "config.json").write_text(json.dumps({**fields, "block_size": 16}))
    with pytest.raises(ValueError, match=r"block_size.*\[4, 16\]"):
        load_drafter(out)
    fields.pop("block_size")
    (out / "config.json").write_text(json.dumps(fields))
    assert load_drafter(out).config.block_size == 4


@pytest.mark.parametrize("fmt", ["hf", "speculators"])
def test_f05_trained_length_and_rotary_style_are_recorded(make_drafter, tmp_path: Path, fmt: str) -> None:
    file = save_checkpoint(make_drafter(), tmp_path / "a.ckpt", trained_max_length=512)
    done = export_drafter(file, tmp_path / "out", fmt)
    own = config_of(done.folder)["dflash_lightning"]
    assert own["trained_max_length"] == 512
    assert own["rope_style"] == "neox"
    assert any("512" in note and "32768" in note for note in done.notes)
    assert "texts of up to 512 tokens" in (done.folder / "README.md").read_text()
    long = export_drafter(file, tmp_path / "long", fmt, trained_max_length=32768)
    assert not any("trained on texts" in note for note in long.notes)
    fields = config_of(done.folder)
    fields["dflash_lightning"]["rope_style"] = "interleaved"
    (done.folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="rotary"):
        load_drafter(done.folder)


# The way back.


@pytest.mark.parametrize("fmt", ["hf", "speculators"])
@pytest.mark.parametrize("options", [{}, SLIDING, {"sliding_causal": False, **MIXED}])
def test_a_reexport_is_byte_equal(make_drafter, tmp_path: Path, fmt: str, options: dict) -> None:
    file = save_checkpoint(make_drafter(**options), tmp_path / "a.ckpt", trained_max_length=512)
    first = export_drafter(file, tmp_path / "first", fmt).folder
    again = export_drafter(first, tmp_path / "again", fmt).folder
    assert read_bytes(first) == read_bytes(again)
    other = {"hf": "speculators", "speculators": "hf"}[fmt]
    through = export_drafter(export_drafter(first, tmp_path / "other", other).folder, tmp_path / "through", fmt).folder
    assert read_bytes(first) == read_bytes(through)


def test_scaled_rope_survives(make_drafter, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    file = save_checkpoint(make_drafter(overrides={"rope_parameters": rope}), tmp_path / "a.ckpt")
    for fmt in ("hf", "speculators"):
        out = export_drafter(file, tmp_path / fmt, fmt).folder
        fields = config_of(out)
        layer = fields.get("transformer_layer_config", fields)
        assert layer["rope_theta"] == 5000.0
        assert layer["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
        assert load_drafter(out).config.rope_parameters == rope


# Writing.


def test_missing_tensors_are_refused(make_drafter, tmp_path: Path) -> None:
    file = save_checkpoint(make_drafter(), tmp_path / "a.ckpt")
    checkpoint = torch.load(file, weights_only=True)
    del checkpoint["state_dict"]["drafter.norm.weight"]
    torch.save(checkpoint, file)
    with pytest.raises(ValueError, match=r"norm\.weight"):
        export_drafter(file, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"], "nothing half-written is left"


@pytest.mark.parametrize("fmt", ["hf", "speculators"])
@pytest.mark.parametrize("options", [{}, SLIDING, {"sliding_causal": False, **SLIDING}])
def test_the_exporter_checks_every_field_and_tensor(make_drafter, tmp_path: Path, fmt: str, options: dict) -> None:
    drafter = make_drafter(**options)
    out = export_drafter(save_checkpoint(drafter, tmp_path / "a.ckpt"), tmp_path / "out", fmt, dtype="float32").folder
    tensors, fields = load_file(out / "model.safetensors"), config_of(out)
    check_export(out, drafter.config, fmt, tensors)

    needed = list(REQUIRED[fmt])
    if options:
        needed += [f"{'transformer_layer_config.' if fmt == 'speculators' else ''}sliding_window"]
    if fmt == "hf" and options.get("sliding_causal") is False:
        needed += ["dflash_config.causal"]
    for path in needed:
        broken = json.loads(json.dumps(fields))
        *parents, name = path.split(".")
        home = broken
        for parent in parents:
            home = home[parent]
        del home[name]
        (out / "config.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=f"lacks.* {path.replace('.', '[.]')}"):
            check_export(out, drafter.config, fmt, tensors)
    layer = fields.get("transformer_layer_config", fields)
    layer["rope_theta"] = 1.0
    (out / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="another rope_parameters"):
        check_export(out, drafter.config, fmt, tensors)

    layer["rope_theta"] = 10000.0
    (out / "config.json").write_text(json.dumps(fields))
    check_export(out, drafter.config, fmt, tensors)
    for name in tensors:
        save_file({k: v for k, v in tensors.items() if k != name}, out / "model.safetensors")
        with pytest.raises(ValueError, match=f"differs in the tensors .*{name}"):
            check_export(out, drafter.config, fmt, tensors)
    save_file({**tensors, "fc.weight": tensors["fc.weight"] + 1}, out / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight was not written as it is"):
        check_export(out, drafter.config, fmt, tensors)


def test_an_earlier_export_is_replaced_and_foreign_folders_are_not(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_drafter(checkpoint, out, "speculators")
    export_drafter(checkpoint, out, "hf")
    assert sorted(p.name for p in out.iterdir()) == sorted(FILES)
    assert "dflash_config" in config_of(out)
    before = read_bytes(out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"--out .*notes.txt"):
        export_drafter(checkpoint, out)
    assert read_bytes(out) == {**before, "notes.txt": b"mine"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "step=7.ckpt"]


def test_export_while_the_checkpoint_is_being_replaced(make_drafter, tmp_path: Path) -> None:
    """Every checkpoint has one value in all its tensors, so an export of two of them would hold two."""
    drafter, file, stop = make_drafter(), tmp_path / "last.ckpt", threading.Event()

    def train(value: int) -> None:
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.fill_(value)
        save_checkpoint(drafter, file)

    def keep_training() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 128
            train(value)

    train(0)
    thread = threading.Thread(target=keep_training)
    thread.start()
    try:
        for _ in range(10):
            out = export_drafter(file, tmp_path / "out").folder
            values = torch.cat([t.flatten() for t in load_file(out / "model.safetensors").values()])
            assert len(values.unique()) == 1
    finally:
        stop.set()
        thread.join()


def test_the_tool_writes_both_layouts(checkpoint: Path, tmp_path: Path, capsys) -> None:
    for fmt in ("hf", "speculators"):
        assert main(["export", "--ckpt", str(checkpoint), "--out", str(tmp_path / fmt), "--format", fmt]) == 0
        assert sorted(p.name for p in (tmp_path / fmt).iterdir()) == sorted(FILES)
    assert "parameters in bfloat16" in capsys.readouterr().out
    (tmp_path / "cut.ckpt").write_bytes(checkpoint.read_bytes()[:1000])
    assert main(["export", "--ckpt", str(tmp_path / "cut.ckpt"), "--out", str(tmp_path / "x")]) == 2
    assert "cut off" in capsys.readouterr().err
