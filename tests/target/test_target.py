"""Finding, loading and tapping a target."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_lightning.drafter.objective import LMHead
from dflash_lightning.target.loading import FrozenHead, load_frozen_head, load_model
from dflash_lightning.target.mask_token import check_mask_token, choose_mask_token
from dflash_lightning.target.resolve import load_tokenizer, resolve_target
from dflash_lightning.target.tap import TappedTarget, pack_hidden, pad_rows


@pytest.mark.parametrize("ids", [[0], [1, 3], [5, 2], [1, 7]])
def test_b01_tap_is_the_output_of_that_layer_before_the_final_norm(tiny_target: str, ids: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    tokens = torch.arange(10, 22)[None]
    outputs: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _m, _a, out, i=i: outputs.__setitem__(i, out[0] if type(out) is tuple else out)
        )
    with torch.inference_mode():
        hf = model.model(tokens, output_hidden_states=True).hidden_states
    taps = TappedTarget(tiny_target, ids, dtype="float32").forward(tokens)
    for i, tap in zip(ids, taps, strict=True):
        torch.testing.assert_close(tap, outputs[i], atol=1e-5, rtol=1e-5)
        if i < 7:  # hidden_states[n] holds the final-normed state instead of the last layer's output
            torch.testing.assert_close(tap, hf[i + 1], atol=1e-5, rtol=1e-5)


def test_b02_the_last_layers_tap_comes_before_the_final_norm(tiny_target: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    tokens = torch.arange(10, 22)[None]
    tap = TappedTarget(tiny_target, [7], dtype="float32").forward(tokens)[0]
    with torch.inference_mode():
        normed = model.model(tokens, output_hidden_states=True).hidden_states[8]
        torch.testing.assert_close(model.model.norm(tap), normed, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(tap, normed, atol=1e-2)


def test_b08_layers_of_several_kinds_are_tapped_by_their_number() -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    assert len(set(config.layer_types)) == 2
    model = Qwen3_5ForCausalLM(config).eval()
    tokens = torch.arange(9)[None]
    with torch.inference_mode():
        states = model.model(tokens, output_hidden_states=True).hidden_states
    for tap, i in zip(TappedTarget.wrap(model, [0, 1, 2]).forward(tokens), (0, 1, 2), strict=True):
        torch.testing.assert_close(tap, states[i + 1], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_compiled_target_gives_the_same_states(tiny_target: str) -> None:
    plain, compiled = (TappedTarget(tiny_target, [1, 5], dtype="float32") for _ in range(2))
    compiled.compile()
    for length in (9, 17):
        tokens = torch.arange(4, 4 + length)[None]
        for a, b in zip(plain.forward(tokens), compiled.forward(tokens), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_layers_above_the_last_tap_are_dropped(tiny_target: str) -> None:
    tapped = TappedTarget(tiny_target, [1, 3])
    assert len(tapped.decoder.layers) == 4


def test_last_hidden_state_is_one_more_tap(tiny_target: str) -> None:
    taps = TappedTarget(tiny_target, [1], last_hidden_state=True).forward(torch.arange(5, 9)[None])
    expected = TappedTarget(tiny_target, [1, 7]).forward(torch.arange(5, 9)[None])
    assert all(torch.equal(a, b) for a, b in zip(taps, expected, strict=True))


def test_b04_rows_do_not_depend_on_their_batch(tiny_target: str) -> None:
    rows = [list(range(4, 4 + n)) for n in (3, 9, 5, 7)]
    tapped = TappedTarget(tiny_target, [1, 4], dtype="float32")
    together = pack_hidden(tapped.forward(pad_rows(rows)), [len(r) for r in rows])
    alone = torch.cat([pack_hidden(tapped.forward(pad_rows([r])), [len(r)]) for r in rows])
    again = pack_hidden(tapped.forward(pad_rows(rows)), [len(r) for r in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert torch.equal(together, again)


def test_layer_ids_out_of_range_are_named(tiny_target: str) -> None:
    with pytest.raises(ValueError, match=r"target_layer_ids=\[1, 8\].*0..7"):
        TappedTarget(tiny_target, [1, 8])


FAMILIES = [
    "llama", "gemma2", "gemma3", "gemma4", "qwen3_5", "gpt2", "cohere", "cohere2", "granite", "granitemoe",
    "hyperclovax", "falcon_h1", "recurrent_gemma", "nanochat", "mpt", "biogpt", "xglm", "lfm2",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_head_equals_the_whole_models(family: str, tmp_path: Path) -> None:
    import transformers as tf

    small = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = {
        "llama": lambda: tf.LlamaConfig(**small, tie_word_embeddings=True),
        "gemma2": lambda: tf.Gemma2Config(**small),
        "gemma3": lambda: tf.Gemma3TextConfig(**small),
        "qwen3_5": lambda: tf.Qwen3_5TextConfig(**small),
        "gpt2": lambda: tf.GPT2Config(vocab_size=96, n_embd=32, n_layer=4, n_head=2),
        "gemma4": lambda: tf.Gemma4TextConfig(**small, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96),
        "cohere": lambda: tf.CohereConfig(**small),
        "cohere2": lambda: tf.Cohere2Config(**small),
        "granite": lambda: tf.GraniteConfig(**small, logits_scaling=8.0),
        "granitemoe": lambda: tf.GraniteMoeConfig(**small, logits_scaling=4.0),
        "hyperclovax": lambda: tf.HyperCLOVAXConfig(**small, logits_scaling=0.25),
        "falcon_h1": lambda: tf.FalconH1Config(**small, lm_head_multiplier=0.3, mamba_d_ssm=32, mamba_n_heads=2),
        "recurrent_gemma": lambda: tf.RecurrentGemmaConfig(**small, lru_width=32),
        "nanochat": lambda: tf.NanoChatConfig(**small),
        "mpt": lambda: tf.MptConfig(vocab_size=96, d_model=32, n_layers=4, n_heads=2),
        "biogpt": lambda: tf.BioGptConfig(**small),
        "xglm": lambda: tf.XGLMConfig(vocab_size=96, d_model=32, num_layers=4, attention_heads=2, ffn_dim=48),
        "lfm2": lambda: tf.Lfm2Config(**small),
    }[family]()
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.5)  # so that a soft cap matters
    model.save_pretrained(tmp_path)
    head = load_frozen_head(str(tmp_path))
    ids = torch.arange(7)
    assert torch.equal(head.embedding(ids), model.get_input_embeddings()(ids)), "scaled embeddings stay scaled"
    assert torch.equal(head.weight, model.get_output_embeddings().weight)
    assert head.final_norm is not None
    whole = FrozenHead.of(model)
    state = torch.randn(3, 32)
    with torch.no_grad():
        torch.testing.assert_close(head.final_norm(state), whole.final_norm(state))
    normed: list[torch.Tensor] = []
    whole.final_norm.register_forward_hook(lambda _m, _a, out: normed.append(out))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits.float()
        ours = LMHead.of(head).logits(normed[-1])
    torch.testing.assert_close(ours, logits, msg=lambda text: f"{family}: {text}")
    taps = TappedTarget(str(tmp_path), [0, 2]).forward(ids[None])
    assert [tuple(t.shape) for t in taps] == [(1, 7, 32)] * 2


def test_frozen_head_leaves_the_layers_on_disk(tiny_target: str) -> None:
    model = load_model(tiny_target, num_layers=0)
    assert sum(p.numel() for p in model.parameters()) == 2 * 260 * 32 + 32


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.3.mlp.up_proj.weight"])
@pytest.mark.parametrize("change", ["missing", "of another shape"])
def test_weights_that_are_not_there_are_named(tiny_target: str, tmp_path: Path, name: str, change: str) -> None:
    """transformers would train and decode with random ones."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    weights = load_file(folder / "model.safetensors")
    value = weights.pop(name)
    if change != "missing":
        weights[name] = torch.cat([value, value])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=r"fitting values for|mismatched"):
        load_model(str(folder))
    if "layers" in name:
        load_frozen_head(str(folder))
    else:
        with pytest.raises(ValueError, match=rf"no fitting values for {name}"):
            load_frozen_head(str(folder))


def test_bad_targets_are_named(tmp_path: Path, tiny_target: str) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        resolve_target(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        resolve_target(str(tmp_path / "empty"))
    shutil.copy(Path(tiny_target) / "config.json", tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="no weights"):
        resolve_target(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="target=''"):
        resolve_target("")
    with pytest.raises(OSError, match="target=nobody/nothing"):
        load_model("nobody/nothing")


def test_mask_token_is_one_that_text_never_holds(tiny_target: str) -> None:
    tokenizer = load_tokenizer(tiny_target)
    assert choose_mask_token(tokenizer, 260) == 3, "the special token that the template does not use"
    assert choose_mask_token(tokenizer, 300) == 260, "an embedding row past the tokenizer's ids"
    check_mask_token(3, tokenizer, 260)
    check_mask_token(299, tokenizer, 300)
    for bad, rows, why in ((300, 300, "outside"), (-1, 260, "outside"), (2, 260, "in use"), (65, 260, "in use")):
        with pytest.raises(ValueError, match=f"mask_token_id={bad}.*{why}"):
            check_mask_token(bad, tokenizer, rows)
