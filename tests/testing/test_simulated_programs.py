"""What plain PyTorch does on the simulated device, with and without numbers."""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import shardfn as sf
from shardfn.compat import dynamo
from shardfn.testing import simulated, world
from tests.plan import foreign
from tests.refusals import told


def filled(x: Tensor, index: Any) -> Tensor:
    x = x.clone()
    x[index] = 1.0
    return x


PLAIN: dict[str, Callable[[Tensor], Any]] = {
    "rows of a list": lambda x: x[[0, 2]],
    "columns of a list": lambda x: x[:, [-1]],
    "rows of a range": lambda x: x[range(2)],
    "a nested list": lambda x: x[:, [[0, 1], [2, 3]]],
    "rows of a list, written": lambda x: filled(x, [0]),
    "a new tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "a list as tensor": lambda x: torch.as_tensor([1.0, 2.0], device=x.device),
    "a list as array": lambda x: torch.asarray([1.0, 2.0], device=x.device),
    "a tensor of tensors": lambda x: torch.tensor([x.sum(), x.mean()], device=x.device),
    "an orthogonal weight": lambda x: parametrizations.orthogonal(nn.Linear(4, 4, device=x.device))(x),
}


def shapes() -> dict[str, tuple[list[int], str]]:
    with sf.plan.mode(2):
        found = {name: f(torch.randn(4, 4)) for name, f in PLAIN.items()}
        return {name: (list(x.shape), x.device.type) for name, x in found.items()}


def with_values() -> dict[str, Tensor]:
    x = torch.arange(16.0).view(4, 4)
    with simulated(values=True) as device:
        y = x.to(device.name)
        return {name: f(y).cpu() for name, f in PLAIN.items() if "weight" not in name}


def test_tensors_of_lists_are_made_on_the_device() -> None:
    x = torch.arange(16.0).view(4, 4)
    wanted = {name: (list(f(x).shape), "sim") for name, f in PLAIN.items()}
    assert world(1, "alone").run(shapes) == [wanted]
    [found] = world(1, "alone").run(with_values)
    for name, value in found.items():
        torch.testing.assert_close(value, PLAIN[name](x), msg=name)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: nn.GRU(4, 3, 2, bidirectional=True),
    "GRU without biases": lambda: nn.GRU(4, 3, bias=False),
    "GRU cell": lambda: nn.GRUCell(4, 3),
    "LSTM": lambda: nn.LSTM(4, 3, 2),
    "LSTM without biases": lambda: nn.LSTM(4, 3, bias=False),
    "LSTM cell": lambda: nn.LSTMCell(4, 3),
}


