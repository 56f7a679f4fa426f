"""Routers stay float, told by what the graph does with their outputs; and what looks like one but is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxquant

E, N, K, T = 4, 16, 8, 6
STAYS = "stays float unless a config entry asks"
MIXES = f"router (its scores weight outputs of experts): {STAYS}"


class Routed(nn.Module):
    """A linear ``r`` beside experts ``w [E, N, K]`` and other linears; ``how`` uses them."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how
        self.r = nn.Linear(K, E)
        self.gate, self.own = nn.Linear(K, N), nn.Linear(K, N)
        self.w = nn.Parameter(torch.empty(E, N, K))
        self.bias = nn.Parameter(torch.empty(E))
        self.many = nn.ModuleList(nn.Linear(K, N) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def reason_of(how: Callable[[Any, Tensor], Tensor], name: str = "r.weight", **options: Any) -> str:
    with fxquant.meta_init():
        model = Routed(how).eval()
    given = {"example_inputs": (torch.randn(T, K),), "scheme": "int8", **options}
    plan = fxquant.plan(model, **given)
    if not options:
        assert plan.capture.startswith("whole model")
    weight = plan.weight(name)
    return "" if weight.quantized else weight.reason


def run(m: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Each row through the experts that ``ids [T, k]`` names."""
    rows = x.repeat_interleave(ids.shape[1], 0).unsqueeze(-1)
    out = torch.bmm(m.w[ids.reshape(-1)], rows).view(len(x), -1, N)
    return (out * weights.unsqueeze(-1)).sum(1)


def softmax_topk(m: Any, x: Tensor) -> Tensor:
    weights, ids = m.r(x).float().softmax(-1).topk(2, dim=-1)
    return run(m, x, ids, weights / weights.sum(-1, keepdim=True))


def topk_softmax(m: Any, x: Tensor) -> Tensor:
    weights, ids = m.r(x).topk(2, dim=-1)
    return run(m, x, ids, weights.softmax(-1))


def groups(m: Any, x: Tensor) -> Tensor:
    scores = m.r(x).sigmoid()
    biased = scores + m.bias
    best = biased.view(-1, 2, E // 2).topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1)[1]
    mask = torch.zeros(len(x), 2).scatter(1, best, 1).unsqueeze(-1).expand(-1, 2, E // 2).reshape(-1, E)
    ids = biased.masked_fill(~mask.bool(), 0.0).topk(2, dim=-1)[1]
    return run(m, x, ids, scores.gather(1, ids))


def argmax(m: Any, x: Tensor) -> Tensor:
    probabilities = m.r(x).softmax(-1)
    ids = probabilities.argmax(-1, keepdim=True)
    return run(m, x, ids, probabilities.amax(-1, keepdim=True))


def largest(m: Any, x: Tensor) -> Tensor:
    weights, ids = m.r(x).softmax(-1).max(-1, keepdim=True)
    return run(m, x, ids, weights)


def ordered(m: Any, x: Tensor) -> Tensor:
    weights, ids = m.r(x).sort(dim=-1, descending=True)
    return run(m, x, ids[:, :2], weights[:, :2].sigmoid())


def by_argsort(m: Any, x: Tensor) -> Tensor:
    scores = m.r(x)
    ids = scores.argsort(dim=-1, descending=True)[:, :2]
    return run(m, x, ids, scores.gather(1, ids).softmax(-1))


def threshold(m: Any, x: Tensor) -> Tensor:
    scores = m.r(x).softmax(-1)
    kept = scores * (scores >= scores.topk(2, dim=-1)[0][:, -1:])
    return sum(kept[:, e, None] * F.linear(x, m.w[e]) for e in range(E))  # type: ignore[return-value]


def expert_choice(m: Any, x: Tensor) -> Tensor:
    weights, rows = m.r(x).softmax(-1).t().topk(2, dim=-1)
    out = torch.bmm(x[rows.reshape(-1)].view(E, 2, K), m.w.mT) * weights.unsqueeze(-1)
    return x.new_zeros(len(x), N).index_add(0, rows.reshape(-1), out.view(-1, N))


@pytest.mark.parametrize(
    ("how", "op"),
    [
        (softmax_topk, "topk"),
        (topk_softmax, "topk"),
        (groups, "topk"),
        (argmax, "argmax"),
        (largest, "max"),
        (ordered, "sort"),
        (by_argsort, "argsort"),
        (threshold, "ge"),
        (expert_choice, "topk"),
    ],
)
def test_routers_that_choose(how: Callable[[Any, Tensor], Tensor], op: str) -> None:
    assert reason_of(how) == f"router ({op} chooses by its outputs): {STAYS}"
    assert reason_of(how, config={"r": "int8"}) == ""


def each_column(m: Any, x: Tensor) -> Tensor:
    p = m.r(x).masked_fill(torch.arange(E) == 3, -1e9).softmax(-1)
    return sum(p[..., e : e + 1] * F.linear(x, m.w[e]) for e in range(E))  # type: ignore[return-value]


def each_module(m: Any, x: Tensor) -> Tensor:
    p = (m.r(x) + m.bias).sigmoid().unbind(-1)
    return sum(p[e].unsqueeze(-1) * expert(x) for e, expert in enumerate(m.many))  # type: ignore[return-value]


def all_at_once(m: Any, x: Tensor) -> Tensor:
    p = m.r(x).softmax(-1)
    out = torch.bmm(x.expand(E, -1, -1), m.w.mT)
    return (p.t().unsqueeze(-1) * F.silu(out)).sum(0)


def by_bmm(m: Any, x: Tensor) -> Tensor:
    out = torch.bmm(x.expand(E, -1, -1), m.w.mT).transpose(0, 1)
    return torch.bmm(m.r(x).softmax(-1).unsqueeze(1), out).squeeze(1)


def by_einsum(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("te,ten->tn", m.r(x).softmax(-1), torch.einsum("td,end->ten", x, m.w))


def stacked(m: Any, x: Tensor) -> Tensor:
    return (torch.stack([expert(x) for expert in m.many], 1) * m.r(x).softmax(-1).unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("how", [each_column, each_module, all_at_once, by_bmm, by_einsum, stacked])
def test_routers_that_mix(how: Callable[[Any, Tensor], Tensor]) -> None:
    assert reason_of(how) == MIXES


def gated(m: Any, x: Tensor) -> Tensor:
    return m.gate(x).sigmoid() * m.own(x)


def gate_of_experts_width(m: Any, x: Tensor) -> Tensor:
    return m.gate(x).sigmoid() * torch.bmm(x.expand(E, -1, -1), m.w.mT)[0]


def heads(m: Any, x: Tensor) -> Tensor:
    return (m.own(x).view(-1, E, N // E) * m.gate(x)[:, :E].sigmoid().unsqueeze(-1)).flatten(1)


def channels(m: Any, x: Tensor) -> Tensor:
    return m.own(x).unsqueeze(0) * m.gate(x.mean(0, keepdim=True)).sigmoid()


def attention(m: Any, x: Tensor) -> Tensor:
    q, k = m.gate(x), m.own(x)
    return (q @ k.t() / 4).softmax(-1) @ k


def largest_values(m: Any, x: Tensor) -> Tensor:
    return m.gate(x).view(-1, E, N // E).max(-1)[0] + m.gate(x).topk(4, dim=-1)[0]


def behind_a_sum(m: Any, x: Tensor) -> Tensor:
    """The output of attention in a residual stream, next to which experts add theirs."""
    hidden = F.pad(x, (0, N - K)) + m.gate(x)
    hidden = hidden * hidden.pow(2).mean(-1, keepdim=True).rsqrt()
    out = hidden + torch.bmm(x.expand(E, -1, -1), m.w.mT).sum(0)
    return out * out.pow(2).mean(-1, keepdim=True).rsqrt()


@pytest.mark.parametrize(
    "how",
    [gated, gate_of_experts_width, heads, channels, attention, largest_values, behind_a_sum],
)
def test_gates_are_no_routers(how: Callable[[Any, Tensor], Tensor]) -> None:
    assert reason_of(how, "gate.weight") == ""


class Looped(nn.Module):
    """A loop that depends on data: the router is captured alone, as a linear or in a module of its own."""

    def __init__(self, *, inside: bool, stacked: bool) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(K, E), nn.Sigmoid()) if inside else nn.Linear(K, E)
        self.other = nn.Linear(K, K)
        if stacked:
            self.w = nn.Parameter(torch.empty(E, N, K))
        else:
            self.experts = nn.ModuleList(nn.Linear(K, N) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(self.other(x)).argmax(-1)
        out = x.new_zeros(len(x), N)
        for i in chosen.unique().tolist():
            rows = (chosen == i).nonzero().flatten()
            out[rows] = self.experts[i](x[rows]) if hasattr(self, "experts") else F.linear(x[rows], self.w[i])
        return out


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_routers_of_loops(inside: bool, stacked: bool, given: bool) -> None:
    """Nothing is traced but the router, or not even that: its number of outputs tells."""
    with fxquant.meta_init():
        model = Looped(inside=inside, stacked=stacked).eval()
    plan = fxquant.plan(model, scheme="int8", example_inputs=(torch.randn(T, K),) if given else None)
    name = "gate.0.weight" if inside else "gate.weight"
    assert plan.weight("other.weight").quantized
    assert plan.weight(name).reason == f"router (as many outputs as experts beside it): {STAYS}"
