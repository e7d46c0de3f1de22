"""Activations that leave FP16: feed-forward layers, residual streams, gated products, convolutions, casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.case import LINEAR, Built, fault
from benchmarks.diagnosis.parts import Call, Do, Residual, fixed, mean_square, mlp


def _feed_forward(width: int, hidden: int) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.wo(torch.relu(m.wi(m.norm(x))))

    return Call(
        forward,
        norm=nn.LayerNorm(width),
        wi=nn.Linear(width, hidden, bias=False),
        wo=nn.Linear(hidden, width, bias=False),
    )


@fault(
    "fp16",
    "transformers#5651",
    "transformers#9295",
    at="encoder.1.inner.wo",
    op=LINEAR,
    mechanism="overflow",
    samples=(0, 1, 2),
    mode="cast",
)
@fault(
    "fp16",
    "transformers#5651",
    "transformers#9487",
    at="encoder.1.inner.wo",
    op=LINEAR,
    mechanism="overflow",
    samples=(0, 1, 2),
)
def feed_forward_output() -> Built:
    """Block 1 sums 256 products of 16 x 64 in its output projection: about 1e5, for every sample."""
    encoder = nn.Sequential(*(Residual(_feed_forward(64, 256)) for _ in range(3)))
    inner = encoder[1].inner
    with torch.no_grad():
        inner.norm.weight.zero_()
        inner.norm.bias.fill_(1.0)
        inner.wi.weight.fill_(0.25)
        inner.wo.weight[:4] = 64.0
    model = Call(lambda m, ids: m.head(m.final(m.encoder(m.embed(ids)))), embed=nn.Embedding(50, 64),
                 encoder=encoder, final=nn.LayerNorm(64), head=nn.Linear(64, 50))  # fmt: skip
    return Built(model=model, batch=torch.randint(0, 50, (3, 8)), loss=mean_square)


@fault("fp16", "transformers#19229", at="2", op="aten.add", mechanism="overflow", samples=(1,), mode="cast")
def residual_of_two_large_branches() -> Built:
    """Both branches of sample 1 hold 4e4, and their sum 8e4."""
    block = Residual(fixed(nn.Linear(16, 16), 1.0))
    x = torch.randn(4, 5, 16)
    x[1, 2, 3] = 40.0
    scale = Do(lambda t: t * 1000.0)
    return Built(model=nn.Sequential(nn.Identity(), scale, block, nn.LayerNorm(16), mlp(16)), batch=x)


def _gated(width: int, hidden: int) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.down_proj(m.act_fn(m.gate_proj(x)) * m.up_proj(x))

    return Call(
        forward,
        gate_proj=nn.Linear(width, hidden, bias=False),
        up_proj=nn.Linear(width, hidden, bias=False),
        down_proj=nn.Linear(hidden, width, bias=False),
        act_fn=nn.SiLU(),
    )


def _gated_model() -> tuple[nn.Module, Tensor]:
    layers = nn.Sequential(*(Residual(_gated(64, 256)) for _ in range(4)))
    inner = layers[2].inner
    with torch.no_grad():
        for layer in layers:
            layer.inner.down_proj.weight.mul_(0.01)
        inner.gate_proj.weight[7] = 4.0
        inner.up_proj.weight[7] = 4.0
        embed = nn.Embedding(40, 64)
        embed.weight[39] = 1.05
    ids = torch.randint(0, 39, (4, 6))
    ids[3, 2] = 39
    model = Call(lambda m, ids: m.head(m.norm(m.layers(m.embed(ids)))), embed=embed, layers=layers,
                 norm=nn.LayerNorm(64), head=nn.Linear(64, 40))  # fmt: skip
    return model, ids


@fault(
    "fp16", "transformers#27179", at="layers.2.inner", op="aten.mul", mechanism="overflow", samples=(3,), mode="cast"
)
@fault("fp16", "transformers#27179", at="layers.2.inner", op="aten.mul", mechanism="overflow", samples=(3,))
def gated_product() -> Built:
    """The gate's and the up projection's channel 7 reach 268 for one token, and their product 7.2e4."""
    model, ids = _gated_model()
    return Built(model=model, batch=ids)


@fault(
    "fp16",
    "vllm#14126",
    "vllm#3998",
    at="decoder.layers.2.inner",
    op="aten.mul",
    mechanism="overflow",
    samples=(3,),
    mode="cast",
)
def greedy_decoding_of_nan_logits() -> Built:
    """The same product below an argmax, which turns NaN into token 0."""
    model, ids = _gated_model()
    return Built(model=Call(lambda m, ids: m.decoder(ids).argmax(-1), decoder=model), batch=ids)


@fault(
    "fp16",
    "transformers#36832",
    "vllm#17364",
    at="layers.32",
    op="aten.add",
    mechanism="overflow",
    samples=(0, 1, 2),
    mode="cast",
)
@fault(
    "fp16",
    "transformers#39972",
    at="layers.32",
    op="aten.add",
    mechanism="overflow",
    samples=(0, 1, 2),
    mode="cast",
    train=False,
    name="residual_stream-fp16-cast-labels",
)
def residual_stream() -> Built:
    """Each of 36 post-norm blocks adds 2000 to channel 5: 33 of them reach 6.6e4."""
    layers = nn.Sequential(*(Residual(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))) for _ in range(36)))
    with torch.no_grad():
        for layer in layers:
            layer.inner[1].bias[5] = 2000.0
            layer.inner[1].weight[5] = 0.0
    model = Call(lambda m, x: m.head(m.norm(m.layers(m.project(x)))), project=nn.Linear(64, 64), layers=layers,
                 norm=nn.LayerNorm(64), head=nn.Linear(64, 8))  # fmt: skip
    return Built(model=model, batch=torch.randn(3, 4, 64))


@fault("fp16", "pytorch#115500", "keras#22589", at="0", op="aten._to_copy", mechanism="overflow", samples=(2,))
def unscaled_features_before_a_batch_norm() -> Built:
    """Sample 2 holds 1e6 in FP32; autocast makes Inf of it on the way into the first layer."""
    x = torch.randn(16, 8)
    x[2, 4] = 1e6
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), mlp(8))
    return Built(model=model, batch=x, loss=mean_square)


@fault(
    "fp16",
    "pytorch#115500",
    at=None,
    op={None, "aten._to_copy"},
    mechanism="overflow",
    samples=(2,),
    phase="input",
    mode="cast",
)
def unscaled_features_converted_with_the_model() -> Built:
    """The same batch, converted to FP16 before the model sees it."""
    return unscaled_features_before_a_batch_norm()


@fault(
    "fp16", "Step1X-Edit#53", at="decoder.3", op="aten.convolution", mechanism="overflow", samples=(0, 1), mode="cast"
)
@fault("fp16", "Step1X-Edit#53", at="decoder.3", op="aten.convolution", mechanism="overflow", samples=(0, 1))
def decoder_of_an_autoencoder() -> Built:
    """The third convolution sums 72 products of at least 64 x 16 where its input is 64: 7.4e4 inside."""
    decoder = nn.Sequential(nn.ConvTranspose2d(4, 8, 2, 2), Do(lambda t: t * 0.01 + 64.0), nn.ReLU(),
                            nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))  # fmt: skip
    with torch.no_grad():
        decoder[3].weight.fill_(16.0)
    model = Call(lambda m, z: m.decoder(m.post(z)), post=nn.Conv2d(4, 4, 1), decoder=decoder)
    return Built(model=model, batch=torch.randn(2, 4, 6, 6))


@fault(
    "fp16", "pytorch#109519", at="features.4", op="aten.convolution", mechanism="overflow", samples=(1,), mode="cast"
)
def convolutional_network() -> Built:
    """Sample 1 is ten times brighter: 27 products of 150 x 30 and more, 1.2e5 and up."""
    features = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.AvgPool2d(2), nn.Identity(),
                             nn.Conv2d(3, 16, 3), nn.ReLU())  # fmt: skip
    with torch.no_grad():
        features[0].weight.copy_(torch.eye(3).view(3, 3, 1, 1))
        features[0].bias.zero_()
        features[4].weight.fill_(30.0)
    x = torch.full((3, 3, 12, 12), 15.0)
    x[1] = 150.0
    model = Call(lambda m, x: m.head(m.norm(m.features(x).mean((2, 3)))), features=features, norm=nn.LayerNorm(16),
                 head=nn.Linear(16, 5))  # fmt: skip
    return Built(model=model, batch=x)


@fault("fp16", at="act", op={"aten.pow", "aten.mul"}, mechanism="overflow", samples=(0, 2), mode="cast")
def squared_relu() -> Built:
    """Samples 0 and 2 reach 300 before the activation squares them: 9e4."""
    x = torch.rand(4, 16)
    x[[0, 2], 5] = 300.0
    model = Call(lambda m, x: m.down(m.act(m.up(x))), up=fixed(nn.Linear(16, 16), 1.0),
                 act=Do(lambda t: torch.relu(t).square()), down=nn.Linear(16, 16))  # fmt: skip
    return Built(model=model, batch=x)


@fault("fp16", at="rnn", op=LINEAR | {"aten.add"}, mechanism="overflow", samples=(1,), mode="cast")
@fault("fp16", at="rnn", op=LINEAR | {"aten.add"}, mechanism="overflow", samples=(1,))
def recurrent_growth() -> Built:
    """The state of a ReLU network triples at every step; from 8 it passes 65504 in step 9, from 0.01 it does not."""
    rnn = nn.RNN(8, 8, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        rnn.weight_ih_l0.copy_(torch.eye(8))
        rnn.weight_hh_l0.copy_(3 * torch.eye(8))
        rnn.bias_ih_l0.zero_()
        rnn.bias_hh_l0.zero_()
    x = torch.zeros(3, 10, 8)
    x[:, 0] = 0.01
    x[1, 0] = 8.0
    model = Call(lambda m, x: m.head(m.norm(m.rnn(m.project(x))[0])), project=fixed(nn.Linear(8, 8), 1.0), rnn=rnn,
                 norm=nn.LayerNorm(8), head=nn.Linear(8, 4))  # fmt: skip
    return Built(model=model, batch=x)


@fault(
    "fp16",
    at="conv",
    op={"aten.index_add", "aten.scatter_add", "aten.scatter_reduce"},
    mechanism="overflow",
    mode="cast",
)
def messages_of_a_hub_node() -> Built:
    """1,999 neighbours send 40 each to node 0 of a graph: 8e4."""

    def gather(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])

    def forward(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        return m.head(m.norm(m.conv(m.encode(x), edges)))

    model = Call(forward, encode=fixed(nn.Linear(4, 4), 1.0), conv=Call(gather), norm=nn.LayerNorm(4),
                 head=nn.Linear(4, 3))  # fmt: skip
    edges = torch.stack([torch.arange(1, 2000), torch.zeros(1999, dtype=torch.long)])
    return Built(model=model, batch={"x": torch.full((2000, 4), 40.0), "edges": edges})


@fault("fp16", at="reduce", op="aten.add", mechanism="overflow", samples=(0, 1, 2), mode="cast")
def shards_summed_before_they_are_divided() -> Built:
    """Eight shards of 2e4 each are added before the division by eight; the fourth addition reaches 8e4."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.reduce([shard(x) for shard in m.shards]))

    def reduce(parts: list[Tensor]) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total / len(parts)

    shards = nn.ModuleList(fixed(nn.Linear(8, 8), 0.01, 2e4) for _ in range(8))
    model = Call(forward, shards=shards, reduce=Do(reduce), head=nn.Sequential(nn.LayerNorm(8), mlp(8)))
    return Built(model=model, batch=torch.randn(3, 8))


