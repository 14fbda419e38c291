"""Anchors, labels and block layout."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.drafter.layout import draw_layout, make_block_layout


def pairs(batch):
    """(predicted position, label) of every slot that counts."""
    token = batch.anchors[:, None] + torch.arange(batch.labels.shape[1])
    return list(zip(token[batch.label_mask].tolist(), batch.labels[batch.label_mask].tolist(), strict=True))


def draw(loss_mask, *, documents=None, block_size=4, max_anchors=64, seed=0):
    total = len(loss_mask)
    documents = torch.zeros(total, dtype=torch.int64) if documents is None else documents
    return draw_layout(
        torch.arange(total), loss_mask, documents, torch.arange(total),
        block_size=block_size, max_anchors=max_anchors, seed=seed,
    )  # fmt: skip


def test_a03_slot_k_predicts_the_token_at_anchor_plus_k(make_batch):
    batch = make_batch([40], block_size=8)
    ids = batch.input_ids
    for anchor, labels, mask in zip(batch.anchors, batch.labels, batch.label_mask, strict=True):
        for k in mask.nonzero()[:, 0]:
            assert labels[k] == ids[anchor + k]
    assert batch.label_mask.any()
    assert not batch.label_mask[:, 0].any()  # slot 0 is the anchor, never trained


def test_a05_mask_is_read_at_the_predicted_position(make_batch):
    batch = make_batch([60], supervised=range(8, 40), anchors=[37])
    assert [position for position, _ in pairs(batch)] == [38, 39]


def test_a06_no_label_crosses_a_document_end(make_batch):
    batch = make_batch([10, 10], block_size=4)
    document = batch.document_ids
    for anchor, mask in zip(batch.anchors[batch.anchor_valid], batch.label_mask, strict=False):
        for k in mask.nonzero()[:, 0]:
            assert document[anchor + k] == document[anchor]
    # The last token of a document has no successor to predict.
    assert not {9, 19} & set(batch.anchors[batch.anchor_valid].tolist())


def test_a07_every_eligible_anchor_is_used_when_there_is_room(make_batch):
    one = make_batch([30], supervised=[12, 13])
    assert one.anchors[one.anchor_valid].tolist() == [12]
    # Short chats keep their share: the quota is of the batch, not of a row, and is not lowered by one.
    supervised = [*range(3, 6), *range(20, 29)]
    every = make_batch([10, 25], supervised=supervised, max_anchors=10)
    assert every.anchors[every.anchor_valid].tolist() == [3, 4, *range(20, 28)]


def test_a12_late_supervision_gives_partial_blocks(make_batch):
    batch = make_batch([20], supervised=[17, 18, 19], block_size=8)
    assert batch.anchors[batch.anchor_valid].tolist() == [17, 18]
    assert [position for position, _ in pairs(batch)] == [18, 19, 19]


def test_label_run_ends_at_the_first_unsupervised_token(make_batch):
    batch = make_batch([20], supervised=[5, 6, 8, 9], anchors=[5], block_size=6)
    assert [position for position, _ in pairs(batch)] == [6]


def test_no_eligible_anchor_gives_an_empty_layout():
    layout = draw(torch.zeros(30, dtype=torch.bool))
    assert not layout["anchor_valid"].any()
    assert not layout["label_mask"].any()
    assert layout["slot_index"].tolist() == [-1] * 256


def test_sampling_is_uniform_without_replacement_and_sorted():
    loss_mask = torch.ones(101, dtype=torch.bool)
    counts = torch.zeros(100)
    for seed in range(600):
        anchors = draw(loss_mask, max_anchors=20, seed=seed)["anchors"]
        assert (anchors.diff() > 0).all()
        counts[anchors] += 1
    # 600 draws of 20 out of 100: mean 120, standard deviation 9.8.
    assert (counts - 120).abs().max() < 50


def test_draw_depends_on_its_seed_only():
    loss_mask = torch.ones(2000, dtype=torch.bool)
    first = draw(loss_mask, seed=2**63 + 5)["anchors"]
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert torch.equal(draw(loss_mask, seed=2**63 + 5)["anchors"], first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(draw(loss_mask, seed=2**63 + 6)["anchors"], first)


@pytest.mark.parametrize(("tokens", "max_anchors", "padded"), [(30, 512, 64), (200, 512, 256), (900, 100, 100)])
def test_shapes_take_few_sizes(tokens, max_anchors, padded):
    layout = draw(torch.ones(tokens, dtype=torch.bool), max_anchors=max_anchors)
    assert layout["anchors"].shape == (padded,)
    assert layout["labels"].shape == (padded, 4)
    assert len(layout["slot_index"]) % 256 == 0
    valid = layout["anchor_valid"]
    assert valid[: valid.sum()].all()  # padding comes last
    slots = layout["slot_index"][layout["slot_index"] >= 0]
    assert torch.equal(slots, layout["label_mask"].flatten().nonzero()[:, 0])


@pytest.mark.parametrize(("name", "value"), [("block_size", 1), ("max_anchors", 0)])
def test_useless_options_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        draw(torch.ones(9, dtype=torch.bool), **{name: value})


def test_block_layout_is_relative_to_the_document(make_batch):
    layout = make_block_layout(make_batch([10, 20], anchors=[4, 10, 15], num_blocks=4))
    assert layout.anchors.tolist() == [4, 10, 15, 0]
    assert layout.context_start.tolist() == [0, 10, 10, 0]
    assert layout.block_positions.tolist()[:3] == [[4, 5, 6, 7], [0, 1, 2, 3], [5, 6, 7, 8]]


def test_groups_stay_in_one_document_and_reach_no_further_than_their_anchors(make_batch):
    layout = make_block_layout(make_batch([10, 20], anchors=[2, 4, 7, 12, 15], num_blocks=6))
    bounds = [(g.first, g.last, g.start, g.shared_end, g.end) for g in layout.groups(2)]
    assert bounds == [(0, 2, 0, 2, 4), (2, 3, 0, 7, 7), (3, 5, 10, 12, 15), (5, 6, 0, 0, 0)]
    assert [g.start for g in layout.groups(2, window=3)] == [0, 5, 10, 0]
