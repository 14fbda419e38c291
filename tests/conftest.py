"""Fixtures: a tiny target with tokenizer and chat template, made here; nothing is loaded from a hub."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Small models on few cores: threads would only wait for each other. Processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|spare|>"]


def make_tiny_tokenizer():
    """Byte-level tokens and four special ones; ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|spare|>"],
    )
    fast.chat_template = CHATML
    return fast


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a Qwen3 model of 8 layers, hidden 32, vocabulary 260."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("target") / "tiny"
    tokenizer = make_tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["DFLASH_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def write_chats(tmp_path: Path) -> Callable[..., str]:
    """Write a JSONL file of `count` short conversations of varying length; returns its path."""

    def write(count: int, name: str = "chats.jsonl", offset: int = 0) -> str:
        words = ["red", "green", "blue", "amber", "violet"]
        lines = []
        for i in range(offset, offset + count):
            answer = " ".join(words[(i + j) % 5] for j in range(3 + i % 7))
            chat = [{"role": "user", "content": f"colour {i}"}, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": chat}))
        file = tmp_path / name
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    return write


@pytest.fixture
def make_run(tiny_target: str, tmp_path: Path):
    """Trainer, module and data module of a small CPU run; keyword arguments go where they belong by prefix."""

    def make(train: str, *, callbacks=(), run: str = "run", **options):
        from lightning.pytorch import Trainer
        from lightning.pytorch.loggers import TensorBoardLogger

        from dflash_lightning import DFlashModule, HiddenStateDataModule
        from dflash_lightning.callbacks.checkpoint import AtomicCheckpointIO

        groups: dict[str, dict] = {"trainer": {}, "model": {}, "data": {}}
        for key, value in options.items():
            group, name = key.split("_", 1)
            groups[group][name] = value
        torch.manual_seed(0)
        module = DFlashModule(
            **{"target": tiny_target, "num_layers": 2, "block_size": 4, "max_anchors": 16, **groups["model"]}
        )
        data = HiddenStateDataModule(
            **{
                "target": tiny_target,
                "train": train,
                "token_budget": 256,
                "max_seq_len": 128,
                "num_buckets": 2,
                "queue_depth": 3,
                **groups["data"],
            }
        )
        folder = tmp_path / run
        trainer = Trainer(
            **{
                "accelerator": "cpu",
                "devices": 1,
                "default_root_dir": str(folder),
                "max_steps": 6,
                "log_every_n_steps": 1,
                "num_sanity_val_steps": 0,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": any(type(c).__name__.endswith("Checkpoint") for c in callbacks),
                "logger": TensorBoardLogger(str(folder), name="", version="", default_hp_metric=False),
                "callbacks": list(callbacks),
                "gradient_clip_val": 1.0,
                "plugins": [AtomicCheckpointIO()],
                **groups["trainer"],
            }
        )
        return trainer, module, data

    return make


def read_scalars(folder: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of a run folder as (step, value) lists, through tensorboard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
