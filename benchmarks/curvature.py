"""Products with derivatives on the schedule of stages, beside a gradient and beside products of composed stages.

    OMP_NUM_THREADS=1 python -m benchmarks.curvature
    OMP_NUM_THREADS=1 python -m benchmarks.curvature --limited
    OMP_NUM_THREADS=1 python -m benchmarks.curvature --peers     # needs curvlinops-for-pytorch and kronfluence

Two ranks, float32: 24 perceptrons with 50 million parameters and few rows, and a transformer with 6 million and 512
tokens a rank, whose memory is activations. Memory is the peak that the operating system gave to a rank
above what it had with the shards of parameters and direction; results, such as a gradient, are a part of it. The C
library returns large blocks at once, so that the system's figure is the memory in use. Time is a rank's processor's.

`--limited`: the largest eigenvalue and the trace of the Hessian of a model whose parameters fit into no rank. The
operating system lets none of 16 ranks have more than 0.8 times their bytes (RLIMIT_DATA), above what it had after it
computed the same of a tiny model. One process fails under this limit; without one, it finds the same numbers.

`--peers` compares with curvlinops, which runs on one process. In float64, a classifier of 276 parameters on two ranks
has the products, eigenvalues and traces that curvlinops finds, and estimates that are as near, and the EK-FAC scores of
training rows that kronfluence finds. In float32, products with 17 million parameters are compared on one process, where
a gather is a copy.
"""

from __future__ import annotations

import importlib.util
import itertools
import resource
import tempfile
from collections.abc import Callable
from typing import Any

import numpy
import optree
import torch
import torch._dynamo  # which torch loads in its first use of forward mode
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfn as sf
from benchmarks.crew import Crew, Usage, status
from benchmarks.model import perceptron
from benchmarks.report import Goal, lacks, parser, publish, save
from shardfn import curvature as sc

RANKS = 2
RETURNS = {"MALLOC_MMAP_THRESHOLD_": "100000"}  # blocks of memory that are freed, to the system
KINDS = {
    "perceptrons": ("gradient", "jvp", "torch.func.jvp", "hvp", "hvp, remat", "hvp by torch.func", "ggn"),
    "transformer": ("gradient", "gradient, remat", "hvp", "hvp, remat", "hvp by torch.func", "ggn"),
}


def attending(p: Any, x: Tensor) -> Tensor:
    h = F.rms_norm(x, x.shape[-1:], p["norm"])
    q, k, v = (h @ p["qkv"]).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]
    return x + F.silu(x @ p["up"]) @ p["down"]


BLOCKS = {"perceptrons": perceptron, "transformer": attending}


def layer(net: str, width: int) -> Callable[[torch.Generator], Any]:
    shapes: dict[str, tuple[int, ...]] = {"up": (width, 4 * width), "down": (4 * width, width)}
    if net == "transformer":
        shapes |= {"norm": (width,), "qkv": (width, 3 * width), "out": (width, width)}
    return lambda g: {name: torch.randn(shape, generator=g) / width**0.5 for name, shape in shapes.items()}


def program(net: str, kind: str, width: int, layers: int) -> Callable[[], Any]:
    mesh = sf.make_mesh(data=RANKS, device="cpu")
    params, v = (sf.init_sharded([layer(net, width)] * layers, seed, mesh, sf.full_shard("data")) for seed in (0, 1))
    x = torch.ones(32, width) if net == "perceptrons" else torch.linspace(-1, 1, 512 * width).view(2, 256, width).sin()
    staged = sf.stage(BLOCKS[net], remat="remat" in kind)

    def outputs(params: Any) -> Tensor:
        y = x
        for p in sf.layers(params):
            y = staged(p, y)
        return y

    def curve(y: Tensor) -> Tensor:
        return sf.psum(y.square().sum(), "data")

    def loss(params: Any) -> Tensor:
        return curve(outputs(params))

    def run(params: Any, v: Any) -> Any:
        if "gradient" in kind:
            return sf.grad(loss)(params)
        if kind == "hvp by torch.func":
            with sdpa_kernel(SDPBackend.MATH):
                return torch.func.jvp(sf.grad(loss), (params,), (v,))
        if "jvp" in kind:
            return (torch.func.jvp if "torch" in kind else sf.jvp)(loss, (params,), (v,))
        return (sc.ggn(outputs, curve, params) if kind == "ggn" else sc.hvp(loss, params)) @ v

    mapped = sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)
    return lambda: mapped(params, v)