def derived(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def of_cells(device: str) -> dict[str, list[Tensor]]:
    torch.manual_seed(0)
    modules = {name: make().double() for name, make in CELLS.items()}
    inputs = {name: torch.randn((5, 4) if "cell" in name else (5, 2, 4), dtype=torch.float64) for name in CELLS}
    if device == "cpu":
        return {name: derived(modules[name], inputs[name]) for name in CELLS}
    with simulated(values=device == "values") as sim:
        found = {name: derived(copy.deepcopy(modules[name]).to(sim.name), inputs[name].to(sim.name)) for name in CELLS}
        return {name: [x.cpu() for x in each] for name, each in found.items()}


def test_recurrent_cells() -> None:
    wanted = of_cells("cpu")
    [shaped], [valued] = (world(1, "alone").run(of_cells, how) for how in ("shapes", "values"))
    for name, each in wanted.items():
        assert [x.shape for x in shaped[name]] == [x.shape for x in each]
        for x, y in zip(valued[name], each, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def reads() -> tuple[list[str], list[tuple[str, int]]]:
    with sf.plan.mode(2) as device:
        loss = nn.Parameter(torch.ones(3)).sum()
        texts = [f"{loss:.3f}", f"{loss}", f"{torch.ones((), dtype=torch.int64):>3}"]
        texts += [str(torch.allclose(loss, loss)), str(torch.equal(loss, loss))]
        return texts, [(wait.kind, wait.times) for wait in device.synchronizations]


def test_what_is_formatted_or_compared_is_read() -> None:
    [(texts, waits)] = world(1, "alone").run(reads)
    assert texts == ["1.000", "1.0", "  1", "True", "True"]
    assert sorted(waits) == [("allclose", 1), ("equal", 1), ("item", 3)]


def doubtful(params: Any) -> Tensor:
    return torch.unique(params["w"])


def endless(params: Any) -> Tensor:
    x: Tensor = params["w"]
    while x.sum() > 0.5:
        x = x / 2
    return x


class Doubtful:
    def __deepcopy__(self, _: Any) -> Any:
        return torch.unique(torch.ones(3))


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return torch.unique(ct)


def refusals() -> dict[str, str]:
    where, host = torch.zeros(2, 3, dtype=torch.int64), torch.ones(3, 3)
    calls: dict[str, Callable[[], Any]] = {
        "sparse": lambda: torch.ones(3, 3).to_sparse(),
        "compressed": lambda: torch.ones(3, 3).to_sparse_csr(),
        "of indices": lambda: torch.sparse_coo_tensor(where.to("sim"), torch.ones(3), (4, 4)),
        "an embedding": lambda: nn.Embedding(4, 4, sparse=True)(torch.zeros(2, dtype=torch.int64)),
        "a bag": lambda: nn.EmbeddingBag(4, 4, sparse=True)(torch.zeros(2, 2, dtype=torch.int64)),
        "sizes by numbers": lambda: torch.unique(torch.ones(3)),
        "on the host": lambda: torch.ones(3, 3) @ host,
        "copied": lambda: copy.deepcopy(Doubtful()),
        "in a stage": lambda: sf.plan.step(lambda p: sf.stage(doubtful)(p), params),
        "in a stage's backward": lambda: sf.plan.step(
            lambda p: sf.grad(lambda p: sf.stage(Late.apply)(p["w"]).sum())(p), params
        ),
        "a loop by numbers": lambda: sf.plan.step(lambda p: sf.stage(endless)(p), params),
    }
    with sf.plan.mode(2):
        params = sf.init_sharded({"w": lambda g: torch.ones(4, 4)}, 0, sf.make_mesh(shard=2), sf.full_shard("shard"))
        return {name: told(call) for name, call in calls.items()}


def test_what_is_not_simulated_is_told_with_its_line() -> None:
    [found] = world(1, "alone").run(refusals)
    for name, message in found.items():
        start = {"on the host": "RuntimeError: aten::mm", "a loop by numbers": "NotImplementedError: item"}
        assert message.startswith(start.get(name, "NotImplementedError: aten::")), (name, message)
        assert " at test_simulated_programs.py:" in message, (name, message)


def on_threads() -> tuple[list[str], list[int], int]:
    def layers(x: Tensor) -> Tensor:
        w = torch.ones(8, 8, device=x.device, requires_grad=True)
        for _ in range(30):
            w = w @ x[:, [*range(8)]] * 0.1
        w.sum().backward()
        return w

    early, start, flops = ThreadPoolExecutor(1), threading.Barrier(4), []
    early.submit(lambda: None).result()

    def together(_: int) -> str:
        start.wait()
        return layers(torch.ones(8, 8, device="sim")).device.type

    for threads in (early, ThreadPoolExecutor(1)):
        for _ in range(2):  # a thread from the first block is in the second, too
            with sf.plan.mode(2):
                flops.append(
                    sf.plan.step(lambda x, on: on.submit(layers, x).result(), torch.ones(8, 8), threads).flops()
                )
                with ThreadPoolExecutor(4) as pool:
                    kinds = list(pool.map(together, range(4)))
            assert threads.submit(lambda: torch.ones(3).sum().item()).result() == 3
    return kinds, flops, 30 * 2 * 2 * 8**3


def test_threads_use_the_device_at_once_also_those_from_before() -> None:
    [(kinds, flops, wanted)] = world(1, "alone").run(on_threads)
    assert kinds == ["sim"] * 4
    assert flops == [wanted] * 4


def loaded(folder: str) -> list[set[Any]]:
    import transformers

    config = transformers.AutoConfig.for_model("llama", **foreign.LLAMA | {"num_hidden_layers": 8})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with sf.plan.mode(2):
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return [{x.device.type for x in model.parameters()}, {x.dtype for x in model.parameters()}]


def test_a_model_is_loaded_by_threads(tmp_path: Path) -> None:
    assert world(1, "alone").run(loaded, str(tmp_path)) == [[{"sim"}, {torch.bfloat16}]]


def left() -> tuple[bool, bool, bool, bool]:
    state, hook, default = random.getstate(), sys.excepthook, dict(vars(dynamo.FAKE))
    for _ in range(2):
        with sf.plan.mode(2):
            sf.make_mesh(shard=2)
            torch.distributed.all_reduce(torch.ones(3))
            random.random()
    unchanged = dict(vars(dynamo.FAKE)) == default
    return random.getstate() == state, sys.excepthook is hook, unchanged, "run" in vars(threading.Thread)


def test_nothing_is_left_of_a_block() -> None:
    assert world(1, "alone").run(left) == [(True,) * 4]
