"""Positions, times, ids and choices that a half format rounds: nothing becomes non-finite, and everything is wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.case import ANY, Built, fault
from benchmarks.diagnosis.parts import Call, Do, fixed, mlp


class _Rotary(nn.Module):
    """Angles of position times inverse frequency, in the dtype of the stored table."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(0, width, 2).float() / width)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[1], device=x.device).to(self.inv_freq.dtype)
        angles = positions[:, None] * self.inv_freq[None, :]
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@fault(
    "fp16",
    "transformers#25681",
    "gpt-neox#1003",
    at="rotary_emb",
    op={"aten.mul", "aten._to_copy"},
    mechanism={"divergence", "unrepresentable-constant"},
    samples=ANY,
    silent=True,
    mode="cast",
)
@fault(
    "bf16",
    "transformers#29285",
    "modded-nanogpt#39",
    at="rotary_emb",
    op={"aten.mul", "aten._to_copy"},
    mechanism={"divergence", "unrepresentable-constant"},
    samples=ANY,
    silent=True,
    mode="cast",
)
def rotary_embedding() -> Built:
    """At position 1000 an angle is known to 0.5 (FP16) or 4 (BF16) only; the cosine of that is any number."""

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    def forward(m: Any, ids: Tensor) -> Tensor:
        h = m.embed(ids)
        cos, sin = m.rotary_emb(h)
        q = m.q(h)
        return m.head(m.norm(q * cos + rotate(q) * sin))

    model = Call(forward, embed=nn.Embedding(50, 32), rotary_emb=_Rotary(32), q=nn.Linear(32, 32),
                 norm=nn.LayerNorm(32), head=mlp(32))  # fmt: skip
    return Built(model=model, batch=torch.randint(0, 50, (2, 1024)))


def _sinusoid(t: Tensor) -> Tensor:
    frequencies = torch.exp(-torch.arange(8, device=t.device).float() * 1.15).to(t.dtype)
    angles = t[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), -1)


@fault(
    "bf16",
    "DiffSynth-Studio#562",
    "diffusers#9405",
    at="time_embed",
    op="aten._to_copy",
    mechanism={"unrepresentable-constant", "divergence"},
    samples=ANY,
    silent=True,
    mode="cast",
)
def diffusion_timestep() -> Built:
    """Timestep 987 becomes 988 when the embedding converts it to BF16."""

    def embed(m: Any, t: Tensor, like: Tensor) -> Tensor:
        return m.project(_sinusoid(t.to(like.dtype)))

    def forward(m: Any, x: Tensor, t: Tensor) -> Tensor:
        return m.out(m.body(m.project(x) + m.time_embed(t, x)))

    model = Call(forward, project=nn.Linear(16, 16), time_embed=Call(embed, project=nn.Linear(16, 16)), body=mlp(16),
                 out=nn.Linear(16, 16))  # fmt: skip
    return Built(model=model, batch={"x": torch.randn(4, 16), "t": torch.tensor([987, 750, 999, 511])})


@fault(
    "bf16",
    "diffusers#9405",
    at=None,
    op={None, "aten._to_copy"},
    mechanism="unrepresentable-constant",
    samples=ANY,
    silent=True,
    phase="input",
    mode="cast",
)
def diffusion_timestep_given_as_floats() -> Built:
    """The same timesteps as a float field of the batch, which the cast rounds before the model runs."""

    def forward(m: Any, x: Tensor, t: Tensor) -> Tensor:
        return m.out(m.body(m.project(x) + m.time_embed(t)))

    model = Call(forward, project=nn.Linear(16, 16), time_embed=Call(lambda m, t: m.project(_sinusoid(t)),
                 project=nn.Linear(16, 16)), body=mlp(16), out=nn.Linear(16, 16))  # fmt: skip
    return Built(model=model, batch={"x": torch.randn(4, 16), "t": torch.tensor([987.0, 750.0, 999.0, 511.0])})


@fault(
    "fp16",
    at="buckets",
    op="aten._to_copy",
    mechanism={"unrepresentable-constant", "routing-flip"},
    samples=ANY,
    silent=True,
    mode="cast",
)
def position_ids_through_half() -> Built:
    """Odd positions above 2048 do not exist in FP16, and look up their neighbour's row."""

    def lookup(m: Any, x: Tensor) -> Tensor:
        ids = torch.arange(2040, 2104, device=x.device).to(x.dtype)
        return m.table(ids.long())

    model = Call(lambda m, x: m.head(m.norm(m.project(x) + m.buckets(x))), project=nn.Linear(16, 16),
                 buckets=Call(lookup, table=nn.Embedding(2200, 16)), norm=nn.LayerNorm(16), head=mlp(16))  # fmt: skip
    return Built(model=model, batch=torch.randn(2, 64, 16))


@fault(
    "bf16",
    "Megatron-LM#2741",
    "mlx-lm#537",
    at="router",
    op="aten.topk",
    mechanism="routing-flip",
    samples=ANY,
    silent=True,
    mode="cast",
)
@fault(
    "fp16",
    "flashinfer#2431",
    at="router",
    op="aten.topk",
    mechanism="routing-flip",
    samples=ANY,
    silent=True,
    mode="cast",
)
def router_of_a_mixture() -> Built:
    """Gate logits of 4 that differ by 0.01 tie in BF16 and nearly in FP16; top-2 of 8 then takes others."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = fixed(nn.Linear(8, 8), 1.0)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found = self.gate(x).topk(2, -1)
            return found.values.softmax(-1), found.indices

    def forward(m: Any, x: Tensor) -> Tensor:
        weights, chosen = m.router(x)
        every = torch.stack([expert(x) for expert in m.experts], 1)
        picked = every.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
        return m.head((weights[..., None] * picked).sum(1))

    model = Call(forward, router=Router(), experts=nn.ModuleList(nn.Linear(8, 8) for _ in range(8)), head=mlp(8))
    return Built(model=model, batch=4.0 + 0.01 * torch.randn(200, 8))


@fault(
    "bf16",
    at="gate",
    op={"aten.clamp", "aten.clamp_max"},
    mechanism="unrepresentable-constant",
    samples=ANY,
    silent=True,
    mode="cast",
)
def clamp_bound_that_rounds() -> Built:
    """0.999 is 1 in BF16: what is left, 1 - p, is zero where it should be 0.001."""

    def gate(p: Tensor) -> Tensor:
        return (1 - p.clamp(0.0, 0.999)) * 1000.0

    model = Call(lambda m, x: m.head(m.gate(torch.sigmoid(m.project(x)))), project=fixed(nn.Linear(8, 8), 1.0),
                 gate=Do(gate), head=mlp(8))  # fmt: skip
    return Built(model=model, batch=torch.full((3, 8), 12.0))
