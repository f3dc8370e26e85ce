"""Trains the model of `examples/train_lm.py` on two axes: tensor parallel over `tensor`, fully sharded over `shard`.

    torchrun --standalone --nproc-per-node 4 -m examples.train_2d --tensor 2 --sequence

Each rank along `tensor` has some of the heads, the hidden units and the 256 byte values. Input matrices are sharded by
columns and output matrices by rows, so a block sums over ranks twice: after attention and after the MLP. With
`--sequence`, each rank keeps only its part of the sequence in between, so those activations take less memory. The rows
of a batch are sharded over `shard`, and so are every stage's parameters, as one flat shard that is gathered for use.

The loss curve is that of `train_lm`. At the end, the program prints one step's ledger, and the bytes that a rank sent
along `tensor`, next to a formula. Sources: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al. (2022),
section 4.2.2.
"""

from __future__ import annotations

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from examples import train_lm
from examples.run import Params, Reports, corpus, curve, fit, options, ranks, stretches
from examples.train_lm import Config
from shardfn import P, parallel

SPECS = sf.by_path(
    [
        (r"embed\.tokens", P("tensor")),
        (r"blocks\.\d+\.(q|k|v|gate|up)", P(None, "tensor")),  # whole heads, and hidden units
        (r"blocks\.\d+\.(out|down)", P("tensor")),  # the rows that multiply them
        (r"head\.out", P(None, "tensor")),
        (r"embed\.places|.*norm.?", P()),
    ]
)


def init(config: Config, seed: int) -> Params:
    """The parameters of `train_lm`, with joined matrices separated, so that sharding keeps heads whole."""
    params = train_lm.init(config, seed)
    for p in params["blocks"]:
        p["q"], p["k"], p["v"] = p.pop("qkv").chunk(3, 1)
        p["gate"], p["up"] = p["up"].chunk(2, 1)
    return params


# --- the model: `sequence` is the dimension over which `tensor` shards activations between matrices, or None ---


@sf.stage
def embed(p: Params, tokens: Tensor, sequence: int | None) -> Tensor:
    places = p["places"][: tokens.shape[1]]
    if sequence is not None:
        places = sf.collectives.local_slice(places, "tensor")
    return parallel.embedding(tokens, p["tokens"], "tensor", sequence=sequence) + places


@sf.stage
def block(p: Params, x: Tensor, config: Config, sequence: int | None) -> Tensor:
    h = parallel.to_parallel(normed(x, p["norm1"], sequence), "tensor", sequence=sequence)
    size = config.width // config.heads
    q, k, v = (rearrange(h @ p[name], "b t (head d) -> b head t d", d=size) for name in ("q", "k", "v"))
    attended = rearrange(F.scaled_dot_product_attention(q, k, v, is_causal=True), "b head t d -> b t (head d)")
    x = x + parallel.from_parallel(attended @ p["out"], "tensor", sequence=sequence)
    h = parallel.to_parallel(normed(x, p["norm2"], sequence), "tensor", sequence=sequence)
    return x + parallel.from_parallel((F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], "tensor", sequence=sequence)


@sf.stage
def head(p: Params, x: Tensor, targets: Tensor, sequence: int | None) -> Tensor:
    x = normed(x, p["norm"], sequence)
    return parallel.cross_entropy(x, p["out"], targets, "tensor", sequence=sequence).sum()


def normed(x: Tensor, weight: Tensor, sequence: int | None) -> Tensor:
    if sequence is not None:  # one weight for all ranks, which have different positions
        weight = sf.pvary(weight, "tensor")
    return F.rms_norm(x, x.shape[-1:], weight)


def loss_fn(params: Params, tokens: Tensor, config: Config, sequence: int | None) -> Tensor:
    """Mean cross-entropy, in nats, over the whole batch. Tokens `[batch / shard, context + 1]`."""
    first, *blocks, last = sf.layers([params["embed"], *params["blocks"], params["head"]])
    x = embed(first, tokens[:, :-1], sequence)
    for p in blocks:
        x = block(p, x, config, sequence)
    return sf.psum(head(last, x, tokens[:, 1:], sequence), "shard") / (config.batch * config.context)


# --- the run ---


def formula(config: Config, shard: int, tensor: int, sequence: bool) -> tuple[int, int]:
    """Bytes that a rank sends along `tensor` in a step, forward and backward.

    A gather or scatter of n bytes sends n (s - 1) / s, an all-reduce twice that. A block has two all-reduces each way,
    the embedding one in forward, and the head one in backward; each position also sums three numbers for its
    cross-entropy. With `sequence`, a gather and a scatter replace each all-reduce, and the gradients of norms and
    positions are summed and gathered, since each rank has a part of them.
    """
    places = config.batch // shard * config.context
    norms = 2 * config.layers + 1
    activations = norms * places * config.width
    forward, backward = 2 * activations + 2 * 3 * places, 2 * activations
    if sequence:
        backward += 2 * norms * config.width + config.context * config.width
    share = config.dtype.itemsize * (tensor - 1) / tensor
    return round(forward * share), round(backward * share)


def sent(log: sf.collectives.Ledger) -> tuple[int, int]:
    """The bytes that stages sent along `tensor`; clipping, which sums over all ranks, is not part of a stage."""
    forward, backward = (log.select(axis=("tensor",), backward=way) for way in (False, True))
    return sum(one.bytes for one in forward if one.stage), sum(one.bytes for one in backward if one.stage)


def train(
    config: Config, mesh: DeviceMesh, data: Tensor, steps: int, seed: int, sequence: bool, report: Reports = ()
) -> tuple[list[float], sf.collectives.Ledger]:
    """Trains from scratch; returns the losses, and the ledger of the last step."""

    def loss(params: Params, rows: Tensor) -> Tensor:
        return loss_fn(params, rows.long(), config, 1 if sequence else None)

    params = sf.shard(init(config, seed), mesh, sf.full_shard("shard"), specs=SPECS)
    batches = sf.run.batches(stretches(data, config.context + 1), mesh, "shard", config.batch, seed)
    _, run, log = fit(loss, params, mesh, train_lm.optimizer(config, steps), batches, steps, report)
    return curve(run), log


def main() -> None:
    parser = options("Train a byte-level language model on two axes, shard and tensor.", steps=25)
    parser.add_argument("--tensor", type=int, default=ranks(2), help="ranks that share a matrix (default: %(default)s)")
    parser.add_argument("--sequence", action="store_true", help="shard activations between matrices too")
    args = parser.parse_args()
    mesh, config = sf.make_mesh(device=args.device, shard=-1, tensor=args.tensor), Config()
    _, log = train(config, mesh, corpus()[0], args.steps, args.seed, args.sequence, (sf.run.progress(),))
    if mesh.get_rank() == 0:
        print(log)
        expected = formula(config, mesh["shard"].size(), args.tensor, args.sequence)
        for way, *both in zip(("forward", "backward"), sent(log), expected, strict=True):
            print("a rank sent along tensor, {}: {:.1f} kB, formula {:.1f} kB".format(way, *(n / 1e3 for n in both)))


if __name__ == "__main__":
    main()
