"""MuonAdamW: one optimizer to the outside, two inside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dflash_lightning.optim import Muon, MuonAdamW
from dflash_lightning.schedules import HiddenStateNoise, WarmupCosineLR


def make() -> tuple[nn.Sequential, MuonAdamW, WarmupCosineLR]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 2, bias=False))
    optimizer = MuonAdamW(model.parameters(), lr=0.1)
    return model, optimizer, WarmupCosineLR(optimizer, warmup=2, total_steps=10)


def train(model: nn.Sequential, optimizer: MuonAdamW, scheduler: WarmupCosineLR, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x[:, :2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss))
    return losses


def test_every_parameter_moves_and_the_loss_falls() -> None:
    model, optimizer, scheduler = make()
    before = [p.clone() for p in model.parameters()]
    losses = train(model, optimizer, scheduler, range(10))
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert losses[-1] < losses[0]


def test_a_scheduler_reaches_both_parts() -> None:
    _, optimizer, scheduler = make()
    scheduler.step()
    rates = {group["lr"] for part in optimizer._parts for group in part.param_groups}
    assert rates == {scheduler.get_last_lr()[0]}


def test_state_goes_through_a_checkpoint_exactly(tmp_path) -> None:
    whole = train(*make(), range(8))
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, range(4))
    states = {"m": model.state_dict(), "o": optimizer.state_dict(), "s": scheduler.state_dict()}
    torch.save(states, tmp_path / "x.pt")
    states = torch.load(tmp_path / "x.pt", weights_only=True)
    model, optimizer, scheduler = make()
    model.load_state_dict(states["m"])
    optimizer.load_state_dict(states["o"])
    scheduler.load_state_dict(states["s"])
    assert train(model, optimizer, scheduler, range(4, 8)) == whole[4:]


def test_another_optimizers_state_is_refused() -> None:
    _, optimizer, _ = make()
    other = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="MuonAdamW"):
        optimizer.load_state_dict(other.state_dict())


def test_warmup_and_cosine() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = WarmupCosineLR(optimizer, warmup=0.2, min_ratio=0.1)
    scheduler.set_total_steps(20)
    rates = []
    for _ in range(21):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.2)
    assert rates[:4] == sorted(rates[:4])
    assert rates[4] == pytest.approx(1.0)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[20] == pytest.approx(0.1)


@pytest.mark.parametrize(("schedule", "middle"), [("constant", 0.4), ("linear", 0.2), ("cosine", 0.2)])
@pytest.mark.parametrize("distribution", ["gaussian", "uniform"])
def test_noise_follows_its_schedule_and_its_seed(schedule: str, middle: float, distribution: str) -> None:
    noise = HiddenStateNoise(strength=0.4, end=0.0, distribution=distribution, schedule=schedule)
    assert noise.at(5, 10) == pytest.approx(middle)
    hidden = torch.zeros(4000, 4)
    first = noise.apply(hidden, 5, 10, seed=3)
    assert torch.equal(first, noise.apply(hidden, 5, 10, seed=3))
    assert not torch.equal(first, noise.apply(hidden, 5, 10, seed=4))
    expected = middle if distribution == "gaussian" else middle / 3**0.5
    assert float(first.std()) == pytest.approx(expected, rel=0.05)
    if distribution == "uniform":
        assert float(first.abs().max()) <= middle
    if schedule != "constant":
        assert torch.equal(noise.apply(hidden, 10, 10, seed=3), hidden), "no noise at strength 0"


def test_bad_noise_is_named() -> None:
    with pytest.raises(ValueError, match=r"noise\.distribution='cauchy'"):
        HiddenStateNoise(distribution="cauchy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"strength=-1"):
        HiddenStateNoise(strength=-1)


def test_muon_steps_as_torchs_own_does() -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((24, 40), (40, 24), (24, 40), (16, 16))]
    ours, theirs = ([nn.Parameter(m.clone()) for m in start] for _ in range(2))
    options = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}
    mine = Muon(ours, **options)
    reference = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b, m in zip(ours, theirs, start, strict=True):
        # Theirs iterates in bfloat16.
        assert (a - b).norm() < 0.03 * (a - m).norm()
