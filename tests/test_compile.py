"""`compile: true`: same numbers, and no more compilations than shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_layers_train_alike_and_compile_once_a_shape(make_run, write_chats: Callable[..., str]) -> None:
    from torch._dynamo.utils import counters

    from .test_training import Record

    train = write_chats(60)
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        record = Record()
        options = {"trainer_max_steps": 8, "model_compile": compiled, "model_attention": "sdpa"}
        trainer, module, data = make_run(train, callbacks=[record], **options)
        trainer.fit(module, datamodule=data)
        losses.append(record.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    # One graph a layer and a set of shapes; dynamo goes over to symbolic sizes with the second length.
    assert counters["stats"]["unique_graphs"] <= 6, dict(counters["stats"])