@fault("fp16", at="experts.2", op=LINEAR, mechanism="overflow", mode="cast")
def one_expert_of_a_mixture() -> Built:
    """Only expert 2 has a large weight, 64 x 32 x 40 = 8e4, and the router sends samples 1 and 3 to it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        choice = x[:, :4].argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(m.experts):
            rows = (choice == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_copy(0, rows, expert(x[rows]))
        return m.head(m.norm(out))

    experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    with torch.no_grad():
        experts[2].weight.fill_(64.0)
    x = torch.full((5, 32), 40.0)
    for row, expert in enumerate((0, 2, 1, 2, 3)):
        x[row, expert] = 41.0
    return Built(model=Call(forward, experts=experts, norm=nn.LayerNorm(32), head=nn.Linear(32, 8)), batch=x)


def _scan(step: float) -> Built:
    x = torch.zeros(3, 6, 8)
    x[1] = step
    scan = Do(lambda t: torch.exp(t.cumsum(1)))
    model = Call(lambda m, x: m.head(m.norm(m.scan(m.dt(x)))), dt=fixed(nn.Linear(8, 8), 1.0), scan=scan,
                 norm=nn.LayerNorm(8), head=nn.Linear(8, 8))  # fmt: skip
    return Built(model=model, batch=x)


@fault("fp16", at="scan", op="aten.exp", mechanism="overflow", samples=(1,), mode="cast")
def selective_scan() -> Built:
    """The cumulative decay of sample 1 reaches 18, and e^18 is 6.6e7."""
    return _scan(3.0)


@fault("bf16", at="scan", op="aten.exp", mechanism="overflow", samples=(1,), precision_related=False, mode="cast")
@fault("fp16", at="scan", op="aten.exp", mechanism="overflow", samples=(1,), precision_related=False)
def selective_scan_beyond_fp32() -> Built:
    """The cumulative decay of sample 1 reaches 96, and e^96 is beyond FP32 too."""
    return _scan(16.0)