def built(usage: Usage, net: str, kind: str, width: int, layers: int, rounds: int) -> dict[str, Callable[..., Any]]:
    program(net, kind, 8, 2)()  # memory of torch's first use does not count
    step = program(net, kind, width, layers)
    usage.base = usage.again()

    return {"measured": lambda: usage.of(step, rounds)}


# --- where no rank has room for all parameters ---


def in_little_memory(usage: Usage, width: int, layers: int, room: float | None) -> dict[str, Callable[..., Any]]:
    torch.set_default_dtype(torch.float64)
    mesh = sf.make_mesh(data=torch.distributed.get_world_size(), device="cpu")
    staged = sf.stage(perceptron)

    def found(width: int, layers: int) -> tuple[float, float, float]:
        maker = layer("perceptrons", width)
        params = sf.init_sharded(
            [lambda g: optree.tree_map(lambda w: w / layers, maker(g))] * layers, 0, mesh, sf.full_shard("data")
        )
        x = torch.linspace(-1, 1, 4 * width).view(4, width).sin()

        def loss(params: Any) -> Tensor:
            y = x
            for p in sf.layers(params):
                y = staged(p, y)
            return sf.psum(y.square().sum(), "data") / mesh.size()

        def run(params: Any) -> tuple[float, float]:
            H = sc.hvp(loss, params)
            return float(sc.top_eig(H, max_basis=3, products=5).values[0]), sc.trace(H, 3, sketch=1).value

        mapped = sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)
        return (*mapped(params), usage.peak() / 1e6)

    found(8, 2)  # memory of torch's first use does not count
    usage.base = usage.again()
    if room is not None:
        limit = int(status("VmData") + room)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return {"found": lambda: found(width, layers)}


def limited(args: Any) -> None:
    width, layers, ranks = 256, 40, 16
    whole = 8.0 * layers * 8 * width**2
    room = 0.8 * whole
    environment = {"MALLOC_MMAP_THRESHOLD_": "100000"}
    with Crew(1, in_little_memory, width, layers, None, environment=environment) as crew:
        eigenvalue, trace, free = crew.turn("found")[0]
    failed = "nothing"
    try:
        with Crew(1, in_little_memory, width, layers, room, environment=environment) as crew:
            crew.turn("found")
    except (RuntimeError, MemoryError) as error:
        failed = str(error)
    with Crew(ranks, in_little_memory, width, layers, room, environment=environment) as crew:
        told = crew.turn("found")
    peak = max(most for _, _, most in told)
    rows: list[dict[str, Any]] = [
        {"": f"{n}, {limit}", "eigenvalue": f"{value:.12g}", "trace": f"{total:.12g}", "MB above the base": most}
        for n, limit, value, total, most in (
            ("1 process", "no limit", eigenvalue, trace, free),
            (f"{ranks} ranks", f"{room / 1e6:.0f} MB each", *told[0][:2], peak),
        )
    ]
    goals = [
        Goal("eigenvalue, from that without a limit", max(abs(e / eigenvalue - 1) for e, _, _ in told), 1e-10),
        Goal("trace, from that without a limit", max(abs(t / trace - 1) for _, t, _ in told), 1e-10),
        Goal("bytes of all parameters / those that a rank may have", whole / room, 1, "at least"),
        Goal("memory of a rank / bytes of all parameters", peak / (whole / 1e6), 0.8),
        Goal("one process under the limit fails for want of memory", float("allocate memory" in failed), 1, "at least"),
    ]
    publish(f"Hessian of {whole / 1e6:.0f} MB of parameters; one process says: {failed[:90]}", rows, goals, args.json)


# --- beside curvlinops: a classifier, which is a pure function for us and a module for it ---

CLASSES = 5


def classified(stage: Any, params: Any, x: Tensor) -> Tensor:
    for p in sf.layers(params["layers"]):
        x = stage(perceptron)(p, x)
    logits: Tensor = stage(lambda p, x: x @ p["out"])(params["head"], x)
    return logits


def classifier(width: int, layers: int) -> Any:
    head = {"head": lambda g: {"out": torch.randn(width, CLASSES, generator=g) / width**0.5}}
    return {"layers": [layer("perceptrons", width)] * layers} | head


def rows_of(width: int, rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.randn(rows, width, generator=g), torch.randint(0, CLASSES, (rows,), generator=g)


class Module(torch.nn.Module):
    """The classifier with whole parameters, in the order of our tree."""

    def __init__(self, params: Any) -> None:
        super().__init__()
        leaves, self.tree = optree.tree_flatten(params)
        self.leaves = torch.nn.ParameterList(leaves)

    def forward(self, x: Tensor) -> Tensor:
        return classified(lambda f: f, optree.tree_unflatten(self.tree, list(self.leaves)), x)


def peer_operator(kind: str, width: int, layers: int, rows: int, **more: Any) -> tuple[Any, list[Tensor]]:
    """A matrix of the mean loss by curvlinops, and a direction."""
    import curvlinops

    made = {
        "hvp": curvlinops.HessianLinearOperator, "ggn": curvlinops.GGNLinearOperator,
        "fisher": curvlinops.FisherMCLinearOperator, "empirical fisher": curvlinops.EFLinearOperator,
    }[kind]  # fmt: skip
    module = Module(sf.init(classifier(width, layers), 0))
    v = optree.tree_leaves(sf.init(classifier(width, layers), 1))
    mean = torch.nn.CrossEntropyLoss()
    params = list(module.leaves)
    return made(module, mean, params, [rows_of(width, rows)], check_deterministic=False, **more), v


def our_operator(kind: str, width: int, layers: int, rows: int) -> tuple[Any, Any, Any, Any]:
    """The mesh, parameters, a direction, and what makes a matrix of the mean loss of parameters."""
    mesh = sf.make_mesh(data=torch.distributed.get_world_size(), device="cpu")
    params, v = (sf.init_sharded(classifier(width, layers), seed, mesh, sf.full_shard("data")) for seed in (0, 1))
    x, y = (each.chunk(mesh.size())[mesh.get_rank()] for each in rows_of(width, rows))

    def outputs(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return classified(sf.stage, params, x)

    def each(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="none")

    def curve(logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return sf.psum(each(logits, y).sum(), "data") / rows

    def labels(logits: Tensor, x: Tensor, y: Tensor) -> Any:
        return torch.distributions.Categorical(logits=logits)

    def of(params: Any, drawn: Any = "expected") -> Any:
        batches = [(x, y)]
        if kind == "hvp":
            return sc.hvp(lambda p, x, y: curve(outputs(p, x, y), x, y), params, batches)
        if kind == "ggn":
            return sc.ggn(outputs, curve, params, batches)
        if kind == "fisher":
            return sc.fisher(outputs, labels, params, batches, labels=drawn) / rows
        return sc.empirical_fisher(lambda p, x, y: each(outputs(p, x, y), y), params, batches) / rows

    return mesh, params, v, of


def ours_exactly(usage: Usage, width: int, layers: int, rows: int) -> dict[str, Callable[..., Any]]:
    torch.set_default_dtype(torch.float64)

    def of(kind: str, estimated: int) -> dict[str, Any]:
        mesh, params, v, make = our_operator(kind, width, layers, rows)

        def run(params: Any, v: Any) -> Any:
            A = make(params)
            found = {"product": A @ v, "top": sc.top_eig(A, 2, tolerance=1e-13).values}
            found["trace"] = sc.trace(A, A.space.size() * 2 + 1, sketch=A.space.size()).value
            found["estimates"] = [sc.trace(A, estimated, seed=seed).value for seed in range(TRIALS)]
            found["diagonals"] = [sc.diag(A, estimated, seed=seed) for seed in range(TRIALS)]
            if kind == "fisher":
                found["drawn"] = []
                for trial in range(TRIALS):
                    torch.manual_seed(mesh.size() * trial + mesh.get_rank())
                    found["drawn"].append(make(params, DRAWS) @ v)
            return found

        found = sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)(params, v)
        trees = {name: found.pop(name) for name in ("diagonals", "drawn") if name in found}
        trees["product"] = [found.pop("product")]
        return found | {name: [vector(sf.unshard(tree)) for tree in each] for name, each in trees.items()}

    return {"found": of}


TRIALS, DRAWS = 3, 16


def vector(tree: Any) -> Any:
    return torch.cat([x.detach().flatten() for x in optree.tree_leaves(tree)]).numpy()


def exactly(products: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Rows and goals of what is found in float64."""
    import curvlinops
    import scipy.sparse.linalg

    sizes = 4, 2, 16
    torch.set_default_dtype(torch.float64)
    rows, goals = [], []
    with Crew(RANKS, ours_exactly, *sizes, environment=RETURNS) as crew:
        for kind in ("hvp", "ggn", "fisher", "empirical fisher"):
            # With cross-entropy, the Fisher matrix is the Gauss-Newton matrix, which curvlinops finds without draws.
            A, v = peer_operator("ggn" if kind == "fisher" else kind, *sizes)
            found = crew.turn("found", kind, products)[0]
            flat = torch.cat([x.flatten() for x in v])
            dense = (A @ torch.eye(len(flat))).detach().numpy()
            norm = numpy.linalg.norm(dense, 2)
            top = scipy.sparse.linalg.eigsh(A.to_scipy(), 2, which="LM", tol=0, return_eigenvectors=False)
            top = sorted(top, key=abs, reverse=True)
            torch.manual_seed(0)
            theirs = [float(curvlinops.hutchpp_trace(A, products)) for _ in range(TRIALS)]
            diagonals = [curvlinops.hutchinson_diag(A, products).detach().numpy() for _ in range(TRIALS)]
            exact = dense.diagonal()

            def near(each: Any, truth: Any) -> float:
                return float(numpy.sqrt(numpy.mean([numpy.square(x - truth).sum() for x in map(numpy.array, each)])))

            apart = {
                "product": near(found["product"], (A @ flat).detach().numpy()) / (norm * float(flat.norm())),
                "two eigenvalues": float(numpy.abs(found["top"].numpy() - top).max() / norm),
                "trace": abs(found["trace"] - exact.sum()) / norm,
            }
            ratios = {
                "error of a Hutch++ trace / theirs": near(found["estimates"], exact.sum()) / near(theirs, exact.sum()),
                "error of a diagonal / theirs": near(found["diagonals"], exact) / near(diagonals, exact),
            }
            if kind == "fisher":
                drawn = [
                    (peer_operator(kind, *sizes, mc_samples=DRAWS, seed=seed)[0] @ flat).detach().numpy()
                    for seed in range(TRIALS)
                ]
                exactly_it = (A @ flat).detach().numpy()
                goals.append(
                    Goal(
                        "fisher: error of a product with drawn labels / theirs",
                        near(found["drawn"], exactly_it) / near(drawn, exactly_it),
                        3,
                    )
                )
            rows.append({"": kind} | {name: f"{value:.1e}" for name, value in apart.items()} | ratios)
            goals += [Goal(f"{kind}: {name}, from curvlinops'", value, 1e-12) for name, value in apart.items()]
            goals += [Goal(f"{kind}: {name}", value, 3) for name, value in ratios.items()]
    return rows, goals


# --- beside kronfluence: influence of training rows ---

QUERIES, DAMPING = 3, 1e-2


def scored(usage: Usage, width: int, layers: int, rows: int) -> dict[str, Callable[..., Any]]:
    torch.set_default_dtype(torch.float64)
    mesh = sf.make_mesh(data=RANKS, device="cpu")
    params = sf.init_sharded(classifier(width, layers), 0, mesh, sf.full_shard("data"))
    x, y = rows_of(width, rows)
    own = [tuple(each.chunk(RANKS)[mesh.get_rank()] for each in (x, y))]

    def losses(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(classified(sf.stage, params, x), y, reduction="none")

    def run() -> Any:
        fitted = sc.ekfac(losses, params, own)
        gradients = [
            sf.grad(lambda p, i=i: losses(p, x[i : i + 1], y[i : i + 1]).sum())(params) for i in range(QUERIES)
        ]
        queries = [optree.tree_map(lambda g: g / RANKS, each) for each in gradients]  # all ranks have these rows
        return sc.influence(lambda q: fitted.solve(q, DAMPING), queries, losses, params, own).numpy()

    return {"scores": run}


def scores_of_kronfluence(width: int, layers: int, rows: int) -> Any:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    def loss(task: Any, batch: Any, model: Any, sample: bool = False) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def linear(w: Tensor) -> torch.nn.Module:
        made = torch.nn.Linear(w.shape[0], w.shape[1], bias=False)
        made.weight.data = w.T.clone()
        return made

    class Network(torch.nn.Module):
        def __init__(self, params: Any) -> None:
            super().__init__()
            self.up, self.down = (torch.nn.ModuleList(linear(p[k]) for p in params["layers"]) for k in ("up", "down"))
            self.out = linear(params["head"]["out"])

        def forward(self, x: Tensor) -> Tensor:
            for up, down in zip(self.up, self.down, strict=True):
                x = x + down(torch.tanh(up(x)))
            logits: Tensor = self.out(x)
            return logits

    exact = dict.fromkeys(("activation_covariance_dtype", "gradient_covariance_dtype", "lambda_dtype"), torch.float64)
    alike = dict.fromkeys(("precondition_dtype", "score_dtype"), torch.float64)
    each: Any = {"per_sample_gradient_dtype": torch.float64}
    trained, asked = (torch.utils.data.TensorDataset(*[z[:n] for z in rows_of(width, rows)]) for n in (rows, QUERIES))
    task = type("Classifying", (Task,), {"compute_train_loss": loss, "compute_measurement": loss})()
    model = prepare_model(Network(sf.init(classifier(width, layers), 0)), task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("scores", model, task, cpu=True, disable_tqdm=True, output_dir=folder)
        factors = FactorArguments(use_empirical_fisher=True, **exact, **each)
        analyzer.fit_all_factors("factors", trained, per_device_batch_size=rows, factor_args=factors)
        analyzer.compute_pairwise_scores(
            "scores", "factors", asked, trained, per_device_query_batch_size=1, per_device_train_batch_size=rows,
            score_args=ScoreArguments(damping_factor=DAMPING, **alike, **each),
        )  # fmt: skip
        return analyzer.load_pairwise_scores("scores")["all_modules"].numpy()


def influences() -> list[Goal]:
    sizes = 4, 2, 16
    torch.set_default_dtype(torch.float64)
    with Crew(RANKS, scored, *sizes, environment=RETURNS) as crew:
        ours = numpy.concatenate(crew.turn("scores"), 1)
    theirs = scores_of_kronfluence(*sizes)
    apart = numpy.linalg.norm(ours - theirs) / numpy.linalg.norm(theirs)
    return [Goal("influence: EK-FAC scores, from kronfluence's", float(apart), 1e-12)]


def beside(usage: Usage, whose: str, kind: str, width: int, layers: int, rows: int, rounds: int) -> Any:
    def product(width: int, layers: int) -> Callable[[], Any]:
        if whose == "curvlinops":
            A, v = peer_operator(kind, width, layers, rows)
            return lambda: A @ v
        mesh, params, v, of = our_operator(kind, width, layers, rows)
        mapped: Any = sf.shard_map(lambda p, v: of(p) @ v, mesh=mesh, in_specs=..., out_specs=..., check=False)
        return lambda: mapped(params, v)

    product(8, 2)()  # memory of torch's first use does not count
    step = product(width, layers)
    usage.base = usage.again()
    return {"measured": lambda: usage.of(step, rounds)}


def peers(args: Any) -> None:
    if missing := [name for name in ("curvlinops", "kronfluence") if importlib.util.find_spec(name) is None]:
        lacks(f"{', '.join(missing)} missing: pip install curvlinops-for-pytorch kronfluence")
    rows, goals = exactly(products=60)
    goals += influences()
    publish(
        f"float64, {RANKS} ranks: distance from curvlinops on one process, over the matrix's norm", rows, goals, None
    )
    torch.set_default_dtype(torch.float32)
    timed: list[dict[str, Any]] = []
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for kind, batch in itertools.product(("hvp", "ggn", "empirical fisher"), (32, 256)):
        for whose in ("shardfn", "curvlinops"):
            given = whose, kind, args.width, args.layers // 3, batch, args.rounds
            with Crew(1, beside, *given, environment=RETURNS) as crew:
                found[whose, kind] = crew.turn("measured")[0]
            peak, took = found[whose, kind]
            timed.append({"": f"{kind}, {batch} rows: {whose}", "MB above parameters": peak, "CPU ms": took})
        for i, what in enumerate(("memory", "time")):
            ratio = found["shardfn", kind][i] / found["curvlinops", kind][i]
            goals.append(Goal(f"{what} of a product with {kind}, {batch} rows / curvlinops'", ratio, 1.1))
    publish("one process, float32", timed, goals, None)
    save([*rows, *timed], goals, args.json)


def main() -> None:
    options = parser("Memory and time of jvp and Hessian-vector products, beside a gradient's.")
    options.add_argument("--limited", action="store_true", help="only where no rank has room for all parameters")
    options.add_argument("--peers", action="store_true", help="only beside curvlinops, which must be installed")
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    if args.limited:
        return limited(args)
    if args.peers:
        return peers(args)
    sizes = {"perceptrons": (args.width, args.layers), "transformer": (args.width // 2, args.layers // 3)}
    found: dict[tuple[str, str], tuple[float, ...]] = {}
    rows = []
    for net, kinds in KINDS.items():
        for kind in kinds:
            given = net, kind, *sizes[net], args.rounds
            with Crew(RANKS, built, *given, environment=RETURNS) as crew:
                found[net, kind] = tuple(max(each) for each in zip(*crew.turn("measured"), strict=True))
            (peak, took), base = found[net, kind], found[net, "gradient"]
            rows.append(
                {
                    "": f"{net}: {kind}",
                    "MB above shards": peak,
                    "of the gradient's": peak / base[0],
                    "CPU ms": took,
                    "of its": took / base[1],
                }
            )

    def ratio(net: str, kind: str, what: int, under: str = "gradient") -> float:
        return found[net, kind][what] / found[net, under][what]

    goals = [
        Goal("memory of a Hessian-vector product / the gradient's", ratio("perceptrons", "hvp", 0), 2),
        Goal("time of a Hessian-vector product / the gradient's", ratio("perceptrons", "hvp", 1), 2.5),
        Goal("memory of a Gauss-Newton product / the gradient's", ratio("perceptrons", "ggn", 0), 2),
        Goal("time of a Gauss-Newton product / the gradient's", ratio("perceptrons", "ggn", 1), 2.5),
        Goal("memory of a forward's jvp / the gradient's", ratio("perceptrons", "jvp", 0), 1),
        Goal("transformer: memory of a Hessian-vector product / the gradient's", ratio("transformer", "hvp", 0), 2),
        Goal("transformer: the same, both with remat", ratio("transformer", "hvp, remat", 0, "gradient, remat"), 2),
        Goal("transformer: memory of a Gauss-Newton product / the gradient's", ratio("transformer", "ggn", 0), 2),
        Goal("transformer: time of a Hessian-vector product / the gradient's", ratio("transformer", "hvp", 1), 2.5),
    ]
    publish(f"derivatives of a loss, {RANKS} ranks", rows, goals, args.json)


if __name__ == "__main__":
    main()
